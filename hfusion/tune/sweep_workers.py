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
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
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
# An array that ends is collected as garbage at once if models with more bytes of parameters have joined since the last
# collection. With gradients and the optimizer's state, the garbage is several times as large.
_GARBAGE = 1 << 26


# What workers do.


@dataclass
class _TrialHost:
    """The arrays of a worker by name, with what trains them.

    Attributes:
        threads: the number of threads of plain trials; None: those that torch has.
        joined: the bytes of parameters that joined since Python last collected garbage for arrays that ended.
    """

    recipe: SweepRecipe
    stopping: Callable[[], bool]
    threads: int | None = None
    rows: dict[str, TrialRows] = field(default_factory=dict)
    joined: int = 0

    def call(self, name: str, call: RowsCall | bytes) -> Any:
        """Call a method of an array. ``join`` and ``restore`` create it; their last arguments say what."""
        method, args = unpack(call) if isinstance(call, bytes) else call
        if method in ("join", "restore"):
            *others, plain, members = args
            members = pickle.loads(members) if isinstance(members, bytes) else members
            for member in members:
                if member.model is None:
                    member.model = self.recipe.model(member.number, member.suggestion)
                self.joined += sum(parameter.nbytes for parameter in member.model.parameters())
            if name not in self.rows:
                kind = PlainTrial if plain else TrialRows
                self.rows[name] = kind(self.recipe, members[0].suggestion.choices, self.stopping)
            args = *others, members
        rows = self.rows[name]
        with torch_threads(self.threads if self.threads and isinstance(rows, PlainTrial) else torch.get_num_threads()):
            return getattr(rows, method)(*args)

    def drop(self, name: str) -> None:
        """Let an array go.

        It and its programs form reference cycles, which hold memory until Python collects garbage. As that visits every
        object of the process, in up to a second, small arrays wait until Python does so itself.
        """
        if type(self.rows.pop(name, None)) is TrialRows and self.joined > _GARBAGE:
            gc.collect()
            self.joined = 0


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
            host.drop(name)
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


class SweepWorkers:
    """Workers that hold the `TrialRows` of each array, and call their methods.

    Args:
        max_failures: how many times the process of an array may be lost.

    Attributes:
        lost: called with an array whose process was lost, the reason, and whether its device has another process.
            Places the array on a device on which it goes on. Set by the owner.
    """

    def __init__(self, executor: Executor | LocalExecutor, recipe: SweepRecipe, max_failures: int = 3) -> None:
        self._executor: Any = executor
        self._recipe, self._max_failures, self._local = recipe, max_failures, isinstance(executor, LocalExecutor)
        self._recipe_ref = None
        if not isinstance(executor, LocalExecutor):
            self._recipe_ref = executor.put(pack("what the sweep trains with", recipe, {}))
        # The executor appends devices that join.
        self.devices: Sequence[DeviceInfo] = executor.devices
        # How many plain trials a device trains at the same time.
        self.side_by_side = getattr(executor, "side_by_side", 1)
        self._arrays: dict[str, ShapeArray] = {}
        self._dropped: dict[int, list[str]] = {}
        self.lost_devices: set[int] = set()
        # For each busy worker: its arrays, and how many calls of each will be done when it answers.
        self._running: dict[int, dict[str, int]] = {}
        # The devices that are training. This process only trains while it waits.
        self.busy: Collection[int] = () if self._local else self._running
        self._results: dict[str, Any] = {}
        self.lost: Callable[[ShapeArray, str, bool], None]

    def join(self, array: ShapeArray, new: Sequence[SweepTrial]) -> None:
        """Let trials join an array, which is created on its device if there is none."""
        self.send(array, "join", *self._placed(array, new))

    def restore(self, array: ShapeArray, saved: Path) -> None:
        """Restore an array from a save."""
        self.send(array, "restore", saved, *self._placed(array, list(array.slots.values())))
        self.first([array])

    def _placed(self, array: ShapeArray, members: Sequence[SweepTrial]) -> tuple[bool, Any]:
        """Choose the worker of an array if it is new. Return whether it is plain, and its members for the worker.

        A cluster makes their models again.
        """
        packed: Any = [replace(m, model=m.model if self._local else None) for m in members]
        if array.name not in self._arrays:
            # An array that was dropped may begin again.
            array.calls, array.done, array.losses = [], 0, 0
            if array.plain and self._local and (parcel := self._executor.parcel(members[0])) is not None:
                packed, loads = parcel, defaultdict[int, float](float)
                for other in self._arrays.values():
                    loads[other.worker] += other.cost
                array.fork = min(self._executor.forks(), key=lambda fork: (fork in self._running, loads[fork]))
            self._arrays[array.name] = array
        return array.plain, packed

    def send(self, array: ShapeArray, method: str, *args: Any) -> None:
        """Call a method without a result. The call is deferred until the next one whose result is needed."""
        call = method, args
        array.calls.append(call if self._local else pack(f"what is told to {method}", call, {}))

    def first(self, arrays: Sequence[ShapeArray]) -> tuple[ShapeArray, Any]:
        """Wait for the first result of the last calls of these arrays, and return the array and the result.

        Starts the pending calls of arrays whose workers are idle, raises errors of calls, and restarts arrays of lost
        devices.
        """
        while not (ready := [array for array in arrays if array.name in self._results]):
            idle: dict[int, list[ShapeArray]] = {}
            for array in arrays:
                if array.worker not in self._running:
                    idle.setdefault(array.worker, []).append(array)
            for worker, waiting in idle.items():
                calls = {array.name: tuple(array.calls[array.done :]) for array in waiting}
                self._running[worker] = {array.name: len(array.calls) for array in waiting}
                dropped = tuple(self._dropped.pop(worker, ()))
                self._executor.start_job(worker, RowsJob(self._recipe_ref, calls, dropped))
            for worker, message in self._executor.wait(_GLANCE):
                if isinstance(message, Answered):
                    for name, count in self._running.pop(worker).items():
                        array = self._arrays[name]
                        array.done = count
                        if self._local:
                            # No call is repeated.
                            array.calls, array.done = [], 0
                    self._results |= message.value
                elif isinstance(message, Failure):
                    raise message.error_of(f"the process of {self.devices[worker].name!r}")
                elif isinstance(message, Lost):
                    self._lose(worker, self._running.pop(worker, {}), message.reason)
        return ready[0], self._results.pop(ready[0].name)

    def collect(self, arrays: Sequence[ShapeArray]) -> dict[ShapeArray, Any]:
        """Wait for the results of the last calls of these arrays, and return them in their order."""
        results: dict[ShapeArray, Any] = {}
        while missing := [array for array in arrays if array not in results]:
            array, result = self.first(missing)
            results[array] = result
        return {array: results[array] for array in arrays}

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
        for array in [array for array in self._arrays.values() if array.device == device]:
            array.done, array.losses = 0, array.losses + (array.name in running)
            self.lost(array, reason, device not in self.lost_devices)
            if array.losses > self._max_failures:
                raise DeviceLost(f"the device of {array.name} was lost {array.losses} times: {reason}")

    @torch.no_grad()
    def leave(self, array: ShapeArray, member: SweepTrial) -> nn.Module:
        """Free the row of a member, and return its model on the CPU."""
        self.send(array, "leave", member.tag)
        _, found = self.first([array])
        if isinstance(found, nn.Module):
            return found.cpu()
        model = self._recipe.model(member.number, member.suggestion).cpu()
        for key, tensor in tensors(model):
            tensor.copy_(found[key])
        return model

    def save(self, arrays: Sequence[ShapeArray], folder: Path) -> dict[ShapeArray, Path]:
        """Save each array into a folder of its name in ``folder``, and return the paths of the saves."""
        for array in arrays:
            self.send(array, "save", folder / array.name)
        paths = self.collect(arrays)
        for array in arrays if not self._local else ():
            # A process may have been lost after its save, while other arrays were saved.
            is_done, array.calls = array.done == len(array.calls), []
            self.send(array, "restore", paths[array], *self._placed(array, list(array.slots.values())))
            array.done = len(array.calls) if is_done else 0
        return paths

    def drop(self, array: ShapeArray) -> None:
        """Remove an array without trials."""
        del self._arrays[array.name]
        self._dropped.setdefault(array.worker, []).append(array.name)
