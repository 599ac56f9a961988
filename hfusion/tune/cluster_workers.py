"""The rows of a sweep's arrays in the processes of a cluster. Lost arrays are restored, and their calls repeated.

The calls of each array since its last save, or since it was opened, are kept. A process that takes over an array of a
lost process gets all of them. It reaches the same state, since models, seeds and minibatches are the same.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from hfusion.cluster.driver import GLANCE
from hfusion.cluster.messages import Answered, DeviceInfo, DeviceLost, Executor, Lost, Raised
from hfusion.cluster.node import ArrayTrainer
from hfusion.cluster.serialization import pack, unpack
from hfusion.tune.plain_trials import PlainTrials
from hfusion.tune.space import ArrayChoices, ModelMaker, TrialModel
from hfusion.tune.sweep_workers import RowsCall
from hfusion.tune.training_setup import SweepRecipe
from hfusion.tune.trial_rows import TrialRows

_log = logging.getLogger(__name__)

_MAKER = "maker"
# Its name in errors.
SWEEP_PARCEL = "what the sweep trains with"


@dataclass(frozen=True)
class RowsJob:
    """The next job of a process. It returns the result of the last call of each array.

    Attributes:
        recipe_ref: the reference by which the process gets the recipe and the maker.
        calls: the pickled calls of each array.
        dropped: the names of arrays that have ended.
        collect: whether to collect garbage first.
    """

    recipe_ref: Any
    calls: dict[str, tuple[bytes, ...]]
    dropped: tuple[str, ...]
    collect: bool

    def call(self, trainer: ArrayTrainer, part: Callable[[Any], Any]) -> dict[str, Any]:
        if "recipe" not in trainer.call_state:
            recipe, maker = unpack(part(self.recipe_ref))
            device = trainer.device.physical
            trainer.call_state |= {"recipe": replace(recipe, device=device), _MAKER: replace(maker, device=device)}
        for name in self.dropped:
            trainer.call_state.pop(name, None)
        if self.collect:
            gc.collect()
        return {name: self._answer(trainer, name, calls) for name, calls in self.calls.items()}

    @staticmethod
    def _answer(trainer: ArrayTrainer, name: str, calls: Sequence[bytes]) -> Any:
        result: Any = None
        for data in calls:
            method, args = unpack(data, trainer.call_state.__getitem__)
            if method == "open":
                choices, plain = args
                kind = PlainTrials if plain else TrialRows
                trainer.call_state[name] = kind(trainer.call_state["recipe"], choices, trainer.stopping.is_set)
            else:
                result = getattr(trainer.call_state[name], method)(*args)
            if isinstance(result, nn.Module):
                # Send tensors only: its class may be importable in the driver alone.
                result = result.state_dict()
        return result


@dataclass
class _SentCalls:
    """The calls of an array, how many of them its process has completed, and how often that process was lost."""

    device: int
    calls: list[bytes] = field(default_factory=list)
    done: int = 0
    lost: int = 0


class ClusterWorkers:
    """Workers in the processes of ``executor``. The process of an array may be lost ``max_failures`` times.

    Attributes:
        recipe_ref: the reference by which processes get the recipe and the maker.
        choose_device: returns a new device for an array whose device is lost. Set by the owner.
        lost: called with the name of each array whose process was lost, and the reason. Set by the owner.
    """

    def __init__(self, executor: Executor, recipe: SweepRecipe, maker: ModelMaker, max_failures: int = 3) -> None:
        self._executor, self._maker, self._max_failures = executor, maker, max_failures
        self.recipe_ref = executor.put(pack(SWEEP_PARCEL, (recipe, maker), {}))
        self._sent_calls: dict[str, _SentCalls] = {}
        self._dropped: dict[int, list[str]] = {}
        self._collect: set[int] = set()
        self.lost_devices: set[int] = set()
        # For each busy device: its arrays, and how many calls of each will be done when it answers.
        self._running: dict[int, dict[str, int]] = {}
        self._results: dict[str, Any] = {}
        self._started: dict[str, None] = {}
        self.choose_device: Callable[[str], int] = lambda name: 0
        self.lost: Callable[[str, str], None] = lambda name, reason: None

    @property
    def side_by_side(self) -> int:
        return 1

    @property
    def busy(self) -> Collection[int]:
        return self._running

    @property
    def devices(self) -> Sequence[DeviceInfo]:
        return self._executor.devices

    def open(self, name: str, device: int, choices: ArrayChoices, plain: bool = False) -> None:
        self._sent_calls[name] = _SentCalls(device)
        self.send(name, "open", choices, plain)

    def send(self, name: str, method: str, *args: Any) -> None:
        self._sent_calls[name].calls.append(self._packed((method, args)))

    def _packed(self, call: RowsCall) -> bytes:
        return pack(f"what is told to {call[0]}", call, {id(self._maker): _MAKER})

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        for name, (method, args) in calls.items():
            self.send(name, method, *args)
        return self._done(calls)

    def start(self, calls: Mapping[str, RowsCall]) -> None:
        for name, (method, args) in calls.items():
            self.send(name, method, *args)
            self._started[name] = None

    def first(self) -> tuple[str, Any]:
        while True:
            # A device trains one array at a time, so that its other arrays may change in between.
            training = [name for name in self._started if name not in self._results]
            self._start_idle({self._sent_calls[name].device: [name] for name in reversed(training)})
            for name in self._results:
                if name in self._started:
                    del self._started[name]
                    return name, self._results.pop(name)
            self._listen()

    def _done(self, names: Collection[str]) -> dict[str, Any]:
        """Return the result of each array's last call, after all of its calls."""
        while missing := [name for name in names if name not in self._results]:
            devices: dict[int, list[str]] = {}
            for name in missing:
                devices.setdefault(self._sent_calls[name].device, []).append(name)
            self._start_idle(devices)
            self._listen()
        return {name: self._results.pop(name) for name in names}

    def _start_idle(self, names: Mapping[int, Sequence[str]]) -> None:
        """Start the pending calls of the arrays in ``names``, by device, on devices that are idle."""
        for device in names.keys() - self._running.keys():
            self._start_calls(device, names[device])

    def _listen(self) -> None:
        """Wait for messages of processes: store results, raise errors of calls, and restart arrays of lost devices."""
        for device, message in self._executor.wait(GLANCE):
            if isinstance(message, Answered):
                for name, count in self._running.pop(device).items():
                    self._sent_calls[name].done = count
                self._results |= message.value
            elif isinstance(message, Raised):
                raise message.error
            elif isinstance(message, Lost):
                self._lose(device, self._running.pop(device, {}), message.reason)

    def _start_calls(self, device: int, names: Sequence[str]) -> None:
        calls = {name: tuple(self._sent_calls[name].calls[self._sent_calls[name].done :]) for name in names}
        self._running[device] = {name: len(self._sent_calls[name].calls) for name in names}
        dropped, collect = tuple(self._dropped.pop(device, ())), device in self._collect
        self._collect.discard(device)
        self._executor.start_job(device, RowsJob(self.recipe_ref, calls, dropped, collect))

    def _lose(self, device: int, running: Collection[str], reason: str) -> None:
        """Schedule all calls of a lost device's arrays again, there or on other devices."""
        if not self._executor.revive(device):
            self.lost_devices.add(device)
            self._wait_for_device(reason)
        self._dropped.pop(device, None)
        for name, sent in self._sent_calls.items():
            if sent.device != device:
                continue
            sent.done, sent.lost = 0, sent.lost + (name in running)
            self.lost(name, reason)
            if sent.lost > self._max_failures:
                raise DeviceLost(f"the device of {name} was lost {sent.lost} times: {reason}")
            if device in self.lost_devices:
                sent.device = self.choose_device(name)

    def _wait_for_device(self, reason: str) -> None:
        """Wait until a device joins, if all are lost."""
        executor, end = self._executor, time.monotonic() + self._executor.timeout
        if len(self.lost_devices) == len(self.devices):
            _log.warning("the trials wait for a device; lost was the last one: %s", reason)
        while len(self.lost_devices) == len(self.devices) and (executor.starting or time.monotonic() < end):
            # All devices are lost: messages that still arrive are dropped.
            executor.wait(GLANCE)

    def leave(self, name: str, member: TrialModel) -> nn.Module:
        state = self.ask({name: ("leave", (member.tag,))})[name]
        model = self._maker.model(member.number, member.suggestion).cpu()
        model.load_state_dict(state)
        return model

    def save(self, folders: Mapping[str, Path], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, Path]:
        paths: dict[str, Path] = self.ask({name: ("save", (folder,)) for name, folder in folders.items()})
        for name, path in paths.items():
            sent = self._sent_calls[name]
            # A process may have been lost after its save, while other arrays were saved.
            is_done = sent.done == len(sent.calls)
            sent.calls = [sent.calls[0], self._packed(("restore", (path, list(members[name]))))]
            sent.done = len(sent.calls) if is_done else 0
        return paths

    def drop(self, name: str, *, collect: bool) -> None:
        device = self._sent_calls.pop(name).device
        self._dropped.setdefault(device, []).append(name)
        if collect:
            self._collect.add(device)
