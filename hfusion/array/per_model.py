"""Losses and other functions of tensors, per member."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.function_program_cache import MAX_STATES, FunctionPrograms, OwnPrograms, current_programs
from hfusion.array.ragged_rows import call_by_size, check_ragged
from hfusion.array.unfused_calls import stacked_results, unserved
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import BoundProgram, bind
from hfusion.compiler.compiled_program import ArraySpec, check_members
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.fusion_report import FusionReport, describe
from hfusion.core.calls import StackedInput, is_stacked, stacked
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import global_hooks, read_state, root, tensors_of
from hfusion.core.layout import Listed
from hfusion.core.loss_checks import PerMemberFunction, check_loss_function
from hfusion.core.program import Program
from hfusion.core.ragged import Ragged
from hfusion.device.generators import draws_kept
from hfusion.passes.side_effects import FailedCheck
from hfusion.torch_private.functorch import in_transform, is_wrapped, outside_transforms, unwrapped
from hfusion.torch_private.tracer_warnings import noted


class _Function(nn.Module):
    """A function as a module, so that it can be captured; a module given as the function is its submodule."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# Maximum number of cached kinds of calls.
MAX_CALLS = 1024


@dataclass(frozen=True, eq=False)
class _Calls:
    """The calls of one function for one array so far.

    Attributes:
        programs: by the state of the function and the key of the arguments, how such a call runs.
        compilers: by the state of the function and the number of members.
        loops: by the state of the function and the loose key of the arguments, why such calls run in a loop.
    """

    programs: dict[Any, Callable[[Arguments], Any]] = field(default_factory=dict)
    compilers: dict[Any, Compiler] = field(default_factory=dict)
    loops: dict[Any, str] = field(default_factory=dict)


class PerModel(PerMemberFunction):
    """A function per member; see `per_model`.

    Args:
        programs: the cache of the array whose outputs are passed; by default of the array that was called last.
    """

    def __init__(self, function: Callable[..., Any], programs: FunctionPrograms | None = None) -> None:
        check_loss_function(function)
        self._function = function
        self._module = _Function(function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._origin = root(function)
        self._programs, self._own_programs = programs, OwnPrograms(self._origin)
        self._last_programs: FunctionPrograms | None = programs
        self._calls: WeakKeyDictionary[FunctionPrograms, _Calls] = WeakKeyDictionary()

    def __repr__(self) -> str:
        return f"per_model({self._name})"

    def __reduce__(self) -> Any:
        """Copy and pickle the function only, without its programs."""
        return PerModel, (self._function,)

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        state = self.state()
        if not arguments.ragged:
            return self._call(self._programs_for(state, arguments), state, arguments)
        members = _members(arguments)
        check_ragged(members, arguments)
        programs = self._programs_for(state, arguments.of_rows([0]))
        return call_by_size(members, arguments, functools.partial(self._call, programs, state))

    def _programs_for(self, state: Any, arguments: Arguments) -> FunctionPrograms:
        return self._programs or current_programs(self._origin, arguments) or self._own_programs.get(state, arguments)

    def prepare(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        """Compile the program for such a call without running it; `find_program` then returns it."""
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        state = self.state()
        self._program(self._programs_for(state, arguments), state, arguments)

    def _program(
        self, programs: FunctionPrograms, state: Any, arguments: Arguments
    ) -> tuple[_Calls, Callable[[Arguments], Any]]:
        """Return the record of calls so far, and the callable that runs this call."""
        self._last_programs, key = programs, (state, arguments.key)
        calls = self._calls.get(programs)
        if calls is None:
            calls = self._calls[programs] = _Calls()
        program = calls.programs.get(key)
        if program is None:
            program = self._prepare(calls, programs, key[0], arguments)
            if len(calls.programs) == MAX_CALLS:
                calls.programs.clear()
            calls.programs[key] = program
        return calls, program

    def _call(self, programs: FunctionPrograms, state: Any, arguments: Arguments) -> Any:
        calls, program = self._program(programs, state, arguments)
        key = state, arguments.key
        try:
            return program(arguments)
        except FailedCheck as error:
            looped = functools.partial(self._looped, _members(arguments))
            # A failing member raises its own error here. If none does, the function does more in a branch than raise.
            losses = looped(arguments)
            calls.programs[key], calls.loops[key[0], arguments.loose_key] = looped, str(error)
            return losses

    def state(self) -> Any:
        """Everything that a program of the function depends on besides arguments; None if it cannot be compared."""
        state, hooks = read_state(self._function), global_hooks()
        return state if state is None or not hooks else (state, hooks)

    @property
    def programs(self) -> list[Program]:
        """The programs for all calls of the function so far."""
        compilers = [compiler for calls in self._calls.values() for compiler in calls.compilers.values()]
        families = [family for compiler in compilers for family in compiler.families.values()]
        return list(dict.fromkeys(compiled.program for family in families for compiled in family))

    def _prepare(
        self, calls: _Calls, programs: FunctionPrograms, state: Any, arguments: Arguments
    ) -> Callable[[Arguments], Any]:
        members = _members(arguments)
        check_members(members, arguments)
        warn_of_unstacked(self._name, arguments, members)
        try:
            compiler = self._compiler(calls, programs, state, arguments)
            with hinting(arguments, members):
                compiled = compiler.get(self._training, arguments)
        except FusionError as error:
            calls.loops[state, arguments.loose_key] = str(error)
            return functools.partial(self._looped, members)
        # In a loop over members the function issues its own warnings.
        warn_as_alone(self._function, arguments)
        program = bind(compiled, self._module)
        return lambda call: (
            self._looped(members, call) if in_transform() and unserved(compiled) else program(call.values)
        )

    def _looped(self, members: int, arguments: Arguments) -> Any:
        return _looped(self._module, self._name, members, arguments)

    def find_program(self, outputs: Any, *args: Any, **kwargs: Any) -> BoundProgram | str:
        """Return the program of the last call, with such arguments, or the reason why it ran in a loop over members."""
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        state, programs = self.state(), self._last_programs
        calls = _Calls() if programs is None else self._calls.get(programs, _Calls())
        if arguments.ragged:
            return "the outputs of members differ in size, and it is called for each size"
        compiler = calls.compilers.get((state, _members(arguments)))
        compiled = None if compiler is None else compiler.find(self._training, arguments)
        if compiled is None:
            return calls.loops.get(
                (state, arguments.loose_key), "it changes, at each call, values it reads besides its arguments"
            )
        return BoundProgram.of(compiled, self._module)

    @property
    def _training(self) -> bool:
        return self._function.training if isinstance(self._function, nn.Module) else True

    def _compiler(self, calls: _Calls, programs: FunctionPrograms, state: Any, arguments: Arguments) -> Compiler:
        """Return the compiler for the function in ``state``. Raises FusionError if no program can be kept for it."""
        if state is None:
            raise FusionError("it reads more values besides its arguments than can be compared on every call")
        if any(map(is_wrapped, tensors_of(state))):
            raise FusionError("it reads, besides its arguments, a tensor of a torch.func transform around the call")
        members = _members(arguments)
        key = state, members
        if key not in calls.compilers:
            if len({cached_state for cached_state, _ in calls.compilers} | {state}) > MAX_STATES:
                raise FusionError(f"values it reads besides its arguments have changed {MAX_STATES} times")
            names = frozenset(name for name, _ in tensors(self._module))
            subject = ArraySpec(self._name, members, (0,) * members, names, lambda _: self._module, loops=False)
            calls.compilers[key] = programs.compiler(self._function, state, subject)
        return calls.compilers[key]

    def report(self) -> FusionReport:
        """Report how the function runs: one part per program, and a line for each loop over members."""
        parts = [describe(program, "captured from the function itself") for program in self.programs]
        reasons = dict.fromkeys(why for calls in self._calls.values() for why in calls.loops.values())
        return FusionReport(tuple(parts), tuple(f"{self._name}: loop over members: {why}" for why in reasons))


def per_model(fn: Callable[..., Any]) -> PerModel:
    """Apply ``fn`` to each member separately.

    Args:
        fn: any functional loss, loss module or function of tensors, such as ``F.cross_entropy``.

            It is captured again when a value that it reads outside its arguments changes: an attribute, a closure's or
            a global variable, train or eval mode. If it cannot be captured, or changes often, it runs member by member.

    Returns:
        A callable. Its first argument is the output of a fused module: a tensor ``[B, *S]`` or a tree of such. Further
        arguments are seen by every member unless wrapped in `hfusion.stacked`. The result is that of ``fn`` with
        a leading dim of B: a mean loss gives ``[B]``. Outputs and targets may be `Ragged`: each member's result is that
        of its own samples.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> losses = per_model(F.mse_loss)(torch.zeros(3, 4), torch.ones(4))
        >>> losses
        tensor([1., 1., 1.])
    """
    return PerModel(fn)


def _all_stacked(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return stacked(outputs)
    return pytree.tree_map(lambda x: stacked(x) if isinstance(x, Tensor) else x, outputs, is_leaf=is_stacked)


def _members(arguments: Arguments) -> int:
    leaves = [leaf for leaf in arguments.leaves if isinstance(leaf, StackedInput | Ragged | Listed)]
    sizes = [len(leaf.tensor if isinstance(leaf, StackedInput) else leaf) for leaf in leaves]
    if not sizes:
        raise ValueError("per_model's first argument holds no tensor; give it the output [B, ...] of a fused module")
    return int(sizes[0])


def _looped(function: Callable[..., Any], name: str, members: int, arguments: Arguments) -> Any:
    """Call the function member by member, and stack the results."""
    rows = []
    pairs = zip(arguments.leaves, arguments.values, strict=True)
    # A member may write to its own row, unless it requires a gradient: all rows have one version counter.
    inputs = [value for leaf, value in pairs if isinstance(leaf, Tensor) or (is_stacked(leaf) and value.requires_grad)]
    inputs = [tensor for tensor in inputs if not tensor.is_inference()]
    versions = [tensor._version for tensor in inputs]
    with hinting(arguments, members):
        for member in range(members):
            args, kwargs = arguments.of_member(member)
            rows.append(function(*args, **kwargs))
            # The write would change the arguments or the gradient of another member.
            if [tensor._version for tensor in inputs] != versions:
                raise FusionError(
                    f"{name} writes into its arguments, and runs in a loop over members, which may share them; let it "
                    "write into a copy"
                )
    return stacked_results(rows)


# Warnings about shapes that a loss broadcasts: those a single model would get, and one for unstacked targets.

# ``stacklevel`` of the code that calls a `per_model` function.
_DEPTH = 6


def warn_of_unstacked(name: str, arguments: Arguments, members: int) -> None:
    """Warn if an argument has shape ``[B, *S]`` and a member's output ``S``: every member sees the whole argument."""
    outputs = _outputs(arguments)
    for leaf in _plain(arguments):
        shape = tuple(leaf.shape)
        if shape[:1] == (members,) and shape[1:] in outputs and shape not in outputs:
            warnings.warn(
                f"an argument of {name} has shape {list(shape)}, a member's output {list(shape[1:])}, and every one of "
                f"the {members} members is given the whole argument; if it holds one target for each, give "
                "hf.stacked(target)",
                stacklevel=_DEPTH,
            )


@contextmanager
def hinting(arguments: Arguments, members: int) -> Iterator[None]:
    """Context manager: add a note to errors if an argument may hold a row for each member, but was not stacked."""
    try:
        yield
    except Exception as error:
        outputs = _outputs(arguments)
        for leaf in _plain(arguments):
            shape = tuple(leaf.shape)
            if shape[:1] == (members,) and any(output[: len(shape) - 1] == shape[1:] for output in outputs):
                error.add_note(
                    f"every one of the {members} members is given the whole argument of shape {list(shape)}; if it "
                    "holds one target for each, give hf.stacked(target)"
                )
        raise


def _outputs(arguments: Arguments) -> set[tuple[int, ...]]:
    """Return the shapes of stacked inputs per member, without scalars (weights) unless the first argument has one."""
    args, _ = arguments.of_member(0)
    firsts = {tuple(leaf.shape) for leaf in pytree.tree_leaves(args[:1]) if isinstance(leaf, Tensor)}
    shapes = {tuple(leaf.tensor.shape[1:]) for leaf in arguments.leaves if is_stacked(leaf)}
    return shapes if () in firsts else shapes - {()}


def _plain(arguments: Arguments) -> list[Tensor]:
    return [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor)]


def warn_as_alone(function: Callable[..., Any], arguments: Arguments) -> None:
    """Issue the warnings of ``function`` where a member's output and another argument have sizes that broadcast.

    ``function`` is called with copies of the values of the first member, as it may check values before it warns.
    """
    with outside_transforms():
        args, kwargs = arguments.mapped(unwrapped).of_member(0)
        if not _broadcasts(pytree.tree_leaves(args[:1]), pytree.tree_leaves((args[1:], kwargs))):
            return
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: x.detach().clone(), (args, kwargs))
        with draws_kept(), noted(UserWarning) as texts, torch.no_grad():
            function(*args, **kwargs)
    for text in texts:
        warnings.warn(text, stacklevel=_DEPTH)


def _broadcasts(outputs: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether a tensor in ``outputs`` and one in ``others`` differ in shape, but broadcast."""
    return any(
        isinstance(output, Tensor) and isinstance(other, Tensor) and _fits(output.shape, other.shape)
        for output, other in itertools.product(outputs, others)
    )


def _fits(shape: torch.Size, other: torch.Size) -> bool:
    sizes = list(zip(reversed(shape), reversed(other), strict=False))
    # A scalar broadcasts with everything, as intended.
    return shape != other and bool(sizes) and all(a == b or 1 in (a, b) for a, b in sizes)
