"""Losses and other functions of tensors, per member."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.unfused_calls import active_rows, check_ragged, filled, joined_results, run_transformed, untraced
from hfusion.capture.capture_member import VaryingSizes
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import (
    ArraySpec,
    BoundProgram,
    Compiled,
    bind,
    check_members,
    compile_array,
    of_rows,
)
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.fusion_report import FusionReport, describe
from hfusion.core.calls import Ragged, StackedInput, is_stacked, stacked
from hfusion.core.errors import FusionError, noting
from hfusion.core.fingerprint import global_hooks, read_state, root, tensors_of
from hfusion.core.layout import Listed
from hfusion.core.program import Program
from hfusion.core.step_arguments import PerMemberFunction, check_loss_function
from hfusion.device.backend import active_autocast, draws_kept
from hfusion.passes.side_effects import FailedCheck
from hfusion.torch_private.dispatch_modes import in_transform, is_wrapped, outside_transforms, unwrapped
from hfusion.torch_private.replaced_functions import noted

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


class _Function(nn.Module):
    """A function as a module, so that it can be captured; a module given as the function is its submodule."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


# Maximum number of cached kinds of calls.
MAX_CALLS = 1024


# How many new states functions of one origin may read before they run in a loop over members.
MAX_REMADE = 16
# This many repeated states of functions of one origin make up for one new state.
MAX_REPEATED = 16
# Maximum number of functions of one array whose programs are cached, even after the functions are deleted.
MAX_FUNCTIONS = 64
# Maximum number of programs in the cache that all arrays of this process share.
MAX_SHARED = 256

T = TypeVar("T")


class _StateCache(Generic[T]):
    """A cache of the latest ``size`` values. A value is dropped once a tensor in its function's state is deleted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Any, tuple[T, list[Any]]] = OrderedDict()
        self._lock = threading.RLock()

    def get(self, key: Any) -> T | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def put(self, key: Any, state: Any, value: T) -> None:
        with self._lock:
            self._values[key] = value, [weakref.ref(t, lambda _: self._drop(key)) for t in tensors_of(state)]
            if len(self._values) > self._size:
                self._drop(next(iter(self._values)))

    def latest(self) -> list[tuple[Any, T]]:
        """Return the cached items, the latest first."""
        with self._lock:
            return [(key, value) for key, (value, _) in reversed(self._values.items())]

    def _drop(self, key: Any) -> None:
        with self._lock:
            self._values.pop(key, None)


_shared: _StateCache[Compiled] = _StateCache(MAX_SHARED)


class FunctionPrograms:
    """The programs of functions of one array's outputs. Functions that read equal values share programs.

    The program for a call depends on the calls before it: a size is dynamic once two values of it were seen, and
    lowerings are chosen for the sizes that a program was compiled with. So only calls for the same array count.
    Otherwise the last bits of a run would depend on earlier runs of its process. Equal programs are compiled once.
    """

    def __init__(self) -> None:
        self._compilers: _StateCache[Compiler] = _StateCache(MAX_FUNCTIONS)
        self._credits: dict[Any, float] = {}

    def compiler(self, origin: Any, state: Any, subject: ArraySpec) -> Compiler:
        """Return the compiler of ``subject`` in ``state``. Raises FusionError if its ``origin`` had too many states."""
        key = state, subject.members
        compiler = self._compilers.get(key)
        # The number of members is no state: an array may grow and shrink.
        credit = self._credits.get((origin, subject.members), float(MAX_REMADE))
        if compiler is None and credit < 1:
            raise FusionError(f"values it reads besides its arguments have changed {MAX_REMADE} times")
        left = credit - 1 if compiler is None else min(credit + 1 / MAX_REPEATED, MAX_REMADE)
        self._credits[origin, subject.members] = left
        if compiler is None:
            make = functools.partial(_compile_once, state)
            compiler = Compiler(subject, kin=functools.partial(self._related, key), make_program=make)
            self._compilers.put(key, state, compiler)
        # A function that reads the same may have replaced the former one.
        compiler.subject = subject
        return compiler

    def _related(self, key: Any, training: Any, arguments: Arguments) -> Compiled | None:
        """Return a program for another number of members, rewritten for those of ``key``; None if there is none."""
        for (state, members), compiler in self._compilers.latest():
            if members != key[1] and state == key[0]:
                program = compiler.fitting(training, arguments)
                if program is not None:
                    return of_rows(program, [0] * key[1], compiler.subject)
        return None


def _compile_once(
    state: Any, subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes
) -> Compiled:
    """Call `compile_array` for a function with ``state``; cached by everything that the program depends on."""
    dims = tuple(map(frozenset, sizes.dims))
    settings = (torch.get_default_device(), torch.are_deterministic_algorithms_enabled())
    key = (state, subject.members, training, arguments.key, dims, sizes.open, sizes.whole, settings)
    program = _shared.get(key)
    if program is None:
        program = compile_array(subject, arguments, training, sizes)
        _shared.put(key, state, program)
    return program


_of_arrays: WeakKeyDictionary[FusedModule, FunctionPrograms] = WeakKeyDictionary()


# By ``array``, a weak reference to the array that a thread called last, whose outputs its next functions are assumed to
# get.
_last_call = threading.local()


def programs_of(array: FusedModule) -> FunctionPrograms:
    """The programs of functions of the outputs of ``array``."""
    return _of_arrays.setdefault(array, FunctionPrograms())


def note_call(array: FusedModule) -> None:
    """Attribute the next calls of functions in this thread to ``array``."""
    _last_call.array = weakref.ref(array)


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

    ``idle``: members whose values are not needed: a loop leaves them out.
    """

    idle: Set[int] = frozenset()

    def __init__(self, function: Callable[..., Any], programs: FunctionPrograms | None = None) -> None:
        check_loss_function(function)
        self._function = function
        self.module = _Function(function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._programs, self._own_programs = programs, FunctionPrograms()
        self._last_programs: FunctionPrograms | None = programs
        self._calls: WeakKeyDictionary[FunctionPrograms, _Calls] = WeakKeyDictionary()
        self._untraced = torch.compiler.disable(untraced)

    def __repr__(self) -> str:
        return f"per_model({self._name})"

    def __reduce__(self) -> Any:
        """Copy and pickle the function only, without its programs."""
        return PerModel, (self._function,)

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return self._untraced(self.__call__, outputs, *args, **kwargs)
        arguments, state = Arguments.of((_all_stacked(outputs), *args), kwargs), self.state()
        if arguments.ragged:
            check_ragged(_members(arguments), arguments)
            return self._looped(arguments)
        calls, program = self._program(state, arguments)
        try:
            return program(arguments)
        except FailedCheck as error:
            # A failing member raises its own error here. If none does, the function does more in a branch than raise.
            losses = self._looped(arguments)
            calls.programs[state, arguments.key] = self._looped
            calls.loops[state, arguments.loose_key] = str(error)
            return losses

    def prepare(self, outputs: Any, *args: Any, **kwargs: Any) -> None:
        """Compile the program for such a call without running it; `find_program` then returns it."""
        self._program(self.state(), Arguments.of((_all_stacked(outputs), *args), kwargs))

    def _program(self, state: Any, arguments: Arguments) -> tuple[_Calls, Callable[[Arguments], Any]]:
        """Return the record of calls so far, and the callable that runs this call."""
        array = getattr(_last_call, "array", lambda: None)()
        programs = self._programs or (self._own_programs if array is None else programs_of(array))
        self._last_programs, key = programs, (state, arguments.key)
        calls = self._calls.get(programs)
        if calls is None:
            calls = self._calls[programs] = _Calls()
        program = calls.programs.get(key)
        if program is None:
            program = self._prepare(calls, programs, state, arguments)
            if len(calls.programs) == MAX_CALLS:
                calls.programs.clear()
            calls.programs[key] = program
        return calls, program

    def state(self) -> Any:
        """Everything that a program of the function depends on besides arguments; None if it cannot be compared."""
        state = read_state(self._function)
        return None if state is None else (state, global_hooks(), torch.get_default_dtype(), active_autocast())

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
            if state is None:
                raise FusionError("it reads more values besides its arguments than can be compared on every call")
            if any(map(is_wrapped, tensors_of(state))):
                raise FusionError("it reads, besides its arguments, a tensor of a torch.func transform around the call")
            names, module = frozenset(name for name, _ in tensors(self.module)), weakref.ref(self.module)
            # Programs are kept for longer than the function.
            subject = ArraySpec(
                self._name, members, (0,) * members, names, lambda _: cast(nn.Module, module()), loops=False
            )
            compiler = calls.compilers[state, members] = programs.compiler(root(self._function), state, subject)
            with hinting(_unstacked(arguments, members), members):
                compiled = compiler.get(self._training, arguments)
        except FusionError as error:
            calls.loops[state, arguments.loose_key] = str(error)
            return self._looped
        # In a loop over members the function issues its own warnings.
        warn_as_alone(self._function, arguments)
        program = bind(compiled, self.module)

        def run(call: Arguments) -> Any:
            if not in_transform():
                return program(call.values)

            def loop(why: str) -> Any:
                calls.loops[state, call.loose_key] = why
                return self._looped(call)

            return run_transformed(compiled, program, call, loop)

        return run

    def _looped(self, arguments: Arguments) -> Any:
        """Call the function member by member, and stack the results."""
        rows, members = [], _members(arguments)
        pairs = zip(arguments.leaves, arguments.values, strict=True)
        # A member may write to its own row, unless it requires a gradient: all rows have one version counter.
        inputs = [leaf for kind, leaf in pairs if isinstance(kind, Tensor) or (is_stacked(kind) and leaf.requires_grad)]
        inputs = [tensor for tensor in inputs if not tensor.is_inference()]
        versions = [tensor._version for tensor in inputs]
        with hinting(_unstacked(arguments, members), members):
            for member in active_rows(members, self.idle):
                args, kwargs = arguments.of_member(member)
                with noting(f"This is of member {member}."):
                    rows.append((member, self._function(*args, **kwargs)))
                # The write would change the arguments or the gradient of another member.
                if [tensor._version for tensor in inputs] != versions:
                    raise FusionError(
                        f"{self._name} writes into its arguments, and runs in a loop over members, which may share "
                        "them; let it write into a copy"
                    )
        return pytree.tree_unflatten(*joined_results(filled(members, rows), any_sizes=bool(arguments.ragged)))

    def find_program(self, outputs: Any, *args: Any, **kwargs: Any) -> BoundProgram | str:
        """Return the program of the last call, with such arguments, or the reason why it ran in a loop over members."""
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        state, programs = self.state(), self._last_programs
        calls = _Calls() if programs is None else self._calls.get(programs, _Calls())
        if arguments.ragged:
            return "the outputs of members differ in size, and it is called for each member"
        compiler = calls.compilers.get((state, _members(arguments)))
        compiled = None if compiler is None else compiler.find(self._training, arguments)
        if compiled is None:
            return calls.loops.get(
                (state, arguments.loose_key), "it changes, at each call, values it reads besides its arguments"
            )
        return BoundProgram.of(compiled, self.module)

    @property
    def _training(self) -> bool:
        return self._function.training if isinstance(self._function, nn.Module) else True

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


# Warnings about shapes that a loss broadcasts: those a single model would get, and one for unstacked targets.

# ``stacklevel`` of the code that calls a `per_model` function.
_DEPTH = 5


def warn_of_unstacked(name: str, arguments: Arguments, members: int) -> None:
    """Warn if an argument has shape ``[B, *S]`` and a member's output ``S``: every member sees the whole argument."""
    outputs = _outputs(arguments)
    for leaf in _unstacked(arguments, members):
        shape = tuple(leaf.shape)
        if shape[1:] in outputs and shape not in outputs:
            warnings.warn(
                f"an argument of {name} has shape {list(shape)}, a member's output {list(shape[1:])}, and every one of "
                f"the {members} members is given the whole argument; if it holds one target for each, give "
                "hf.stacked(target)",
                stacklevel=_DEPTH,
            )


@contextmanager
def hinting(leaves: Iterable[Tensor], members: int) -> Iterator[None]:
    """Context manager: add a note to errors for unstacked ``leaves`` that may hold a row for each member."""
    try:
        yield
    except Exception as error:
        for leaf in leaves:
            error.add_note(
                f"Each of the {members} members was given the whole tensor of shape {list(leaf.shape)}. If it holds "
                "one batch or target for each, pass hf.stacked(x)."
            )
        raise


def _unstacked(arguments: Arguments, members: int) -> Iterator[Tensor]:
    """Yield the arguments with a row for each member that has the leading sizes of a member's output."""
    outputs = _outputs(arguments)
    for leaf in arguments.leaves:
        shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else ()
        if shape[:1] == (members,) and any(output[: len(shape) - 1] == shape[1:] for output in outputs):
            yield leaf


def _outputs(arguments: Arguments) -> set[tuple[int, ...]]:
    """Return the shapes of stacked inputs per member, without scalars (weights) unless the first argument has one."""
    args, _ = arguments.of_member(0)
    firsts = {tuple(leaf.shape) for leaf in pytree.tree_leaves(args[:1]) if isinstance(leaf, Tensor)}
    shapes = {tuple(leaf.tensor.shape[1:]) for leaf in arguments.leaves if is_stacked(leaf)}
    return shapes if () in firsts else shapes - {()}


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
    shapes = [[leaf.shape for leaf in leaves if isinstance(leaf, Tensor)] for leaves in (outputs, others)]
    # A scalar broadcasts with everything, as intended.
    pairs = [(a, b) for a, b in itertools.product(*shapes) if a != b and len(a) and len(b)]
    sizes = [zip(reversed(a), reversed(b), strict=False) for a, b in pairs]
    return any(all(m == n or 1 in (m, n) for m, n in pair) for pair in sizes)
