"""Record the calls of submodules in one eager run: inputs, outputs, writes, and shared memory."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.address_access import AddressWatch
from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.attribute_writes import names_written
from hfusion.capture.eager_runs import apart, call_on_copies, python_random_state, twin
from hfusion.capture.method_interception import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.python_state import MUTABLE_CONTAINERS, compared_variables, identity, restored
from hfusion.capture.reachable_code import holders_of
from hfusion.capture.registered_tensors import device_of, tensors
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError
from hfusion.core.memory import same_values, tensors_in
from hfusion.core.python_values import PLAIN, IdentityRef, Link, parts, walk
from hfusion.core.tree import know_dataclasses
from hfusion.device.backend import backend
from hfusion.torch_private.functorch import is_wrapped


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of an island.

    Attributes:
        number, inside: the number of the call, and the numbers of the calls around it, outermost first.
        count: the number of tensors among the arguments.
        written: the positions of the argument tensors that the call wrote into.
        wrote, assigned: the keys of the module's tensors that it changed, and of those that it replaced.
        links: pairs (result, source) of tensors that share memory. A source is the position of an argument tensor, the
            key of a tensor of the module, or ``-1 - k`` for result k.
        addresses, draws: whether it accessed raw addresses of tensors, and drew random numbers.
        attached: whether a result needs a gradient although autograd was off.
        altered: whether it changed a list or dict among its arguments.
    """

    island: Island
    number: int
    inside: tuple[int, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    count: int
    written: frozenset[int]
    wrote: frozenset[str]
    assigned: frozenset[str]
    links: frozenset[tuple[int, int | str]]
    addresses: bool
    draws: bool
    attached: bool
    altered: bool


@dataclass(frozen=True, eq=False)
class Records:
    """The recorded calls of one run of a model.

    Attributes:
        calls: the calls in the order in which they began.
        changed: the keys of the model's tensors that the run changed.
        failed: the islands with a call that raised an error, which forward caught.
        modes: see `Capture`.
        state: how the model's Python state changes during the run.
    """

    calls: Sequence[RecordedCall]
    changed: frozenset[str]
    failed: frozenset[Island]
    modes: Mapping[str, bool]
    state: StateWatch

    @property
    def top(self) -> RecordedCall:
        """The call of the whole forward."""
        return next(call for call in self.calls if call.island == WHOLE and not call.inside)

    def of(self, island: Island) -> list[RecordedCall]:
        return [call for call in self.calls if call.island == island]

    def outside(self, island: Island, stubs: Set[Island]) -> list[RecordedCall]:
        """Return the calls of ``island`` that are not inside a call of one of the ``stubs``."""
        entered = {call.number for call in self.calls if call.island in stubs}
        return [call for call in self.of(island) if entered.isdisjoint(call.inside)]

    def callers(self, island: Island) -> list[Island]:
        """Return the islands that call ``island`` directly."""
        by_number = {call.number: call.island for call in self.calls}
        return [by_number[call.inside[-1]] for call in self.of(island) if call.inside and call.inside[-1] in by_number]


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modes: Mapping[str, bool],
    recorded: Sequence[Island],
) -> Records:
    """Run a copy of ``model`` and record the calls in it. Inputs and random states are not changed.

    Args:
        modes: see `Capture`.
        recorded: the islands whose calls are recorded, with that of the whole forward.

    Raises:
        FusionError: forward is no plain method.
    """
    if WHOLE not in islands(model):
        raise FusionError(
            f"forward of {type(model).__name__} is no plain method, and can only run in a loop over members; define it "
            "by def forward(self, ...)"
        )
    member = twin(model)
    state = StateWatch(member)
    registered = dict(tensors(member))
    before = {name: _state(tensor) for name, tensor in registered.items()}
    with restored(model), apart(member):
        recorder = _CallRecorder(state)
        args, kwargs = copies((args, dict(kwargs)))
        with intercepted(member, recorded, recorder.call), AddressWatch(recorder.address):
            call_on_copies(member, args, kwargs)
        after, originals = dict(tensors(member)), dict(tensors(model))
        changed = {name for name, tensor in after.items() if not same_values(tensor, originals[name])}
        changed |= {
            name
            for name in registered
            if registered[name] is not after[name] or _state(registered[name]) != before[name]
        }
    return Records(recorder.completed_calls, frozenset(changed), frozenset(recorder.failed), modes, state)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return version and address; a write changes the former, an assignment of ``tensor.data`` the latter."""
    # Reading the storage instead would count as an access to raw memory.
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


@dataclass(frozen=True)
class _CallStart:
    """The arguments and the state of a module when a call of it begins.

    Attributes:
        inside: the numbers of the calls that it is made in.
        leaves, spec: the flat arguments, and their structure.
        inputs: the tensors among them, each with its version and a copy.
        registered, states: the tensors of the module by key, and the version and address of each.
        random_states: see `_random_states`.
    """

    number: int
    inside: tuple[int, ...]
    leaves: Sequence[Any]
    spec: pytree.TreeSpec
    inputs: Sequence[tuple[Tensor, int, Tensor]]
    registered: Mapping[str, Tensor]
    states: Mapping[str, tuple[int, int]]
    random_states: Any


@dataclass
class _CallRecorder:
    """Records calls.

    Attributes:
        open: the numbers of the calls that have not ended.
        failed: the islands that raised errors.
        addressing: the numbers of the calls that accessed raw addresses.
    """

    state: StateWatch
    calls: list[RecordedCall | None] = field(default_factory=list)
    called_islands: list[Island] = field(default_factory=list)
    failed: set[Island] = field(default_factory=set)
    open: list[int] = field(default_factory=list)
    addressing: set[int] = field(default_factory=set)

    noting: bool = False

    @property
    def completed_calls(self) -> list[RecordedCall]:
        """The calls that were recorded to their end."""
        return [call for call in self.calls if call is not None]

    def address(self) -> None:
        """Note an access to raw addresses in all open calls, unless the recorder itself made it."""
        if not self.noting:
            self.addressing.update(self.open)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``, and record the call."""
        know_dataclasses((args, kwargs))
        # Tensors wrapped by torch.func's transforms mean nothing outside of them.
        if any(map(is_wrapped, [*tensors_in((args, kwargs)), *(tensor for _, tensor in tensors(method.module))])):
            return method.original(*args, **kwargs)
        start = self._start(method, args, kwargs)
        self.open.append(start.number)
        try:
            output = method.original(*args, **kwargs)
        except Exception:
            self.failed.add(method.island)
            raise
        finally:
            self.open.pop()
        know_dataclasses(output)
        if not any(map(is_wrapped, tensors_in(output))):
            self.calls[start.number] = self._completed(method, start, args, kwargs, output)
        return output

    def _start(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _CallStart:
        self.state.look(method.island, method.module)
        number = len(self.calls)
        self.calls.append(None)
        self.called_islands.append(method.island)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        registered = dict(tensors(method.module))
        return _CallStart(
            number,
            tuple(self.open),
            leaves,
            spec,
            [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors_in(leaves)],
            registered,
            {key: _state(tensor) for key, tensor in registered.items()},
            _random_states(method.module),
        )

    def _completed(
        self, method: Method, start: _CallStart, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> RecordedCall:
        module, registered, results = method.module, start.registered, tensors_in(output)
        changed_leaves, changed_spec = pytree.tree_flatten((args, kwargs))
        altered = start.spec != changed_spec or any(
            a is not b for a, b in zip(start.leaves, changed_leaves, strict=True)
        )
        # Record new containers: forward may change the originals later.
        args, kwargs = pytree.tree_unflatten(start.leaves, start.spec)
        written = frozenset(
            k
            for k, (tensor, version, copied) in enumerate(start.inputs)
            if tensor._version != version or not same_values(tensor, copied)
        )
        assigned = frozenset(key for key, tensor in tensors(module) if tensor is not registered.get(key))
        wrote = assigned.union(key for key, tensor in registered.items() if _state(tensor) != start.states[key])
        sources: dict[int | str, Tensor] = {}
        sources |= enumerate(tensor for tensor, _, _ in start.inputs)
        sources.update((*registered.items(), *tensors(module)))
        self.noting = True
        links = frozenset(_linked(results, sources))
        self.noting = False
        self.state.look(method.island, module)
        return RecordedCall(
            method.island,
            start.number,
            start.inside,
            args,
            kwargs,
            pytree.tree_map(lambda leaf: leaf, output),
            len(start.inputs),
            written,
            wrote,
            assigned,
            links,
            start.number in self.addressing,
            _random_states(module) != start.random_states,
            not torch.is_grad_enabled() and any(result.requires_grad for result in results),
            altered,
        )


def _random_states(module: nn.Module) -> Any:
    """Return the states from which code of ``module`` draws, comparable."""
    states = backend(device_of(module)).random_states()
    return python_random_state(), {kind: state.numpy().tobytes() for kind, state in states.items()}


def _linked(results: Sequence[Tensor], sources: Mapping[int | str, Tensor]) -> Iterator[tuple[int, int | str]]:
    for k, result in enumerate(results):
        memory = _memory(result)
        if memory is None:
            continue
        yield from ((k, key) for key, source in sources.items() if _memory(source) == memory)
        yield from ((k, -1 - other) for other in range(k) if _memory(results[other]) == memory)


def _memory(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return None
    return tensor.untyped_storage()._cdata


# The Python state of modules while forward runs: attributes, and the lists, dicts and objects that they refer to.

# Types whose contents are no state of a model.
_LEAVES = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType, nn.Module, fx.Graph)

# By the id of each holder (a module, an object, a container), its items as pairs of a name and the value's `identity`;
# by the full name of each variable of a class or file, one such pair.
State: TypeAlias = Mapping[int | str, Sequence[tuple[Any, Any]]]


class StateWatch:
    """Compares the state of ``model`` with that at the beginning of a run of its forward.

    Attributes:
        changing: the islands of which a call began or ended with another state in reach, with an attribute of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changing: dict[Island, str] = {}
        self._model, self._variables = model, holders_of(model)
        # The objects read are kept, so that no id is used again.
        self._alive: dict[int, Any] = {}
        self._registered = {id(tensor) for _, tensor in tensors(model)}
        self._start = self._read(model)

    def look(self, island: Island, module: nn.Module) -> None:
        """Compare the state in reach of ``module``, of which a call begins or ends."""
        if island not in self.changing:
            state = self._read(module)
            changed = {holder for holder, items in state.items() if self._start.get(holder, items) != items}
            if changed:
                self.changing[island] = self._name(module, changed)

    def written(self, island: Island) -> str | None:
        """Return an attribute in reach of ``island`` that forward changes, or may change; None if there is none."""
        if island in self.changing:
            return self.changing[island]
        state = self._reach(self._model.get_submodule(island.path).modules())
        holders = [self._alive[key] for key in state if isinstance(key, int)]
        # Assignments in code are known by names alone, and objects of other files, such as a configuration, have many.
        files = {type(holder).__module__ for holder in holders if isinstance(holder, nn.Module)}
        own = [held for held in holders if type(held).__module__ in files or type(held) is types.SimpleNamespace]
        assigned, filled = self._names_written
        names = {name for holder in own for name, _ in state[id(holder)]} & assigned
        names |= {
            name
            for holder in holders
            for name, value in _named_parts(holder)
            if isinstance(value, MUTABLE_CONTAINERS) and name in filled
        }
        return min(names, default=None)

    @cached_property
    def _names_written(self) -> tuple[frozenset[Any], frozenset[Any]]:
        return names_written(self._model)

    def _read(self, module: nn.Module) -> State:
        """Return the state in reach of ``module`` and its submodules, and all variables that code names."""
        variables = compared_variables(self._variables)
        return {**self._reach(module.modules()), **{name: [(name, value)] for name, value in variables}}

    def _reach(self, roots: Iterable[Any]) -> State:
        """Return the state in reach of ``roots``: modules without their submodules, objects, containers."""
        state: dict[int | str, Sequence[tuple[Any, Any]]] = {}

        def visit(holder: Any) -> list[Any]:
            held = list(_named_parts(holder))
            # What is written into registered tensors is no Python state.
            state[id(holder)] = [
                (name, IdentityRef(value) if id(value) in self._registered else identity(value)) for name, value in held
            ]
            return [value for _, value in held if not isinstance(value, _LEAVES)]

        self._alive |= walk(roots, visit)
        return state

    def _name(self, module: nn.Module, holders: Collection[int | str]) -> str:
        """Return the path of an attribute of ``module`` or its submodules that leads to one of ``holders``."""
        for path, part in module.named_modules():
            for name, value in python_attributes(part):
                if id(part) in holders or (not isinstance(value, _LEAVES) and holders & self._reach([value]).keys()):
                    return f"{path}.{name}".strip(".")
        return next((holder for holder in holders if isinstance(holder, str)), type(module).__name__)


def _named_parts(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the attributes and items of a holder by name; for a module, the attributes that its author set."""
    if isinstance(holder, nn.Module):
        yield from python_attributes(holder)
        return
    for link, name, value in parts(holder):
        yield name if link is Link.ATTRIBUTE else (link, identity(name)), value
