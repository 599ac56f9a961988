"""Record the calls of submodules in one eager run: inputs, outputs, writes, and shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.address_access import AddressWatch
from hfusion.capture.eager_runs import apart, call_on_copies, python_random_state, twin
from hfusion.capture.method_interception import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.python_state import restored
from hfusion.capture.registered_tensors import device_of, tensors
from hfusion.capture.state_watch import StateWatch
from hfusion.core.containers import know_dataclasses
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError
from hfusion.core.memory import same_values, tensors_in
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
