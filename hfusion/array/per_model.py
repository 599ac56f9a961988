"""Losses and other functions of tensors, per member."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.broadcast import hinting, warn_as_alone, warn_of_unstacked
from hfusion.array.transformed import stacked_results, unserved
from hfusion.capture.named import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound import BoundProgram, bind
from hfusion.compiler.compiled import ArraySpec, Compiled, check_members
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.report import FusionReport, describe
from hfusion.compiler.rows import of_rows
from hfusion.core.calls import StackedInput, is_stacked, stacked
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import global_hooks, read_state, root, tensors_of
from hfusion.core.functorch import in_transform, is_wrapped
from hfusion.core.program import Program
from hfusion.passes.expected import FailedCheck


class _Function(nn.Module):
    """A function as a module, so that it can be captured; a module given as the function is its submodule."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# States of one function that are worth a program each; one that changes more often runs in a loop.
MAX_STATES = 16
# The same for a function that is made anew at its calls.
MAX_REMADE = 16
# Functions whose programs are kept when the functions are gone.
MAX_KEPT = 64
# Kinds of calls that are told at a glance.
MAX_CALLS = 1024


# Those of a `Compiler`: programs, families, sizes.
Tables: TypeAlias = tuple[dict[Any, Any], dict[Any, Any], dict[Any, Any]]


class _Kept:
    """The programs of functions by what these read: a function that is made anew finds those of its like.

    Only the latest are kept, and none longer than the tensors that its function reads.
    """

    def __init__(self) -> None:
        self._found: OrderedDict[Any, Tables] = OrderedDict()
        self._watches: dict[Any, list[Any]] = {}
        self._left: dict[Any, float] = {}
        self._lock = threading.RLock()

    def of(self, state: Any, members: int, origin: Any) -> Tables:
        """The tables of a `Compiler`. Raises FusionError where functions of one ``origin`` have too many states.

        An array that grows and shrinks is no other state: these are counted for each number of members.
        """
        key, origin = (state, members), (origin, members)
        with self._lock:
            left = self._left.get(origin, float(MAX_REMADE))
            if key in self._found:
                self._found.move_to_end(key)
                # So that states that come again do not count.
                self._left[origin] = min(left + 1 / MAX_STATES, MAX_REMADE)
                return self._found[key]
            if left < 1:
                raise FusionError(f"what it reads by itself has changed {MAX_REMADE} times")
            self._left[origin] = left - 1
            found: Tables = ({}, {}, {})
            self._found[key] = found
            drop = functools.partial(self._drop, key)
            self._watches[key] = [weakref.ref(tensor, drop) for tensor in tensors_of(state)]
            if len(self._found) > MAX_KEPT:
                self._drop(next(iter(self._found)))
            return found

    def _drop(self, key: Any, gone: Any = None) -> None:
        with self._lock:
            self._found.pop(key, None)
            self._watches.pop(key, None)


_kept = _Kept()


class PerModel:
    """What `per_model` gives; see there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._module = _Function(function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._programs: dict[Any, Callable[[Arguments], Any]] = {}
        self._compilers: dict[Any, Compiler] = {}
        self._loops: dict[Any, str] = {}

    def __repr__(self) -> str:
        return f"per_model({self._name})"

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        key = (self.state(), arguments.key)
        program = self._programs.get(key)
        if program is None:
            program = self._prepare(key[0], arguments)
            if len(self._programs) == MAX_CALLS:
                self._programs.clear()
            self._programs[key] = program
        try:
            return program(arguments)
        except FailedCheck as error:
            looped = functools.partial(_looped, self._module, self._name, _members(arguments))
            # One of the members raises here. If none does, a branch is more than a check.
            losses = looped(arguments)
            self._programs[key], self._loops[key[0], arguments.loose_key] = looped, str(error)
            return losses

    def state(self) -> Any:
        """Everything that a program of the function hangs on besides arguments; None if that cannot be compared."""
        found, hooks = read_state(self._function), global_hooks()
        return found if found is None or not hooks else (found, hooks)

    @property
    def programs(self) -> list[Program]:
        """The programs of the function as it was at its calls so far."""
        families = [family for compiler in self._compilers.values() for family in compiler.families.values()]
        return [compiled.program for family in families for compiled in family]

    def _prepare(self, state: Any, arguments: Arguments) -> Callable[[Arguments], Any]:
        members = _members(arguments)
        check_members(members, arguments)
        warn_of_unstacked(self._name, arguments, members)
        try:
            compiler = self._compiler(state, members)
            with hinting(arguments, members):
                compiled = compiler.get(self._training, arguments)
        except FusionError as error:
            self._loops[state, arguments.loose_key] = str(error)
            return functools.partial(self._looped, members)
        # In a loop over members the function warns by itself.
        warn_as_alone(self._function, arguments)
        program = bind(compiled, self._module)
        return lambda call: (
            self._looped(members, call) if in_transform() and unserved(compiled) else program(call.values)
        )

    def _looped(self, members: int, arguments: Arguments) -> Any:
        return _looped(self._module, self._name, members, arguments)

    def found(self, outputs: Any, *args: Any, **kwargs: Any) -> BoundProgram | str:
        """The program that such a call, the last one, has run; or why it ran in a loop over members."""
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        state = self.state()
        compiler = self._compilers.get((state, _members(arguments)))
        compiled = None if compiler is None else compiler.find(self._training, arguments)
        if compiled is None:
            return self._loops.get((state, arguments.loose_key), "it changes, at each call, what it reads by itself")
        return BoundProgram.of(compiled, self._module)

    @property
    def _training(self) -> bool:
        return self._function.training if isinstance(self._function, nn.Module) else True

    def _compiler(self, state: Any, members: int) -> Compiler:
        """The compiler for the function as it is now. Raises FusionError where its state is not worth a program."""
        if state is None:
            raise FusionError("it reads more by itself than can be compared on every call")
        if any(map(is_wrapped, tensors_of(state))):
            raise FusionError("it reads by itself a tensor of a torch.func transform that is around the call")
        if (state, members) not in self._compilers:
            if len({known for known, _ in self._compilers} | {state}) > MAX_STATES:
                raise FusionError(f"what it reads by itself has changed {MAX_STATES} times")
            kept = _kept.of(state, members, root(self._function))
            keys = frozenset(name for name, _ in tensors(self._module))
            subject = ArraySpec(self._name, members, (0,) * members, keys, lambda _: self._module, loops=False)
            self._compilers[state, members] = Compiler(subject, *kept, kin=functools.partial(self._kin, state, subject))
        return self._compilers[state, members]

    def _kin(self, state: Any, subject: ArraySpec, training: Any, arguments: Arguments) -> Compiled | None:
        """The program for another number of members, made of one that is there."""
        for (known, members), compiler in self._compilers.items():
            found = compiler.fitting(training, arguments) if known == state and members != subject.members else None
            if found is not None:
                return of_rows(found, [0] * subject.members, subject)
        return None

    def report(self) -> FusionReport:
        """How the function runs: one part per program, and a line for everything that runs in a loop over members."""
        parts = [describe(program, "captured from the function itself") for program in self.programs]
        loops = [f"{self._name}: loop over members: {why}" for why in dict.fromkeys(self._loops.values())]
        return FusionReport(tuple(parts), tuple(loops))


def per_model(function: Callable[..., Any]) -> PerModel:
    """``function`` applied to each member by itself.

    Args:
        function: any functional loss, loss module or function of tensors, such as ``F.cross_entropy``.

            It is captured again when a value that it reads outside its arguments changes: an attribute, a closure's or
            a global variable, train or eval mode. What cannot be captured, or changes often, runs member by member.

    Returns:
        A callable. Its first argument is what a fused module gave: a tensor ``[B, *S]`` or a tree of such. Further
        arguments are seen by every member unless wrapped in `hfusion.stacked`. The result is that of ``function`` with
        a leading dim of B: a mean loss gives ``[B]``.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> losses = per_model(F.mse_loss)(torch.zeros(3, 4), torch.ones(4))
        >>> losses
        tensor([1., 1., 1.])
    """
    return PerModel(function)


def _all_stacked(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return stacked(outputs)
    return pytree.tree_map(lambda x: stacked(x) if isinstance(x, Tensor) else x, outputs, is_leaf=is_stacked)


def _members(arguments: Arguments) -> int:
    sizes = [leaf.tensor.shape[0] for leaf in arguments.leaves if isinstance(leaf, StackedInput)]
    if not sizes:
        raise ValueError("per_model's first argument holds no tensor; give it the output [B, ...] of a fused module")
    return int(sizes[0])


def _looped(function: Callable[..., Any], name: str, members: int, arguments: Arguments) -> Any:
    """The function, called member by member."""
    rows = []
    pairs = zip(arguments.leaves, arguments.values, strict=True)
    # A row of one's own may be written to, unless autograd keeps all rows by one count of writes.
    given = [value for leaf, value in pairs if isinstance(leaf, Tensor) or (is_stacked(leaf) and value.requires_grad)]
    given = [tensor for tensor in given if not tensor.is_inference()]
    before = [tensor._version for tensor in given]
    with hinting(arguments, members):
        for member in range(members):
            args, kwargs = arguments.of_member(member)
            rows.append(function(*args, **kwargs))
            # Another member's gradient, or its own argument, would be changed by that.
            if [tensor._version for tensor in given] != before:
                raise FusionError(
                    f"{name} writes into its arguments, and runs in a loop over members, which may share them; let it "
                    "write into a copy"
                )
    return stacked_results(rows)
