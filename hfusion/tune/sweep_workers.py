"""The workers of a sweep: this process and its forks, or the processes of a cluster, each with arrays of its own.

Calls of an array are the names of methods of its `TrialRows`, and their arguments. In a cluster, the calls of each
array since its last save, or since its start, are kept. A process that takes over an array of a lost process gets all
of them. It reaches the same state, since models, seeds and minibatches are the same.
"""

from __future__ import annotations

import gc
import logging
import pickle
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import Answered, DeviceInfo, DeviceLost, Executor, Lost, pack, unpack
from hfusion.device.team import torch_threads
from hfusion.device.worker_process import Failure, Parent, WorkerProcess, why_no_fork
from hfusion.tune.space import SweepTrial
from hfusion.tune.trial_rows import PlainTrial, SweepRecipe, TrialRows

if TYPE_CHECKING:
    from hfusion.cluster.node import ArrayTrainer
    from hfusion.tune.trial_placement import ShapeArray

_log = logging.getLogger(__name__)

# The name of a method of `TrialRows`, and its arguments.
RowsCall: TypeAlias = tuple[str, tuple[Any, ...]]

_REMEDY = (
    "Call hf.sweep with fewer rows, or with processes=0. With a directory the same call goes on where the sweep was."
)
# Seconds of a wait for messages of a cluster, after which devices that are lost are noticed.
_GLANCE = 0.1


# What workers do.


@dataclass
class _TrialHost:
    """The arrays of a worker by name, with what trains them.

    ``threads``: the number of threads of plain trials; None: those that torch has.
    """

    recipe: SweepRecipe
    stopping: Callable[[], bool]
    threads: int | None = None
    rows: dict[str, TrialRows] = field(default_factory=dict)

    def call(self, name: str, call: RowsCall | bytes) -> Any:
        """Call a method of an array. ``join`` and ``restore`` create it; their last arguments say what."""
        method, args = unpack(call) if isinstance(call, bytes) else call
        if method in ("join", "restore"):
            *others, plain, members = args
            members = pickle.loads(members) if isinstance(members, bytes) else members
            for member in members:
                if member.model is None:
                    member.model = self.recipe.model(member.number, member.suggestion)
            if name not in self.rows:
                kind = PlainTrial if plain else TrialRows
                self.rows[name] = kind(self.recipe, members[0].suggestion.choices, self.stopping)
            args = *others, members
        rows = self.rows[name]
        with torch_threads(self.threads if self.threads and isinstance(rows, PlainTrial) else torch.get_num_threads()):
            return getattr(rows, method)(*args)


@dataclass(frozen=True)
class RowsJob:
    """The next job of a worker. It returns the result of the last call of each array.

    Attributes:
        recipe_ref: the reference by which a process of a cluster gets the recipe.
        calls: the calls of each array; pickled for a cluster.
        dropped: the names of arrays that have ended.
    """

    recipe_ref: Any
    calls: dict[str, tuple[RowsCall | bytes, ...]]
    dropped: tuple[str, ...]

    def call(self, trainer: ArrayTrainer, part: Callable[[Any], Any]) -> dict[str, Any]:
        """Run in a process of a cluster. Models are returned as tensors: their class may be importable here alone."""
        if "host" not in trainer.call_state:
            recipe = replace(unpack(part(self.recipe_ref)), device=trainer.device.physical)
            trainer.call_state["host"] = _TrialHost(recipe, trainer.driver.is_gone)
        return _as_tensors(self.answers(trainer.call_state["host"]))

    def answers(self, host: _TrialHost) -> dict[str, Any]:
        """Return the result of the last call of each array."""
        for name in self.dropped:
            if type(host.rows.pop(name, None)) is TrialRows:
                # It and its programs form reference cycles, which hold memory until Python collects garbage.
                gc.collect()
        return {name: [host.call(name, call) for call in calls][-1] for name, calls in self.calls.items()}


def _as_tensors(results: dict[str, Any]) -> dict[str, Any]:
    """Return results with the tensors of models in place of these."""
    return {
        name: {key: tensor.cpu() for key, tensor in tensors(value)} if isinstance(value, nn.Module) else value
        for name, value in results.items()
    }


class LocalExecutor:
    """This process, which trains arrays, and its forks, which train plain trials with one thread each.

    A trial that shares a tensor with another, or that cannot be pickled, stays in this process. All do if it cannot be
    forked.

    Args:
        processes: the number of forks; fewer than two: none.

    Attributes:
        side_by_side: the number of plain trials that are trained at the same time, if there are enough.
    """

    def __init__(self, info: DeviceInfo, recipe: SweepRecipe, processes: int) -> None:
        self.devices, self.side_by_side = [info], max(1, processes)
        if processes > 1 and (why := why_no_fork(recipe.device)):
            _log.info("plain trials are trained one after another in this process: %s", why)
            self.side_by_side = 1
        # Whether a trial stays here must not change the threads, which affect rounding.
        self._host = _TrialHost(recipe, lambda: False, 1 if self.side_by_side > 1 else None)
        self._forks: list[WorkerProcess] = []
        self._computing: dict[WorkerProcess, int] = {}
        self._job: RowsJob | None = None
        self._seen: Any = WeakIdKeyDictionary()

    def parcel(self, member: SweepTrial) -> bytes | None:
        """Return a plain trial as bytes for a fork; None if it stays here."""
        if self.side_by_side < 2:
            return None
        held = [tensor for _, tensor in tensors(member.model)]
        shared = any(tensor in self._seen for tensor in held)
        self._seen.update(dict.fromkeys(held, True))
        if shared:
            return None
        failed = list[str]()
        # A fork can import classes by name; cloudpickle, which may be absent, is for those that no module has.
        for pickler in ("pickle", "cloudpickle"):
            try:
                data: bytes = import_module(pickler).dumps([member])
                return data
            except Exception as error:
                failed.append(f"{type(error).__name__}: {error}")
        _log.info("%s stays in this process, as pickle fails: %s", member.tag, failed[0])
        return None

    def forks(self) -> range:
        """Return the indices of the forks, after starting them."""
        for number in range(len(self._forks), self.side_by_side):
            name, serve = f"process {number} of the sweep's trials", partial(_serve, self._host)
            self._forks.append(WorkerProcess(name, serve, self._forks, _REMEDY))
        return range(1, 1 + len(self._forks))

    def start_job(self, worker: int, job: RowsJob) -> None:
        """Start a job of a fork. The job of worker 0, which is this process, runs in `wait`."""
        if worker:
            fork = self._forks[worker - 1]
            fork.call(job)
            self._computing[fork] = worker
        else:
            self._job = job

    def wait(self, seconds: float) -> list[tuple[int, Answered]]:
        """Return the result of a job with its worker. Raises the error that it raised."""
        if self._job is not None:
            job, self._job = self._job, None
            return [(0, Answered(job.answers(self._host)))]
        ready: list[Any] = connection.wait([*self._computing])  # type: ignore[list-item]
        return [(self._computing.pop(fork), Answered(fork.poll())) for fork in ready]

    def close(self) -> None:
        """End the forks, and free the trials."""
        for fork in self._forks:
            fork.close()
        self._forks = []
        self._host.rows.clear()


def _serve(host: _TrialHost, parent: Parent) -> Callable[[RowsJob], Any]:
    """Return the function that answers requests in a fork."""
    own = replace(host, stopping=parent.is_gone, threads=None, rows={})
    return lambda job: _as_tensors(job.answers(own))


# What the driver asks of them.


@dataclass
class _SentCalls:
    """The calls of an array in a worker.

    Attributes:
        cost: the estimated seconds of an epoch of a plain trial.
        done: how many of the calls the worker has completed.
        lost: how often the worker was lost.
    """

    worker: int
    cost: float
    calls: list[RowsCall | bytes] = field(default_factory=list)
    done: int = 0
    lost: int = 0


class SweepWorkers:
    """Workers that hold the `TrialRows` of each array by its name, and call their methods.

    Args:
        max_failures: how many times the process of an array may be lost.

    Attributes:
        lost: called with the name of an array whose process was lost, the reason, and whether its device has another
            process. Returns the device on which the array goes on. Set by the owner.
    """

    def __init__(self, executor: Executor | LocalExecutor, recipe: SweepRecipe, max_failures: int = 3) -> None:
        self._executor: Any = executor
        self._recipe, self._max_failures = recipe, max_failures
        self._local = isinstance(executor, LocalExecutor)
        self._recipe_ref = None
        if not isinstance(executor, LocalExecutor):
            self._recipe_ref = executor.put(pack("what the sweep trains with", recipe, {}))
        # The executor appends devices that join.
        self.devices: Sequence[DeviceInfo] = executor.devices
        # How many plain trials a device trains at the same time.
        self.side_by_side = getattr(executor, "side_by_side", 1)
        self._sent: dict[str, _SentCalls] = {}
        self._dropped: dict[int, list[str]] = {}
        self.lost_devices: set[int] = set()
        # For each busy worker: its arrays, and how many calls of each will be done when it answers.
        self._running: dict[int, dict[str, int]] = {}
        # The devices that are training. This process only trains while it waits.
        self.busy: Collection[int] = () if self._local else self._running
        self._results: dict[str, Any] = {}
        self.lost: Callable[[str, str, bool], int]

    def worker_of(self, name: str) -> int:
        """Return the worker of an array."""
        return self._sent[name].worker

    def join(self, array: ShapeArray, new: Sequence[SweepTrial]) -> None:
        """Let trials join an array, which is created on its device if there is none."""
        self.send(array.name, "join", *self._placed(array, new))

    def restore(self, array: ShapeArray, saved: Path) -> None:
        """Restore an array from a save."""
        self.ask({array.name: ("restore", (saved, *self._placed(array, list(array.slots.values()))))})

    def _placed(self, array: ShapeArray, members: Sequence[SweepTrial]) -> tuple[bool, Any]:
        """Choose the worker of an array if it is new. Return whether it is plain, and its members for the worker.

        A cluster makes their models again.
        """
        packed: Any = [replace(m, model=m.model if self._local else None) for m in members]
        if array.name not in self._sent:
            worker = array.device
            if array.plain and self._local and (parcel := self._executor.parcel(members[0])) is not None:
                packed, loads = parcel, dict.fromkeys(self._executor.forks(), 0.0)
                for sent in self._sent.values():
                    if sent.worker in loads:
                        loads[sent.worker] += sent.cost
                worker = min(loads, key=lambda fork: (fork in self._running, loads[fork]))
            self._sent[array.name] = _SentCalls(worker, array.cost)
        return array.plain, packed

    def send(self, name: str, method: str, *args: Any) -> None:
        """Call a method without a result. The call is deferred until the next one whose result is needed."""
        call = method, args
        self._sent[name].calls.append(call if self._local else pack(f"what is told to {method}", call, {}))

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        """Call a method of each array, and return the results by array name."""
        for name, (method, args) in calls.items():
            self.send(name, method, *args)
        results: dict[str, Any] = {}
        while missing := [name for name in calls if name not in results]:
            name, result = self.first(missing)
            results[name] = result
        return results

    def first(self, names: Sequence[str]) -> tuple[str, Any]:
        """Wait for the first result of the last calls of these arrays, and return the array's name and the result."""
        while not (ready := [name for name in names if name in self._results]):
            self._start_idle(names)
            self._listen()
        return ready[0], self._results.pop(ready[0])

    def _start_idle(self, names: Sequence[str]) -> None:
        """Start the pending calls of arrays whose workers are idle."""
        idle: dict[int, list[str]] = {}
        for name in names:
            if (worker := self._sent[name].worker) not in self._running and name not in self._results:
                idle.setdefault(worker, []).append(name)
        for worker, waiting in idle.items():
            calls = {name: tuple(self._sent[name].calls[self._sent[name].done :]) for name in waiting}
            self._running[worker] = {name: len(self._sent[name].calls) for name in waiting}
            dropped = tuple(self._dropped.pop(worker, ()))
            self._executor.start_job(worker, RowsJob(self._recipe_ref, calls, dropped))

    def _listen(self) -> None:
        """Wait for messages of workers: store results, raise errors of calls, and restart arrays of lost devices."""
        for worker, message in self._executor.wait(_GLANCE):
            if isinstance(message, Answered):
                for name, count in self._running.pop(worker).items():
                    self._sent[name].done = count
                    if self._local:
                        # No call is repeated.
                        self._sent[name].calls, self._sent[name].done = [], 0
                self._results |= message.value
            elif isinstance(message, Failure):
                raise message.error_of(f"the process of {self._executor.devices[worker].name!r}")
            elif isinstance(message, Lost):
                self._lose(worker, self._running.pop(worker, {}), message.reason)

    def _lose(self, device: int, running: Collection[str], reason: str) -> None:
        """Schedule all calls of a lost device's arrays again, there or on other devices."""
        executor = self._executor
        if not executor.revive(device):
            self.lost_devices.add(device)
            if len(self.lost_devices) == len(self.devices):
                _log.warning("the trials wait for a device; lost was the last one: %s", reason)
            end = time.monotonic() + executor.timeout
            while len(self.lost_devices) == len(self.devices) and (executor.starting or time.monotonic() < end):
                # All devices are lost: messages that still arrive are dropped.
                executor.wait(_GLANCE)
        self._dropped.pop(device, None)
        for name, sent in self._sent.items():
            if sent.worker != device:
                continue
            sent.done, sent.lost = 0, sent.lost + (name in running)
            sent.worker = self.lost(name, reason, device not in self.lost_devices)
            if sent.lost > self._max_failures:
                raise DeviceLost(f"the device of {name} was lost {sent.lost} times: {reason}")

    @torch.no_grad()
    def leave(self, name: str, member: SweepTrial) -> nn.Module:
        """Free the row of a member, and return its model on the CPU."""
        found = self.ask({name: ("leave", (member.tag,))})[name]
        if isinstance(found, nn.Module):
            return found.cpu()
        model = self._recipe.model(member.number, member.suggestion).cpu()
        for key, tensor in tensors(model):
            tensor.copy_(found[key])
        return model

    def save(self, folders: Mapping[ShapeArray, Path]) -> dict[str, Path]:
        """Save each array into its folder, and return the paths of the saves."""
        paths: dict[str, Path] = self.ask({array.name: ("save", (folder,)) for array, folder in folders.items()})
        for array in folders if not self._local else ():
            sent = self._sent[array.name]
            # A process may have been lost after its save, while other arrays were saved.
            is_done, sent.calls = sent.done == len(sent.calls), []
            self.send(array.name, "restore", paths[array.name], *self._placed(array, list(array.slots.values())))
            sent.done = len(sent.calls) if is_done else 0
        return paths

    def drop(self, name: str) -> None:
        """Remove an array without trials."""
        self._dropped.setdefault(self._sent.pop(name).worker, []).append(name)
