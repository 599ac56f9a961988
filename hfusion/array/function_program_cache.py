"""Programs of functions applied per member: cached separately for each array, but compiled once if they are equal.

The program for a call depends on the calls before it: a size is dynamic once two values of it were seen, and
lowerings are chosen for the sizes that a program was compiled with. So only calls for the same array count. Otherwise
the last bits of a run would depend on earlier runs of its process.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

import torch

from hfusion.capture.capture_member import VaryingSizes
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import ArraySpec, Compiled, compile_array
from hfusion.compiler.compiler import CallSizes, Compiler
from hfusion.compiler.program_rows import of_rows
from hfusion.core.calls import is_stacked
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import root, tensors_of
from hfusion.device.backend import active_autocast

if TYPE_CHECKING:
    from collections.abc import Callable

    from hfusion.array.module import FusedModule

# How many new states functions of one origin may read before they run in a loop over members.
MAX_REMADE = 16
# This many repeated states of functions of one origin make up for one new state.
MAX_STATES = 16
# Maximum number of functions of one array whose programs are cached, even after the functions are deleted.
MAX_FUNCTIONS = 64
# Maximum number of programs in the cache that all arrays of this process share.
MAX_SHARED = 256
# Functions of one origin that are called for no array share programs after this many different sizes and states.
MAX_VARIANTS = 16

T = TypeVar("T")


class _Tables(NamedTuple):
    """The fields of a `Compiler` that outlive its subject."""

    programs: dict[Any, Compiled]
    families: dict[Any, list[Compiled]]
    call_sizes: dict[Any, CallSizes]
    whole: dict[Any, str]
    refused: dict[Any, str]

    def compiler(self, subject: ArraySpec, **hooks: Any) -> Compiler:
        return Compiler(subject, **self._asdict(), **hooks)


class _StateCache(Generic[T]):
    """A cache of the latest ``size`` values. A value is dropped once a tensor in its function's state is deleted."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Any, T] = OrderedDict()
        self._watches: dict[Any, list[Any]] = {}
        self._lock = threading.RLock()

    def get(self, key: Any) -> T | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def put(self, key: Any, state: Any, value: T) -> None:
        drop = functools.partial(self._drop, key)
        with self._lock:
            self._values[key] = value
            self._watches[key] = [weakref.ref(tensor, drop) for tensor in tensors_of(state)]
            if len(self._values) > self._size:
                self._drop(next(iter(self._values)))

    def items(self) -> Iterator[tuple[Any, T]]:
        """Iterate over the cached items, the latest first."""
        with self._lock:
            return iter([*self._values.items()][::-1])

    def _drop(self, key: Any, tensor: Any = None) -> None:
        with self._lock:
            self._values.pop(key, None)
            self._watches.pop(key, None)


class FunctionPrograms:
    """The programs of functions of one array's outputs. Functions that read equal values share programs."""

    def __init__(self) -> None:
        self._tables: _StateCache[_Tables] = _StateCache(MAX_FUNCTIONS)
        self._credits: dict[Any, float] = {}
        self._lock = threading.RLock()

    def compiler(self, function: Callable[..., Any], state: Any, subject: ArraySpec) -> Compiler:
        """Return the compiler of ``function`` for ``state``. Raises FusionError if its origin had too many states."""
        key = state, subject.members
        with self._lock:
            tables = self._tables.get(key)
            # The number of members is no state: an array may grow and shrink.
            self._spend((root(function), subject.members), seen=tables is not None)
            if tables is None:
                tables = _Tables({}, {}, {}, {}, {})
                self._tables.put(key, state, tables)
        return tables.compiler(
            subject,
            kin=functools.partial(_related, self._tables, key, subject),
            make_program=functools.partial(_compile_once, state),
        )

    def _spend(self, origin: Any, *, seen: bool) -> None:
        """Count a new state of ``origin``, or give some credit back for one that was seen before."""
        credit = self._credits.get(origin, float(MAX_REMADE))
        if not seen and credit < 1:
            raise FusionError(f"values it reads besides its arguments have changed {MAX_REMADE} times")
        self._credits[origin] = min(credit + 1 / MAX_STATES, MAX_REMADE) if seen else credit - 1


def _related(
    cache: _StateCache[_Tables], key: Any, subject: ArraySpec, training: Any, arguments: Arguments
) -> Compiled | None:
    """Return a program for ``key`` with another number of members, rewritten for those of ``subject``, or None."""
    state, members = key
    for (other_state, other_members), tables in cache.items():
        if other_members != members and other_state == state:
            program = tables.compiler(subject).fitting(training, arguments)
            if program is not None:
                return of_rows(program, [0] * members, subject)
    return None


_shared: _StateCache[Compiled] = _StateCache(MAX_SHARED)


def _compile_once(
    state: Any, subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes
) -> Compiled:
    """Call `compile_array` for a function with ``state``; cached by everything that the program depends on."""
    dims = tuple(map(frozenset, sizes.dims))
    settings = (torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled())
    key = (state, subject.members, training, arguments.key, dims, sizes.open, sizes.whole, active_autocast(), settings)
    program = _shared.get(key)
    if program is None:
        program = compile_array(subject, arguments, training, sizes)
        _shared.put(key, state, program)
    return program


_of_arrays: weakref.WeakKeyDictionary[FusedModule, FunctionPrograms] = weakref.WeakKeyDictionary()
_of_many_variants = FunctionPrograms()
_lock = threading.Lock()


class _LastCall(threading.local):
    """The array that this thread called last, and the functions that were given its outputs since."""

    array: weakref.ref[FusedModule] | None = None
    functions: frozenset[Any] = frozenset()


_last_call = _LastCall()


def programs_of(array: FusedModule) -> FunctionPrograms:
    """The programs of functions of the outputs of ``array``."""
    with _lock:
        return _of_arrays.setdefault(array, FunctionPrograms())


def note_call(array: FusedModule) -> None:
    """Attribute the next call of each function in this thread to ``array``, assuming that it gets its outputs."""
    _last_call.array, _last_call.functions = weakref.ref(array), frozenset()


def current_programs(origin: Any, arguments: Arguments) -> FunctionPrograms | None:
    """Return the programs of the array whose outputs are passed to a function with ``origin``, None if unknown.

    It is the array that this thread called last, unless the function was called since, or its inputs have no history.
    In these cases the call may belong to no array, and to a later run.
    """
    array = None if _last_call.array is None else _last_call.array()
    if array is None or origin in _last_call.functions:
        return None
    outputs = [leaf.tensor for leaf in arguments.leaves if is_stacked(leaf)]
    if torch.is_grad_enabled() and not any(output.requires_grad for output in outputs):
        return None
    _last_call.functions |= {origin}
    programs = _of_arrays.get(array)
    return programs_of(array) if programs is None else programs


class OwnPrograms:
    """The programs of one `PerModel` for calls that belong to no array, so that only its own calls count.

    If code calls `per_model` again for each call, the first `MAX_VARIANTS` sizes and states of a function get programs
    of their own. Further ones use a cache that all such functions share.
    """

    _counted_variants: ClassVar[_StateCache[bool]] = _StateCache(MAX_SHARED)
    _counts: ClassVar[dict[Any, int]] = {}

    def __init__(self, origin: Any) -> None:
        self._origin = origin
        self._programs: FunctionPrograms | None = None

    def get(self, state: Any, arguments: Arguments) -> FunctionPrograms:
        """Return the programs for a call with such arguments in which the function reads ``state``."""
        if self._programs is None:
            variant = self._origin, state, tuple(arguments.shapes)
            with _lock:
                count = self._counts.get(self._origin, 0)
                is_counted = self._counted_variants.get(variant) is not None
                if not is_counted and count < MAX_VARIANTS:
                    self._counts[self._origin] = count + 1
                    self._counted_variants.put(variant, state, True)
                    is_counted = True
            self._programs = FunctionPrograms() if is_counted else _of_many_variants
        return self._programs
