"""The worker process of a device, which trains one array at a time; and such processes on this machine."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from multiprocessing import connection, get_all_start_methods, set_start_method
from operator import attrgetter
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.cluster.messages import Answered, DeviceInfo, Lost, pack, unpack
from hfusion.core.claimed_folder import run_folder
from hfusion.core.errors import HFusionError
from hfusion.device.machine import Device, Machine
from hfusion.device.worker_process import Failure, Parent, WorkerEnded, WorkerProcess, close_workers
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.policy import named
from hfusion.tasks.arrange import Room, arrange_one, arrays_of
from hfusion.tasks.minibatch_border import check_folder
from hfusion.tasks.reading import generator_states
from hfusion.tasks.task import Evaluation, Step, Task
from hfusion.tasks.train import train_arranged
from hfusion.tasks.training_report import ArrayEvent, ArrayNote, Report, TrainError

# Seconds between two messages with results.
_TELL = 0.2


@dataclass(frozen=True)
class ArrayJob:
    """An array to train.

    Attributes:
        parcel: the pickled task.
        parts: references to the objects that arrays share, which ``parcel`` omits, by key.
        room: the device to plan the task for; only the first array is trained. None: train ``members`` as one array.
        awaits_answers: wait for the driver's answer to every result, see `StopQuery`.
        sends_every_step: send every step; otherwise only the latest one and the last one of each epoch.
    """

    name: str
    members: tuple[int, ...]
    parcel: bytes
    parts: dict[str, Any]
    room: Room | None
    policy: str
    checkpoint: Path | None
    every: int | None
    awaits_answers: bool = False
    sends_every_step: bool = True


class CallJob(Protocol):
    """A request to a worker process other than to train an array. It is pickled."""

    def call(self, trainer: ArrayTrainer, part: Callable[[Any], Any]) -> Any:
        """Return the answer.

        ``part(reference)`` returns a stored object; ``trainer.call_state`` persists between calls.
        """


@dataclass(frozen=True)
class EventMessage:
    """Results of minibatches and evaluations and, if they are logged, other events of the array, in order."""

    events: tuple[ArrayEvent, ...]


@dataclass(frozen=True)
class Divided:
    """A task is trained as several arrays, given by name and members. This process trains the first."""

    arrays: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class StopQuery:
    """A result that the driver replies to with the members that stop. ``before``: earlier events. Training waits."""

    before: tuple[ArrayEvent, ...]
    result: Step | Evaluation


@dataclass(frozen=True, eq=False)
class ArrayDone:
    """The result of a trained array. The driver copies it into its own array and optimizer.

    Attributes:
        report: the report, without the array itself.
        tensors: the tensors of the array that training changed, by name.
        optimizer: the state dict of the task's optimizer, if the task has an optimizer object.
        start_time: when the timeline begins, by the clock of this node.
        generators: states, after training, of the generators that the loaders of training and evaluation draw from.
    """

    report: Report
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    start_time: float
    generators: tuple[list[Tensor], list[Tensor]]


# The last message of a job.
End: TypeAlias = ArrayDone | Answered | Failure
Message: TypeAlias = EventMessage | Divided | StopQuery | End | Lost | DeviceInfo


class Driver(Protocol):
    """The driver as a worker sees it, see `hfusion.device.worker_process.Parent`."""

    def tell(self, message: Any) -> None: ...

    def ask(self, message: Any) -> Any: ...

    def is_gone(self) -> bool: ...


class _Outbox:
    """Collects the events of an array, and sends them to the driver a few times a second.

    ``epoch``: None to send every step. Minibatches per epoch to send only the latest step and the last of each epoch.
    """

    def __init__(self, driver: Driver, epoch: int | None) -> None:
        self._driver, self._epoch = driver, epoch
        self._events: list[ArrayEvent] = []
        # The threads that write checkpoints note events, too.
        self._lock = Lock()
        self._sent = time.monotonic()

    def add(self, result: Step | Evaluation) -> None:
        with self._lock:
            last = self._events[-1] if self._events else None
            if isinstance(last, Step) and self._epoch not in (None, last.step + 1):
                self._events.pop()
            self._events.append(result)
        if time.monotonic() - self._sent > _TELL:
            self.send()

    def note(self, index: int, event: ArrayEvent, device: str | None) -> None:
        if not isinstance(event, ArrayNote):
            return
        if event.event != "copied":
            with self._lock:
                self._events.append(event)
        # The first minibatch may take long, and an array that resumes from a save does not repeat its results.
        if event.event in ("started", "resumed", "copied"):
            self.send()

    def send(self) -> None:
        if message := self._taken():
            self._driver.tell(EventMessage(message))

    def ask(self, result: Step | Evaluation) -> list[int]:
        """Ask the driver which members stop."""
        members: list[int] = self._driver.ask(StopQuery(self._taken(), result))
        return members

    def _taken(self) -> tuple[ArrayEvent, ...]:
        self._sent = time.monotonic()
        with self._lock:
            events, self._events = tuple(self._events), []
        return events


class ArrayTrainer:
    """Trains arrays on one device.

    Args:
        name: the name of the device in the cluster.
        machine: a machine with this one device.
        driver: gets the results. If it is gone, training ends with the error of `Driver.tell`.
    """

    def __init__(self, name: str, machine: Machine, driver: Driver) -> None:
        self._name, self._machine, self.driver = name, machine, driver
        (self.device,) = machine.devices
        self.call_state: dict[str, Any] = {}

    def info(self) -> DeviceInfo:
        rates = self._machine.calibrate()[self.device.name]
        return DeviceInfo(self._name, self.device.physical, self.device.memory, rates)

    def run(self, job: ArrayJob | CallJob, part: Callable[[Any], Any]) -> End:
        """Run a job, and return its result or error. ``part(reference)`` returns a stored object."""
        try:
            return self._trained(job, part) if isinstance(job, ArrayJob) else Answered(job.call(self, part))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, TrainError) and error.__cause__ is not None else error
            return Failure(cause)

    def _trained(self, job: ArrayJob, part: Callable[[Any], Any]) -> ArrayDone:
        # Each array unpacks its own copies, since iterating over a loader changes its state.
        sent: Task = unpack(job.parcel, cache(lambda key: part(job.parts[key])))
        outbox = _Outbox(self.driver, None if job.sends_every_step else sent.epoch)
        task, name, members, planned = replace(sent, callbacks=(outbox.add,)), job.name, job.members, None
        if job.room is not None:
            arrays = arrays_of(task, job.room)
            if job.checkpoint is not None:
                check_folder(job.checkpoint, [array.plan.name for array in arrays], resume=True, task=task.name)
            if len(arrays) > 1:
                self.driver.tell(Divided(tuple((array.plan.name, array.members) for array in arrays)))
            planned = arrays[0]
            name, members = planned.plan.name, planned.members
            del arrays
        arranged, plan = arrange_one(task, members, name, self._machine, planned)
        answers, notes = outbox.ask if job.awaits_answers else None, None if job.checkpoint is None else outbox.note
        saved = job.checkpoint, job.every
        report = train_arranged(arranged, plan, self._machine, named(job.policy), False, *saved, answers, notes)
        start_time = time.time() - max((span.end for span in report.timeline.actions), default=0.0)
        outbox.send()
        return ArrayDone(
            replace(report, tasks={task.name: replace(report[task.name], _arrays=())}),
            {name: tensor.detach().cpu() for name, tensor in changed_tensors(arranged[0].array).items()},
            task.optimizer.state_dict() if isinstance(task.optimizer, FusedOptimizer) else None,
            start_time,
            (generator_states(task.loader), generator_states(task.eval_loader)),
        )


# Processes of this machine, one for each of its devices: a cluster without anything to install.


# Seconds that processes have to end before they are killed.
_GRACE = 5.0


class ProcessExecutor:
    """A spawned process for each device of ``machine``, which share its host memory evenly."""

    # No device joins a machine.
    timeout, starting = 0.0, False

    def __init__(self, machine: Machine) -> None:
        self._machine, self._folder, self._stored_count = machine, run_folder(), 0
        self._workers: dict[int, WorkerProcess] = {}
        self.devices: list[DeviceInfo] = []
        try:
            for device in range(len(machine.devices)):
                self._start(device)
            self.devices += [worker.poll() for worker in self._workers.values()]
        except BaseException:
            self.close()
            raise

    def _start(self, device: int) -> None:
        """Start the process of a device, and ask it for its `DeviceInfo`."""
        machine = self._machine
        host = max(1, machine.host // len(machine.devices))
        serve = partial(_serve, machine.devices[device], host, machine.disk, self._folder.path, process_settings())
        name = f"the process of {machine.devices[device].name!r}"
        self._workers[device] = WorkerProcess(name, serve, method="spawn")
        self._workers[device].call(None)

    def put(self, value: Any) -> Any:
        self._stored_count += 1
        path = self._folder.path / str(self._stored_count)
        path.write_bytes(pack("what the tasks share", value, {}))
        return path

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        # A process that has ended is found by the next wait.
        with suppress(WorkerEnded):
            self._workers[device].call(job)

    def answer(self, device: int, members: list[int]) -> None:
        with suppress(WorkerEnded):
            self._workers[device].call(members)

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        devices = {worker: device for device, worker in self._workers.items()}
        messages: list[tuple[int, Message]] = []
        ready: list[Any] = connection.wait(list(devices), seconds)  # type: ignore[arg-type]
        for worker in ready:
            try:
                messages.append((devices[worker], worker.receive()))
            except WorkerEnded as error:
                close_workers([self._workers.pop(devices[worker])])
                messages.append((devices[worker], Lost(str(error))))
        return messages

    def revive(self, device: int) -> bool:
        try:
            self._start(device)
            info: DeviceInfo = self._workers[device].poll()
        except HFusionError:
            close_workers([self._workers.pop(device)])
            return False
        self.devices[device] = replace(self.devices[device], process=info.process)
        return True

    def close(self) -> None:
        try:
            close_workers(list(self._workers.values()), _GRACE)
        finally:
            self._folder.remove()


def _serve(
    device: Device, host: int, disk: Path, folder: Path, settings: Sequence[Callable[[], object]], parent: Parent
) -> Callable[[ArrayJob | CallJob | None], Any]:
    """Return the function that answers requests in the process of a device."""
    atexit.register(_leave, folder, os.getppid())
    # Code that starts processes here, such as a DataLoader, must work as in any other program.
    set_start_method(get_all_start_methods()[0], force=True)
    for setting in settings:
        setting()
    trainer = ArrayTrainer(device.name, Machine([device], host, disk), parent)

    def part(path: Path) -> Any:
        return unpack(path.read_bytes())

    return lambda job: trainer.info() if job is None else trainer.run(job, part)


def _leave(folder: Path, driver: int) -> None:
    """End this process at once: its last garbage collection frees nothing, and takes seconds on a busy machine."""
    if os.getppid() != driver:
        # The driver was killed, and left its folder.
        shutil.rmtree(folder, ignore_errors=True)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


# Switches in torch.backends that results depend on. Some have an older and a newer name: torch refuses to read the
# older one once the newer one was set.
_SWITCHES = (
    "cudnn.enabled",
    "cudnn.benchmark",
    "cudnn.deterministic",
    "cudnn.allow_tf32",
    "cudnn.conv.fp32_precision",
    "cuda.matmul.allow_tf32",
    "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction",
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
    "mkldnn.enabled",
)


def process_settings() -> list[Callable[[], object]]:
    """Return functions that give another process the settings of torch, and Python's and numpy's random states."""
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    deterministic = torch.are_deterministic_algorithms_enabled()
    return [
        partial(torch.set_num_threads, torch.get_num_threads()),
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, deterministic, warn_only=warns),
        partial(_set_switches, _switches()),
        partial(random.setstate, random.getstate()),
        partial(np.random.set_state, np.random.get_state()),
    ]


def _switches() -> dict[str, Any]:
    values: dict[str, Any] = {}
    with suppress(RuntimeError):
        values["float32_matmul_precision"] = torch.get_float32_matmul_precision()
    for name in _SWITCHES:
        with suppress(RuntimeError, AttributeError):
            values[name] = attrgetter(name)(torch.backends)
    return values


def _set_switches(switches: dict[str, Any]) -> None:
    """Set what differs in this process: setting the older name of an equal switch would forbid the newer one."""
    for name, value in switches.items():
        # Setting one may change those that follow.
        if _switches().get(name) == value:
            continue
        holder, _, attribute = name.rpartition(".")
        if holder:
            setattr(attrgetter(holder)(torch.backends), attribute, value)
        else:
            torch.set_float32_matmul_precision(value)
