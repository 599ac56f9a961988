"""Derive the captures of members that differ in numbers from one capture, and verify it by a few others.

Every member runs once eagerly, which records its numbers at every operator. The capture's record of operators gives
their places in the graph. One or two further captures must equal the graphs derived for their members.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import contents, numbers_meet_sizes
from hfusion.capture.capture_member import Member
from hfusion.capture.eager_runs import apart, python_random_state, runnable, twin
from hfusion.capture.export import is_faithful
from hfusion.capture.python_state import restored, variables
from hfusion.capture.reachable_code import CodeSearch, search_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError
from hfusion.core.guards import Guards
from hfusion.core.layout import same_value
from hfusion.core.memory import copies, is_plain, same_values
from hfusion.core.program import Capture, Kind, Slot
from hfusion.device.backend import active_autocast
from hfusion.passes.align import Changes, Unexplained, align, fill, scalars
from hfusion.passes.candidates import by_name
from hfusion.torch_private.dispatch_modes import PreDispatchMode, enable_python_dispatcher
from hfusion.torch_private.operator_tables import correct_lstm_decomposition

# Largest number of captures of members that differ in numbers only: the first, and those that verify the places.
MAX_CAPTURES = 3
# Largest number of structures of traces; members with further structures are captured one by one.
MAX_STRUCTURES = 8

T = TypeVar("T")

aten = torch.ops.aten
# Operators that an export adds where a buffer is assigned; they take no numbers.
_ADDED = frozenset({aten.detach.default, aten.copy_.default})
# Operators that an export replaces by others.
_SAME = {aten.lift_fresh_copy.default: aten.lift_fresh.default}


def capture_variants(count: int, member: Callable[[int], Member], capture: Callable[[int], Capture]) -> list[Capture]:
    """Return the captures of variants 0 to ``count - 1``, exporting at most `MAX_CAPTURES` that differ in numbers only.

    Args:
        member: returns the member of a variant.
        capture: captures a variant.

    Raises:
        FusionError: a member cannot be captured; the message gives the reason.
    """
    if count <= MAX_CAPTURES:
        return [capture(variant) for variant in range(count)]
    captures: dict[int, Capture] = {}
    for traces in _groups(count, member):
        captures |= _capture_group(traces, member, capture)
    return [captures[variant] if variant in captures else capture(variant) for variant in range(count)]


def _groups(count: int, member: Callable[[int], Member]) -> list[dict[int, OperatorTrace]]:
    """Return groups of more than `MAX_CAPTURES` variants whose traces have one structure, with the traces."""
    groups: list[dict[int, OperatorTrace]] = []
    for variant in range(count):
        traced = member(variant)
        trace = trace_operators(twin(traced.model), traced.args, traced.kwargs)
        if trace is None:
            if variant == 0:
                # The other variants would probably fail, too.
                return []
            continue
        alike = next((group for group in groups if next(iter(group.values())).same_structure(trace)), None)
        if alike is not None:
            alike[variant] = trace
        elif len(groups) < MAX_STRUCTURES:
            groups.append({variant: trace})
    return [group for group in groups if len(group) > MAX_CAPTURES]


def _capture_group(
    traces: Mapping[int, OperatorTrace], member: Callable[[int], Member], capture: Callable[[int], Capture]
) -> dict[int, Capture]:
    """Return the captures of variants whose traces have one structure; of some only if filling in numbers fails."""
    (base, base_trace), *others = traces.items()
    first = capture(base)
    captures = {base: first}
    if first.opaque:
        return captures
    models = [member(variant).model for variant, _ in others] if first.size_uses else []
    if numbers_meet_sizes(first.size_uses, member(base).model, models):
        return captures
    try:
        changes = {variant: changes_between(first.calls, base_trace, trace) for variant, trace in others}
        filled = {variant: filled_capture(first, numbers) for variant, numbers in changes.items()}
    except Unexplained:
        return captures
    for variant in _provers(changes):
        if may_be_sizes(first.calls, changes[variant]):
            captures[variant] = capture(variant)
            if captures[variant].opaque or not _same_capture(captures[variant], filled[variant]):
                return captures
        else:
            proving = member(variant)
            if not is_faithful(filled[variant], proving.model, proving.args, proving.kwargs):
                return captures
    return filled | captures


def may_be_sizes(calls: Sequence[Any], changes: Changes) -> bool:
    """Return whether a changed number may determine sizes, so that the guards on sizes need a capture."""
    kinds = (
        str(argument.type)
        for call, paths in changes.items()
        for path in paths
        for argument in calls[call]._schema.arguments
        if argument.name == path[0]
    )
    return any("int" in kind.lower() or "List" in kind for kind in kinds)


def changes_between(calls: Sequence[Any], trace: OperatorTrace, other: OperatorTrace) -> Changes:
    """Return the numbers that differ between two traces of one structure, by index into the ``calls`` of a capture.

    Raises:
        Unexplained: the capture has operators that the first trace lacks.
    """
    call_index: dict[int, int] = {}
    start = 0
    for number, target in enumerate(calls):
        # An export leaves out only unused results.
        same = _SAME.get(target, target)
        later = range(start, len(trace.calls))
        index = next((k for k in later if _SAME.get(trace.calls[k].target, trace.calls[k].target) is same), None)
        if index is not None:
            call_index[index], start = number, index + 1
        elif target not in _ADDED:
            raise Unexplained(f"the capture calls {target}, which the code does not")
    paths_by_index = differing_places(trace, other)
    return {call_index[index]: paths for index, paths in paths_by_index.items() if index in call_index}


def filled_capture(first: Capture, changes: Changes) -> Capture:
    """Return the capture of a member whose numbers differ from ``first`` by ``changes``. Raises Unexplained."""
    graph, tensors = fill(first.graph, changes)
    constants = dict(first.constants)
    for key, (old, new) in _keyed(first.graph, first.slots, tensors).items():
        if not same_values(constants[key], old):
            raise Unexplained(f"the tensor {key} is not as the code gave it")
        constants[key] = new
    return replace(first, graph=graph, constants=constants)


def _keyed(graph: fx.Graph, slots: Sequence[Slot], named: Mapping[str, T]) -> dict[str, T]:
    """Return ``named``, keyed by constants instead of placeholders. Raises Unexplained if one is no constant."""
    if not named:
        return {}
    pairs = zip(graph.find_nodes(op="placeholder"), slots, strict=True)
    keys = {node.name: slot.name for node, slot in pairs if slot.kind is Kind.CONSTANT}
    unknown = named.keys() - keys.keys()
    if unknown:
        raise Unexplained(f"{min(unknown)} is no constant")
    return {keys[name]: item for name, item in named.items()}


def _provers(changes: Mapping[int, Changes]) -> list[int]:
    """Choose the variants to capture besides the first: each has the most differing numbers not covered before."""
    differing = {
        v: {(call, path) for call, paths in variant_changes.items() for path in paths}
        for v, variant_changes in changes.items()
    }
    chosen: list[int] = []
    proven: set[Any] = set()
    while len(chosen) < MAX_CAPTURES - 1:
        best = max(differing, key=lambda variant: len(differing[variant] - proven))
        if chosen and not differing[best] - proven:
            break
        chosen.append(best)
        proven |= differing.pop(best)
    return chosen


def _same_capture(capture: Capture, other: Capture) -> bool:
    try:
        graph = align([capture.graph, other.graph], (0, 1))
        guards = [
            guard.assumptions() if isinstance(guard, Guards) else guard for guard in (capture.guards, other.guards)
        ]
    except (FusionError, ValueError):
        return False
    return (
        not scalars(graph)
        and (capture.out_spec, capture.modes, capture.slots) == (other.out_spec, other.modes, other.slots)
        and guards[0] == guards[1]
        and capture.constants.keys() == other.constants.keys()
        and all(same_values(tensor, other.constants[name]) for name, tensor in capture.constants.items())
    )


# One eager run of a member's own code, as the sequence of operators that a capture would hold, with their numbers.

# A capture costs tens of milliseconds and more, such a run little more than a forward. Two members whose traces have
# one structure have graphs that differ in numbers at most, at the sizes of this call.

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
            the names and shapes of these tensors, and the modes.
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
        tuple((path, part.training) for path, part in member.named_modules(remove_duplicate=False)),
    )
    return OperatorTrace(tuple(recorder.calls), tuple(recorder.unregistered_tensors), end_state)


class _OperatorRecorder(PreDispatchMode):
    """Records the operators that reach torch's dispatcher, before they are decomposed."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[TracedCall] = []
        self.unregistered_tensors: list[Tensor] = []
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
        self.looks |= func in _LOOKS
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
            self._origins[id(tensor)] = (ref, tensor)
        return self._origins[id(tensor)][0]

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
