"""The worker process of a device: it trains one array at a time and reports results to the driver."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.cluster.messages import Answered, DeviceInfo, Lost, unpack
from hfusion.device.machine import Device, Machine
from hfusion.device.worker_process import Failure
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.policy import named
from hfusion.tasks.arrange import Room, arrange_one, arrays_of
from hfusion.tasks.array_log import ArrayEvent, ArrayNote
from hfusion.tasks.checkpoints import check_folder
from hfusion.tasks.reading import generators
from hfusion.tasks.task import Evaluation, Step, Task
from hfusion.tasks.train import TrainError, train_arranged
from hfusion.tasks.training_report import Report

# Seconds between two messages with results.
_TELL = 0.2


@dataclass(frozen=True)
class ArrayJob:
    """An array to train.

    Attributes:
        parcel: the pickled task.
        parts: references to the shared objects that ``parcel`` omits, by key.
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
class ResultMessage:
    """Results of minibatches and evaluations, in order. ``notes``: other events of the array, if they are logged."""

    results: tuple[Step | Evaluation, ...]
    notes: tuple[ArrayNote, ...] = ()


@dataclass(frozen=True)
class Divided:
    """A task is trained as several arrays, given by name and members. This process trains the first."""

    arrays: tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class StopQuery:
    """A result that the driver replies to with the members that stop. ``told``: what came before. Training waits."""

    told: ResultMessage
    result: Step | Evaluation


@dataclass(frozen=True, eq=False)
class ArrayDone:
    """The result of a trained array. The driver copies it into its own array and optimizer.

    Attributes:
        report: the report, without the array itself.
        tensors: the tensors of the array that training changed, by name.
        optimizer: the state dict of the task's optimizer, if the task has an optimizer object.
        start_time: when the timeline begins, by the clock of this node.
        generators: states, after training, of the generators that the loaders draw from.
    """

    report: Report
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    start_time: float
    generators: tuple[Tensor, ...] = ()


# The last message of a job.
End: TypeAlias = ArrayDone | Answered | Failure
Message: TypeAlias = ResultMessage | Divided | StopQuery | End | Lost | DeviceInfo


class Driver(Protocol):
    """The driver as a worker sees it, see `hfusion.device.worker_process.Parent`."""

    def tell(self, message: Any) -> None: ...

    def ask(self, message: Any) -> Any: ...

    def is_gone(self) -> bool: ...


class _Outbox:
    """Collects the results and notes of an array, and sends them to the driver a few times a second.

    ``epoch``: None to send every step. Minibatches per epoch to send only the latest step and the last of each epoch.
    """

    def __init__(self, driver: Driver, epoch: int | None) -> None:
        self._driver, self._epoch = driver, epoch
        self._results: list[Step | Evaluation] = []
        # The threads that write checkpoints append to it, too.
        self._notes: deque[ArrayNote] = deque()
        self._sent = time.monotonic()

    def add(self, result: Step | Evaluation) -> None:
        if self._epoch is not None:
            epoch = self._epoch
            self._results = [
                previous for previous in self._results if isinstance(previous, Evaluation) or previous.step + 1 == epoch
            ]
        self._results.append(result)
        if time.monotonic() - self._sent > _TELL:
            self.send()

    def note(self, index: int, event: ArrayEvent, device: str | None) -> None:
        if isinstance(event, ArrayNote) and event.event == "copied":
            # An array that resumes from this save does not repeat these results.
            self.send()
        elif isinstance(event, ArrayNote):
            self._notes.append(event)
            if event.event in ("started", "resumed"):
                # The first minibatch may take long.
                self.send()

    def send(self) -> None:
        message = self._taken()
        if message.results or message.notes:
            self._driver.tell(message)

    def ask(self, result: Step | Evaluation) -> list[int]:
        """Ask the driver which members stop."""
        members: list[int] = self._driver.ask(StopQuery(self._taken(), result))
        return members

    def _taken(self) -> ResultMessage:
        self._sent = time.monotonic()
        notes = tuple(self._notes.popleft() for _ in range(len(self._notes)))
        results, self._results = tuple(self._results), []
        return ResultMessage(results, notes)


class ArrayTrainer:
    """Trains arrays on one device.

    Args:
        name: the name of the device in the cluster.
        machine: a machine with this one device.
        driver: gets the results. If it is gone, training ends with the error of `Driver.tell`.
    """

    def __init__(self, name: str, machine: Machine, driver: Driver) -> None:
        self._name, self._machine, self.driver = name, machine, driver
        self.call_state: dict[str, Any] = {}

    @property
    def device(self) -> Device:
        (device,) = self._machine.devices
        return device

    def info(self) -> DeviceInfo:
        device = self.device
        rates = self._machine.calibrate()[device.name]
        return DeviceInfo(self._name, device.physical, device.memory, rates)

    def run(self, job: ArrayJob | CallJob, part: Callable[[Any], Any]) -> End:
        """Run a job, and return its result or error. ``part(reference)`` returns a stored object."""
        try:
            return self._trained(job, part) if isinstance(job, ArrayJob) else Answered(job.call(self, part))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, TrainError) and error.__cause__ is not None else error
            return Failure(cause)

    def _trained(self, job: ArrayJob, part: Callable[[Any], Any]) -> ArrayDone:
        # Each array unpacks its own copies, since iterating over a loader changes its state.
        parts: dict[str, Any] = {}

        def get(key: str) -> Any:
            if key not in parts:
                parts[key] = part(job.parts[key])
            return parts[key]

        sent: Task = unpack(job.parcel, get)
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
        ended = time.time()
        outbox.send()
        return _answer(task, report, ended)


def _answer(task: Task, report: Report, ended: float) -> ArrayDone:
    """Return what the driver gets of an array whose training ended at the time ``ended``."""
    start_time = ended - max((span.end for span in report.timeline.actions), default=0.0)
    task_report = report[task.name]
    ((_, array),) = task_report._arrays
    return ArrayDone(
        replace(report, tasks={task.name: replace(task_report, _arrays=())}),
        {name: tensor.detach().cpu() for name, tensor in changed_tensors(array).items()},
        task.optimizer.state_dict() if isinstance(task.optimizer, FusedOptimizer) else None,
        start_time,
        tuple(generator.get_state() for generator in loader_generators(task)),
    )


def loader_generators(task: Task) -> list[torch.Generator]:
    """Return the generators that reading the loaders of a task draws from."""
    return [generator for loader in (task.loader, task.eval_loader) for generator in generators(loader)]
