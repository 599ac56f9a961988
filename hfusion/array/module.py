"""The fused module: the stacked tensors under the members' own names, and the programs that compute with them."""

from __future__ import annotations

import functools
import operator
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.array.array_editing import Array, ArrayState, check_valued, mark_tensors, rearrange
from hfusion.array.gathered_rows import slice_of
from hfusion.array.member_views import Views, check_together, differing_members, evaluating, own_modes, unfused
from hfusion.array.module_tree import STATE, Tree, array_of_method, grow, method_names, modules_by_path
from hfusion.array.per_model import hinting, note_call
from hfusion.array.unfused_calls import plain_stacks, run_members, run_ragged, run_transformed, untraced
from hfusion.array.variable_states import Situations
from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.export_context import apart
from hfusion.capture.fallback_runtime import Unforeseen
from hfusion.capture.reachable_code import searched_once
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import live_rows, materialize
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import ArraySpec, Compiled, bind
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.fill_scalars import OperatorTrace
from hfusion.compiler.fusion_report import FusionReport, describe
from hfusion.compiler.verify import CheckedArray, verify
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import FusionError, KeepsState, NotCaptured
from hfusion.core.exclusive import tracing
from hfusion.core.member_table import check_once, copied, kept_rows, rows_of
from hfusion.core.program import Kind
from hfusion.core.stages import RECHECKED
from hfusion.ops.rule import hint
from hfusion.optim import coupling
from hfusion.passes.side_effects import FailedCheck
from hfusion.torch_private.dispatch_modes import in_transform, outside_transforms, unwrapped
from hfusion.torch_private.export_state import exporting, outside_export, outside_trace


class FusedModule(Tree):
    """B models of one shape as one module; created by `hfusion.fuse` and `hfusion.build`.

    ``fused(x)`` returns the members' outputs for ``x``, every tensor with a leading dim of B. The state dict has the
    members' keys, each value stacked: ``[B, *shape]``. A tensor that is one object in all members is stored once,
    without B.
    """

    def __init__(self, array: Array, stacks: Mapping[str, Tensor]) -> None:
        super().__init__(type(array.skeletons[0]).__name__)
        self._array = array
        grow(self, array.skeletons, stacks)
        self._prepare()

    def _prepare(self) -> None:
        """Initialize everything that is derived from the tensors and the array."""
        self._branches = [module for _, module in self.named_modules()]
        # The member and the key of the parameters of original models.
        self._origins = WeakIdKeyDictionary()
        self._states: dict[Any, ArrayState] = {}
        self._number = 0
        self._situations = Situations()
        self._has_warned = False
        self._compiler = self._new_compiler()
        self._views = Views()
        # By the kind of a call, why it has no program for padded batches; and whether batches were padded.
        self._refusals: dict[Any, str] = {}
        self._has_padded = False
        self._loops: dict[str, None] = {}
        # The operators of members, from which programs are derived.
        self._traces: dict[Any, OperatorTrace | None] = {}
        # By the name of a method, the array whose forward it is, and the members that it was made for.
        self._methods: dict[str, tuple[tuple[Array, Any], FusedModule]] = {}
        # Whether the members of another array are computed, whose own objects keep their Python state; and whether
        # by another method, which that array loops over if it cannot be captured.
        self._is_part = self._is_method = False
        self._idle = frozenset[int]()  # Members that loops leave out of a call.
        # Called with each new program, before it runs.
        self._on_program: Callable[[Compiled], object] = lambda compiled: None
        self._find_program_name = finder(self, self._traced)
        # Not a decorator, which would import Dynamo with this file.
        self._untraced = torch.compiler.disable(untraced)
        self._mark()
        coupling.watch()
        self._own_branches(self._array)

    def _own_branches(self, array: Array) -> None:
        modules = modules_by_path(array.skeletons)
        for path, module in self.named_modules():
            overrides = any(map(own_modes, modules[path]))
            object.__setattr__(module, "_array_position", (weakref.ref(self), path, overrides))

    def _new_compiler(self) -> Compiler:
        array, looped = self._array, self._situations.looped
        variants, shared = array.comparison.variants, array.comparison.shared
        spec = ArraySpec(self._original, array.members, variants, shared, self._member, looped=looped)
        return Compiler(spec)

    def _mark(self) -> None:
        mark_tensors(self._array, dict(tensors(self)))
        # An export temporarily replaces these tensors.
        self._real = weakref.WeakValueDictionary(tensors(self))

    def __len__(self) -> int:
        return self._array.members

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[i] for i in range(len(self)))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute all members.

        Args: those of the members' forward. A tensor is passed to every member; `hfusion.stacked` gives each its own.

        Returns: the output of the members' forward, each tensor ``[B, *shape]``.

        Raises:
            FusionError: forward cannot be fused, or the self-check failed.
            ValueError: a stacked input's leading size is not B, or the members' forward rejects the arguments.
        """
        if torch.compiler.is_dynamo_compiling():
            # A trace does not see what is done to members that were handed out.
            if self._views.exposed:
                return self._untraced(self.forward, *args, **kwargs)
            return inline(self, self._find_program_name, self._pattern(), args, kwargs)
        if exporting():
            return exported(self, self._exportable, args, kwargs)
        arguments = Arguments.of(args, kwargs)
        try:
            split = self._split(calling=True)
            if split:
                return run_members(self, arguments, split)
            if arguments.ragged:
                output = run_ragged(self, arguments)
                note_call(self)
                return output
            compiled = self._program(arguments)
        except NotCaptured as error:
            return self._uncaptured(arguments, error)
        run = compiled.found.runs.get(self)
        if run is None:
            run = compiled.found.runs[self] = bind(compiled, self)
        try:
            if not compiled.found.check or RECHECKED:
                self.check_due(compiled, arguments)
            if in_transform():
                output = run_transformed(compiled, run, arguments, functools.partial(run_members, self, arguments))
            else:
                output = run(arguments.values)
        except FailedCheck as error:
            # A member raises its own error. If none does, the caller of a submodule catches it.
            return self._uncaptured(arguments, NotCaptured(str(error)))
        except Unforeseen as error:
            self._compiler.distrust(self._modes(arguments), arguments, compiled, str(error))
            return self.forward(*args, **kwargs)
        if compiled.modes:
            self._leave(compiled)
        note_call(self)
        return output

    def _uncaptured(self, arguments: Arguments, error: NotCaptured) -> Any:
        """Run a call that cannot be captured, or whose forward changes Python state, as the members' own code."""
        if self._is_method:
            raise error
        if not isinstance(error, KeepsState):
            return run_members(self, arguments, str(error))
        if self._is_part:
            raise FusionError(f"{error}. Call the members together, by their forward and without memory=") from error
        if common := sorted(error.names & self._array.comparison.common):
            raise FusionError(f"{error}. Models share {common[0]}: give each its own, by copy.deepcopy") from None
        return run_members(self, arguments, str(error))

    def call(self, method: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call another method of the members in the same way as forward; ``fused.method(...)`` is equivalent.

        Args: as of `forward`.

        Returns: the results of the members' method, each tensor ``[B, *shape]``.

        Raises:
            FusionError: the members' class defines no such method, or its results cannot be joined.
        """
        if method == "forward":
            return self(*args, **kwargs)
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(self.call, method, *args, **kwargs)
        names = method_names(self._array.skeletons[0])
        if method not in names:
            described = ", ".join(sorted(names)) or "none"
            raise FusionError(f"{self._original} has no method {method} of its own that computes; it has {described}")
        # A method that is new may read attributes that nothing has read so far.
        made_for, array = self._methods.get(method, ((None, None), self))
        why = self._split(calling=made_for[0] is self._array)
        held = (*self._array.skeletons, *(view.model for view in self._views.members.values()))
        if not why and any(not vars(model).keys().isdisjoint((method, "forward")) for model in held):
            why = f"members have a {method} or forward of their own"
        if why:
            return run_members(self, Arguments.of(args, kwargs), why, method)
        current = self._array, getattr(type(held[0]), method)
        if made_for != current:
            array = array_of_method(self, method)
            self._methods[method] = current, array
        array.training = self.training
        try:
            output = array.forward(*args, **kwargs)
        except NotCaptured as error:
            return run_members(self, Arguments.of(args, kwargs), str(error), method)
        self.training = array.training
        return output

    def fingerprint(self) -> Any:
        """Return all that forward depends on besides tensors and modes, hashable: for models that contain an array."""
        array = self._array
        members = tuple((type(skeleton), modeless_fingerprint(skeleton)) for skeleton in array.skeletons)
        return array.members, members, array.comparison

    def __getattr__(self, name: str) -> Any:
        array = self.__dict__.get("_array")
        if array is not None and name in method_names(array.skeletons[0]):
            return functools.partial(self.call, name)
        return super().__getattr__(name)

    def _split(self, calling: bool = False) -> str:
        """Return why members run their own code; empty if all are computed together."""
        return self._views.heed(self, calling) if self._views.exposed else ""

    def _leave(self, compiled: Compiled) -> None:
        """Adopt the train and eval modes that forward sets."""
        for path, training in compiled.modes.items():
            self.get_submodule(path).training = training

    def steady(self, arguments: Arguments) -> Compiled:
        """Return the program for a call and for the calls after it, in the modes that the first one leaves.

        Raises:
            FusionError: forward changes modes, and its results with them.
        """
        first = self.compiled(arguments)
        if not first.modes:
            return first
        self._leave(first)
        second = self.compiled(arguments)
        if second.modes or str(second.graph) != str(first.graph):
            raise FusionError(
                f"forward of {self._original} leaves {next(iter(first.modes)) or '(root)'} in another mode, so that "
                "its next call computes something else; set modes before training"
            )
        return second

    def check_due(self, compiled: Compiled, arguments: Arguments) -> None:
        """Run the self-check of a program at its first call in training, and at those that are checked again."""
        compiled.found.calls += 1
        if again := RECHECKED > 0 and compiled.found.calls % RECHECKED == 0:
            compiled.found.check = ""
        if again or (self.training and torch.is_grad_enabled()):
            self.check(compiled, arguments)

    def _traced(self, arguments: Arguments) -> Compiled:
        """Return the checked program for a call that Dynamo traces. Dynamo traces again if modes have changed."""
        check_together(self, "torch.compile")
        compiled = self._program(arguments)
        self.check_due(compiled, arguments)
        self._leave(compiled)
        return compiled

    def planned_for(self, device: torch.device) -> None:
        """Capture calls of other sizes separately from now on, so that programs have the operators that a plan counts.

        Programs are lowered for ``device``, wherever the tensors are now.
        """
        compiler, device_types = self._compiler, {tensor.device.type for _, tensor in tensors(self)}
        compiler.opens, target = False, None if device_types | {device.type} == {"cpu"} else device
        if compiler.subject.device != target:
            compiler.subject = replace(compiler.subject, device=target)
            compiler.clear()

    @property
    def stacks(self) -> dict[str, Tensor]:
        """The array's own tensors by key, even while other tensors temporarily replace them."""
        return dict(self._real)

    def why_no_program(self, arguments: Arguments) -> str:
        """Return why a call that has just run left no program of all members."""
        if split := self._split(calling=True):
            return f"members are computed apart: {split}"
        unknown = "forward changes variables that it names, of files or objects, whose values a program keeps"
        return arguments.obstacle or next(reversed(self._loops), unknown)

    def find(self, arguments: Arguments) -> Compiled | None:
        """Return the program for such a call in the current modes, or None if there is none yet."""
        return None if self._split(calling=True) else self._compiler.find(self._modes(arguments), arguments)

    def compiled(self, arguments: Arguments) -> Compiled:
        """Return the program for such a call, compiling it if necessary. Raises FusionError."""
        check_together(self, "a program of all of them")
        return self._program(arguments)

    def _program(self, arguments: Arguments) -> Compiled:
        with searched_once():
            modes = self._modes(arguments)
            if (compiled := self._compiler.find(modes, arguments)) is not None:
                return compiled
            check_valued(self.stacks.values())
            with hinting((leaf for leaf in arguments.leaves if _may_be_stacked(leaf, len(self))), len(self)):
                compiled = self._compiler.get(modes, arguments)
        if partly := compiled.written & self._array.comparison.partly:
            self._compiler.clear()
            raise FusionError(
                f"forward writes into the buffer {min(partly)}, which some models share but not all, or which lies in "
                "the memory of another tensor of the model; give each its own, by copy.deepcopy or clone()"
            )
        self._has_warned = self._has_warned or warn_of_unstacked(self._original, compiled, arguments, len(self))
        self._on_program(compiled)
        return compiled

    def _exportable(self, arguments: Arguments) -> Compiled:
        """Return a program without loops over members. A new one is not cached, as an export hides the tensors."""
        check_together(self, "torch.export")
        subject = replace(self._compiler.subject, loops=False, member=lambda index: self._member(index, self._real))
        compiler, modes = Compiler(subject), self._modes(arguments)
        return self._compiler.find(modes, arguments) or compiler.make(modes, arguments)

    def _modes(self, arguments: Arguments | None = None) -> tuple[int, ...]:
        """Return the state that programs of one `ArrayState` depend on: variables that code reads, train and eval."""
        if not torch.compiler.is_dynamo_compiling():
            self._situations.look(self._array.skeletons, self._branches, arguments)
        return (self._situations.number, *[branch.training for branch in self._branches])

    def _pattern(self, arguments: Arguments | None = None) -> tuple[Any, ...]:
        """Return the state that programs depend on: `_modes`, and the `ArrayState` of the members."""
        if torch.compiler.is_dynamo_compiling():
            return (*self._modes(arguments), self._number)
        split = self._split(calling=True)
        return (*self._modes(arguments), *((split,) if split else ()), self._number)

    def check(self, compiled: Compiled, arguments: Arguments) -> None:
        """Run the self-check of a program once, unless it was turned off. Raises FusionError."""
        if not self._array.verify or compiled.found.check:
            return
        comparison = self._array.comparison
        with tracing, outside_transforms():
            plain, stacks = arguments.mapped(unwrapped), plain_stacks(self, self._real)
            checked = CheckedArray(compiled, stacks, comparison.shared, self._around, plain, comparison.variants)
            # Another thread may have checked it meanwhile.
            compiled.found.check = compiled.found.check or verify(checked)

    def report(self) -> FusionReport:
        """Report how each operator runs, and why, with one part per program that has been created."""
        forward = [
            compiled for compiler in self._compilers() for family in compiler.families.values() for compiled in family
        ]
        parts = [describe(c.program, c.found.check or "self-check not run") for c in forward]
        padded = "batches of different sizes run in one call, filled up to the largest"
        sizes = (f"{padded}, where that at most doubles the samples",) if self._has_padded else ()
        loops = [f"{self._original}: loop over members: {why}" for why in self._loops]
        methods = [array.report() for _, array in self._methods.values()]
        for report in methods:
            parts, loops, sizes = [*parts, *report.parts], [*loops, *report.loops], (*sizes, *report.sizes)
        return FusionReport(tuple(parts), tuple(loops), sizes)

    def _compilers(self) -> list[Compiler]:
        return [state.compiler for state in self._states.values()] or [self._compiler]

    def _enter(self, state: ArrayState) -> None:
        self._number, self._array, self._compiler = state.number, state.array, state.compiler

    def evaluating(self) -> AbstractContextManager[None]:
        """Context manager for eval mode; restores modes. Raises FusionError if the members' eval changes tensors."""
        return evaluating(self)

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> FusedModule: ...
    def __getitem__(self, index: int | slice) -> nn.Module:
        """Return member ``index`` as a module of its class; the same object as long as the member is in its row.

        Its tensors share the memory of the row, and its gradients are those of the array's row, in both directions.
        Changes made to it (modes, requires_grad, hooks, attributes) hold from the next call of the array on, or are
        refused there. Other memory or another requires_grad of a stack itself reaches members that you hold at the
        array's next call, or when you ask for a member. A slice is an array of those members. Its tensors share their
        rows until one of the two is moved; its gradients, and what is set on it later, are its own.

        Raises:
            FusionError: a slice of members that differ in modes, hooks or what they train.
            IndexError: out of range, or a slice of no member.
            TypeError: neither an integer nor a slice.
            ValueError: a slice with another step than 1.
        """
        if torch.compiler.is_dynamo_compiling():
            member: nn.Module = self._untraced(self.__getitem__, index)
            return member
        if isinstance(index, slice):
            return slice_of(self, index)
        members, index = len(self), operator.index(index)
        if not -members <= index < members:
            raise IndexError(f"member {index} of an array of {members}")
        self._views.exposed = True
        return self._views.get(self, index % members)

    def _member(self, index: int, stacks: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Return member ``index`` around its rows of ``stacks``, by default the array's own tensors."""
        shared, source = self._array.comparison.shared, stacks or plain_stacks(self, self._real)
        rows = {name: live_rows(t, None if name in shared else index) for name, t in source.items()}
        return self._around(index, rows)

    def _around(self, index: int, rows: Mapping[str, Tensor]) -> nn.Module:
        array = self._array
        return materialize(array.skeletons[array.comparison.variants[index]], rows, self.training_by_path())

    def unfuse(self) -> list[nn.Module]:
        """Return B modules of the original class with their own copies of the tensors.

        A tensor that was one object in all models before fusing is copied once, and shared by all of them again.
        """
        return unfused(self)

    def keep(self, rows: Sequence[int]) -> None:
        """Keep only the members ``rows``, in this order, in place; the others and their memory are freed.

        Parameters stay the same objects, with gradients; each now holds ``[len(rows), *shape]`` in new memory. A member
        ``fused[i]`` moves to its new row; one that is removed keeps its last values. Captured programs serve the
        remaining members. An optimizer of hf.optim follows by its own ``keep(rows)``; another optimizer that has state
        must be created again.

        Raises:
            ValueError: no rows, a row twice, or a row that does not exist.
        """
        rearrange(self, kept_rows(rows, len(self)))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Write members ``src`` over members ``dst``, in place: parameters, buffers, gradients, scalars, hooks.

        ``src`` is one member or as many as ``dst``; all are read before any is written. See ``keep`` for optimizers.

        Raises:
            ValueError: a row does not exist or is written twice, or the numbers of ``src`` and ``dst`` do not match.
        """
        rearrange(self, copied(src, dst, len(self)))

    def append(self, models: Sequence[nn.Module]) -> None:
        """Append copies of ``models`` as the last members, in place; the models themselves are unchanged.

        A tensor that all members share must have the same values in them. They have no gradient until the next
        backward. Only what differs from all members in scalars, such as dropout p, is captured. See ``keep`` for
        parameters, views and optimizers.

        Raises:
            FusionError: no models, or models that cannot be fused with the members; the array is as it was.

        Example:
            >>> import hfusion as hf
            >>> fused = hf.fuse([nn.Linear(2, 2) for _ in range(2)])
            >>> fused.append([nn.Linear(2, 2)])
            >>> fused.state_dict()["weight"].shape
            torch.Size([3, 2, 2])
        """
        if isinstance(models, nn.Module) or not isinstance(models, Sequence) or len(models) == 0:
            description = "an empty one" if isinstance(models, Sequence) else type(models).__name__
            raise FusionError(f"append takes a list of one model or more, not {description}: append([model])")
        rearrange(self, [*range(len(self)), *models])

    def put(self, rows: int | Sequence[int], models: nn.Module | Sequence[nn.Module]) -> None:
        """Replace the members ``rows`` by copies of ``models``, in place; see ``append``.

        Raises:
            ValueError: a row does not exist or is given twice, or there are not as many models as rows.
            FusionError: models that cannot be fused with the members; the array is as it was.
        """
        targets = rows_of(rows, len(self))
        replacements = [models] if isinstance(models, nn.Module) else list(models)
        if len(replacements) != len(targets):
            raise ValueError(
                f"put of {len(replacements)} models into {len(targets)} rows: give one for each of {targets}"
            )
        check_once(targets)
        new = dict(zip(targets, replacements, strict=True))
        rearrange(self, [new.get(row, row) for row in range(len(self))])

    def origin(self, parameter: Tensor) -> tuple[int, str] | None:
        """Return member and key ``(b, name)`` of a parameter of an original model; None for other parameters."""
        origin: tuple[int, str] | None = self._origins.get(parameter)
        return origin

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusedModule:
        self._split()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._mark()
        self._views.follow(self)
        self._forget()
        return self

    def _forget(self) -> None:
        """Drop all programs, as tensors of another dtype or device need new ones."""
        caches: list[Any] = [*self._compilers(), self._refusals, self._methods]
        for programs in caches:
            programs.clear()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        self._split()
        result = super().load_state_dict(state_dict, strict, assign)
        self._mark()
        self._views.follow(self)
        if assign:
            self._forget()
        return result

    def __getstate__(self) -> dict[str, Any]:
        self._views.update(self)
        excluded = STATE - {"_original", "_array"}
        state = {name: value for name, value in super().__getstate__().items() if name not in excluded}
        return {**state, "_differing_members": differing_members(self._views, self)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        members = state.pop("_differing_members", {})
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._prepare()
        if members:
            self._views.note(self)
            self._views.exposed = True
        for row, member in members.items():
            self._views.add(self, row, member)


# The fused module under `torch.export`: its program is looked up with example tensors, then traced.


def exported(
    owner: nn.Module, find: Callable[[Arguments], Compiled], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call of ``owner`` during an export, with dynamic sizes.

    The program's assumptions about sizes are guarded.
    """
    arguments = Arguments.of(args, kwargs)
    with outside_export(), apart():
        stand_ins = Arguments(tuple(map(_stand_in, arguments.leaves)), arguments.spec)
        try:
            compiled = find(stand_ins)
        except FusionError as error:
            raise FusionError(f"torch.export cannot take what runs member by member: {error}") from error
    for call in compiled.opaque:
        raise FusionError(f"torch.export cannot take {call.path or 'forward'}, which runs member by member: {call.why}")
    if compiled.program.gives_member_values:
        raise FusionError(
            "torch.export cannot take results that are no tensors and differ between members. Return tensors, or "
            "export the members: fused[i]"
        )
    if not compiled.guards(arguments.shapes):
        raise FusionError("torch.export was given sizes that the array's program does not hold for")
    return bind(compiled, owner)(arguments.values)


def _stand_in(leaf: Any) -> Any:
    if is_stacked(leaf):
        return StackedInput(_stand_in(leaf.tensor))
    if not isinstance(leaf, Tensor):
        return leaf
    sizes = [hint(size) for size in leaf.shape]
    if any(size is None for size in sizes):
        raise FusionError(f"torch.export was given a tensor of unknown size, {tuple(leaf.shape)}; give it an example")
    return torch.zeros(sizes, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)  # type: ignore[arg-type]


# The fused module under torch.compile: its program is looked up while Dynamo traces, and traced in its place.


class Inlined(nn.Module):
    """A program for Dynamo: a module whose submodules it follows.

    ``paths``: the attributes of the fused module that lead to the program's tensors, empty for ``constants``.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        program = compiled.program
        slots = [slot for slot in program.slots if slot.kind is not Kind.INPUT]
        self.code = program.code
        self.paths = tuple(() if s.kind is Kind.CONSTANT else tuple(s.name.split(".")) for s in slots)
        self.constants = tuple(compiled.constants[s.name] for s in slots if s.kind is Kind.CONSTANT)
        self.spec = program.out_spec
        self.single = program.out_spec.is_leaf()

    def forward(self, owner: nn.Module, inputs: list[Any]) -> Any:
        constants = iter(self.constants)
        tensors = [reduce(_child, path, owner) if path else next(constants) for path in self.paths]
        outputs = self.code(*tensors, *inputs)
        return outputs[0] if self.single else pytree.tree_unflatten(list(outputs), self.spec)


def _child(module: Any, name: str) -> Any:
    for table in (module._parameters, module._buffers):
        if name in table:
            return table[name]
    return module._modules[name]


def finder(owner: nn.Module, find: Callable[[Arguments], Compiled]) -> Callable[..., str]:
    """Return a function that Dynamo treats as constant: it names the program in ``owner``; empty if none is traced."""
    names: dict[int, str] = {}

    def find_program_name(signature: Any, *args: Any, **kwargs: Any) -> str:
        """Find the program. ``signature``: the positions and names of stacked arguments, then other constants."""
        positions, keys = signature[0], signature[1]
        plain = [StackedInput(value) if k in positions else value for k, value in enumerate(args)]
        named = {key: StackedInput(value) if key in keys else value for key, value in kwargs.items()}
        # Hide the trace: assumptions made during capture must not become its guards.
        with outside_trace():
            try:
                compiled = find(Arguments.of(tuple(plain), named))
            except Exception:
                return ""
        if compiled.opaque:
            return ""
        if id(compiled) not in names:
            name = names[id(compiled)] = f"_inlined_{len(names)}"
            object.__setattr__(owner, name, Inlined(compiled))
        return names[id(compiled)]

    marked: Callable[..., str] = torch.compiler.assume_constant_result(find_program_name)
    return marked


def inline(
    owner: FusedModule, find_name: Callable[..., str], pattern: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call of ``owner`` in a form that Dynamo traces."""
    positions = tuple([k for k, value in enumerate(args) if isinstance(value, StackedInput)])
    keys = tuple([key for key, value in kwargs.items() if isinstance(value, StackedInput)])
    plain = [_tensor(value) for value in args]
    named = {key: _tensor(value) for key, value in kwargs.items()}
    sizes = tuple(
        [tuple([operator.index(n) for n in v.shape]) for v in (*plain, *named.values()) if isinstance(v, Tensor)]
    )
    name = find_name((positions, keys, pattern, sizes), *plain, **named)
    if not name:
        return owner._untraced(owner.forward, *args, **kwargs)
    program = getattr(owner, name)
    leaves, _ = pytree.tree_flatten((tuple(plain), named))
    return program(owner, leaves)


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, StackedInput) else value


# Inputs that probably hold a batch for each member, and were not wrapped in `hfusion.stacked`.

# Operators that compute each position of the leading dims alone, as pointwise ones do: they do not notice a batch of
# batches.
_POSITION_WISE = frozenset({"dropout", "hardswish", "layer_norm", "linear", "prelu", "rms_norm"})
_LIBRARIES = (str(Path(__file__).parents[1]), str(Path(torch.__file__).parent))


def warn_of_unstacked(name: str, compiled: Compiled, arguments: Arguments, members: int) -> bool:
    """Warn if a new program gets an input ``[B, N, F]``, and treats all its dims but the last alike.

    For members such as MLPs, a batch per member and a batch of B sequences look the same, and the second is rare.
    Members with other operators raise an error for the extra dim, or use it.

    Returns: whether it has warned.
    """
    if len(arguments.leaves) != 1 or not _may_be_stacked(arguments.leaves[0], members):
        return False
    targets = [node.target for node in compiled.graph.nodes if node.op == "call_function"]
    names = {getattr(target, "overloadpacket", target).__name__ for target in targets}
    others = [target for target in targets if torch.Tag.pointwise not in getattr(target, "tags", ())]
    if "linear" not in names or not {getattr(t, "overloadpacket", t).__name__ for t in others} <= _POSITION_WISE:
        return False
    warnings.warn(
        f"{name}: each of the {members} members sees the whole input of shape {list(arguments.leaves[0].shape)}. If "
        "it holds one batch per member, pass hf.stacked(x). To pass one batch to all members, ignore this warning.",
        stacklevel=_depth_of_caller(),
    )
    return True


def _may_be_stacked(leaf: object, members: int) -> bool:
    return members > 1 and isinstance(leaf, Tensor) and leaf.dim() > 2 and len(leaf) == members


def _depth_of_caller() -> int:
    """Return the ``stacklevel`` that blames the code that called hfusion, for the caller of this function."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        depth, frame = depth + 1, frame.f_back
    return depth
