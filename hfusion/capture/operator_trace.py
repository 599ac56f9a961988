"""One eager run of a member's own code, as the sequence of operators that a capture would hold, with their numbers.

A capture costs tens of milliseconds and more, such a run little more than a forward. Two members whose traces have one
structure have graphs that differ in numbers at most, at the sizes of this call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import contents
from hfusion.capture.eager_runs import apart, python_random_state, runnable
from hfusion.capture.python_state import restored, variables
from hfusion.capture.reachable_code import CodeSearch, search_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError
from hfusion.core.layout import same_value
from hfusion.core.memory import is_plain
from hfusion.core.tree import leaves
from hfusion.device.backend import active_autocast
from hfusion.passes.candidates import by_name
from hfusion.torch_private.dispatch_modes import PreDispatchMode, enable_python_dispatcher
from hfusion.torch_private.operator_tables import correct_lstm_decomposition

aten = torch.ops.aten

# Largest number of elements of a tensor made of Python numbers; larger tensors are data, and are not compared.
MAX_ELEMENTS = 65536

# Operators whose results code may look at, so that other values would lead to other operators.
_LOOKS = frozenset({aten._local_scalar_dense.default, aten.is_nonzero.default, aten.item.default, aten.equal.default})


@dataclass(frozen=True)
class TensorRef:
    """The origin of a tensor of a trace.

    Kind ``own`` with the key of a registered tensor, ``input`` with the index of an argument leaf, ``call`` with the
    indices of a call and of its result, or ``made`` with the index in `OperatorTrace.unregistered_tensors`.
    """

    kind: str
    key: Any


@dataclass(frozen=True, eq=False)
class TracedCall:
    """One call of an operator.

    Attributes:
        structure: what is alike in calls that differ in numbers at most: the arguments by name, with a `TensorRef` for
            each tensor and the kind of each number, the dtypes, devices and dims of results, grad mode and autocast.
        numbers: the numbers, and tensors that the code made of numbers, by their paths within the arguments.
    """

    target: Any
    structure: Any
    numbers: dict[tuple[Any, ...], Any]


@dataclass(frozen=True, eq=False)
class OperatorTrace:
    """The operators of one call of a member.

    Attributes:
        calls: the operators in order.
        unregistered_tensors: the tensors that the code made of Python numbers, or holds without registering them.
        end_state: the structure of the outputs, the origins of the outputs and of the member's tensors after the call,
            the names and shapes of these tensors, and the modes that forward set.
    """

    calls: tuple[TracedCall, ...]
    unregistered_tensors: tuple[Tensor, ...]
    end_state: Any

    def same_structure(self, other: OperatorTrace) -> bool:
        """Return whether both call the same operators with the same tensors, and differ in numbers at most."""
        return (
            len(self.calls) == len(other.calls)
            and self.end_state == other.end_state
            and len(self.unregistered_tensors) == len(other.unregistered_tensors)
            and all(map(_same_kind, self.unregistered_tensors, other.unregistered_tensors))
            and all(
                a.target is b.target and a.structure == b.structure
                for a, b in zip(self.calls, other.calls, strict=True)
            )
        )


def trace_operators(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> OperatorTrace | None:
    """Run ``module``, a copy to discard afterwards, and return its trace; None if operators do not show all it does.

    That is the case if it fails, looks at values, draws from other random numbers than torch's, leaves state in Python
    attributes or variables, or registers hooks on tensors.
    """
    if not runnable(module):
        return None
    try:
        search = search_of([module])
        with restored(module, search):
            return _traced(module, search, args, kwargs)
    except (FusionError, RuntimeError, TypeError, ValueError, IndexError, AttributeError, NotImplementedError):
        # A capture will report the reason.
        return None


def _traced(
    member: nn.Module, search: CodeSearch, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> OperatorTrace | None:
    before, around = contents(member), variables(search)
    untouched = {path: part.training for path, part in member.named_modules(remove_duplicate=False)}
    args, kwargs = copies((args, dict(kwargs)))
    recorder = _OperatorRecorder()
    recorder.know("own", dict(tensors(member)).items())
    recorder.know("input", enumerate(pytree.tree_leaves((args, kwargs))))
    correct_lstm_decomposition()
    with apart(member):
        random_state = python_random_state()
        with enable_python_dispatcher(), recorder:
            result = member(*args, **kwargs)
        draws = python_random_state() != random_state
    if draws or recorder.looks or recorder.hooked():
        return None
    if contents(member) != before or variables(search) != around:
        return None
    leaves, spec = pytree.tree_flatten(result)
    end_state = (
        spec,
        recorder.referred(leaves),
        recorder.referred(list(dict(tensors(member)).values())),
        tuple((name, tuple(tensor.shape)) for name, tensor in tensors(member)),
        tuple(
            (path, part.training)
            for path, part in member.named_modules(remove_duplicate=False)
            if untouched.get(path) != part.training
        ),
    )
    return OperatorTrace(tuple(recorder.calls), tuple(recorder.unregistered_tensors), end_state)


class _OperatorRecorder(PreDispatchMode):
    """Records the operators that reach torch's dispatcher, before they are decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self.unregistered_tensors: list[Tensor] = []
        self._unregistered_versions: list[int] = []
        self.looks = False
        # They are kept alive, so that no id is used again.
        self._origins: dict[int, tuple[TensorRef, Tensor]] = {}
        # A factory such as torch.full returns another tensor object than its operator.
        self._by_memory: dict[Any, TensorRef] = {}

    def know(self, kind: str, named: Any) -> None:
        for key, tensor in named:
            if isinstance(tensor, Tensor):
                self._origins.setdefault(id(tensor), (TensorRef(kind, key), tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        numbers: dict[tuple[Any, ...], Any] = {}
        named = self._structure(by_name(func, args, kwargs or {}), (), numbers)
        self.looks |= func in _LOOKS and not all(map(self._is_constant, leaves((args, kwargs), Tensor)))
        settings = torch.is_grad_enabled(), *(active_autocast() or ())
        results = func(*args, **(kwargs or {}))
        flat = results if isinstance(results, list | tuple) else [results]
        for index, tensor in enumerate(flat):
            if isinstance(tensor, Tensor):
                ref = TensorRef("call", (len(self.calls), index))
                self._origins[id(tensor)] = (ref, tensor)
                if (memory := _memory(tensor)) is not None:
                    self._by_memory[memory] = ref
        self.calls.append(TracedCall(func, (named, tuple(map(_described, flat)), settings), numbers))
        return results

    def referred(self, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Return leaves with a `TensorRef` for each tensor, in which NaN equals NaN, and 0.0 differs from -0.0."""
        return tuple(
            self._origin(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf)) if _is_number(leaf) else leaf
            for leaf in leaves
        )

    def _structure(self, nest: Any, path: tuple[Any, ...], numbers: dict[tuple[Any, ...], Any]) -> Any:
        """Return what a nest of arguments has besides its ``numbers``, which are added."""
        if isinstance(nest, Tensor):
            ref = self._origin(nest)
            if ref.kind == "made":
                numbers[path] = self.unregistered_tensors[ref.key]
            return ref
        if isinstance(nest, dict):
            return {name: self._structure(item, (*path, name), numbers) for name, item in nest.items()}
        if isinstance(nest, list | tuple):
            return tuple(self._structure(item, (*path, index), numbers) for index, item in enumerate(nest))
        if _is_number(nest):
            numbers[path] = nest
            return "bool" if isinstance(nest, bool) else "number"
        return type(nest), nest

    def _origin(self, tensor: Tensor) -> TensorRef:
        if id(tensor) not in self._origins:
            ref = self._by_memory.get(_memory(tensor))
            if ref is None:
                ref = TensorRef("made", len(self.unregistered_tensors))
                self.unregistered_tensors.append(tensor.detach().clone() if tensor.numel() <= MAX_ELEMENTS else tensor)
                self._unregistered_versions.append(-1 if tensor.is_inference() else tensor._version)
            self._origins[id(tensor)] = (ref, tensor)
        return self._origins[id(tensor)][0]

    def _is_constant(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a constant of the code: unregistered, and never written in this run."""
        ref = self._origins[id(tensor)][0]
        if ref.kind != "made" or tensor._version != self._unregistered_versions[ref.key]:
            return False
        memory = tensor.untyped_storage().data_ptr()
        others = (held for origin, held in self._origins.values() if origin.kind in ("own", "input"))
        return not any(is_plain(held) and held.untyped_storage().data_ptr() == memory for held in others)

    def hooked(self) -> bool:
        """Return whether the code registered a hook on a tensor, which no operator shows."""
        return any(tensor._backward_hooks for _, tensor in self._origins.values())


def _memory(tensor: Tensor) -> Any:
    """Return address, shape and strides of a tensor; None if it has no plain memory."""
    if not is_plain(tensor) or not tensor.numel():
        return None
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device


def _described(result: Any) -> Any:
    """Describe a result of an operator without its sizes, which may differ, as where the k of topk does."""
    if isinstance(result, Tensor):
        return result.dim(), result.dtype, result.device, result.requires_grad
    return None if _is_number(result) else result


def _same_kind(tensor: Tensor, other: Tensor) -> bool:
    if tensor is other:
        return True
    kinds = [(t.shape, t.dtype, t.device, t.requires_grad, t.layout) for t in (tensor, other)]
    return kinds[0] == kinds[1] and is_plain(tensor) and is_plain(other) and tensor.numel() <= MAX_ELEMENTS


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | complex)


def differing_places(trace: OperatorTrace, other: OperatorTrace) -> dict[int, dict[tuple[Any, ...], tuple[Any, Any]]]:
    """Return the numbers that differ between two traces of one structure, by call and by path within the argument.

    A tensor that was created from numbers counts as one.
    """
    differing: dict[int, dict[tuple[Any, ...], tuple[Any, Any]]] = {}
    for index, (a, b) in enumerate(zip(trace.calls, other.calls, strict=True)):
        pairs = {path: (number, b.numbers[path]) for path, number in a.numbers.items()}
        if unlike := {path: pair for path, pair in pairs.items() if not _equal(*pair)}:
            differing[index] = unlike
    return differing


def _equal(number: Any, other: Any) -> bool:
    if number is other or not isinstance(number, Tensor):
        return same_value(number, other)
    equal = (number == other) | ((number != number) & (other != other))
    return bool(equal.all()) and (not number.is_floating_point() or bool((number.signbit() == other.signbit()).all()))
