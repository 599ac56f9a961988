"""The worker process of a device: it trains one array at a time and reports results to the driver."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.cluster.messages import Answered, DeviceInfo, Lost, failure, unpack
from hfusion.device.forked_worker import Failure
from hfusion.device.machine import Device, Machine
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.policy import named
from hfusion.tasks.arrange import arrange_one, arrays_of
from hfusion.tasks.array_log import ArrayEvent, ArrayNote
from hfusion.tasks.array_plan import Room
from hfusion.tasks.checkpoints import check_folder
from hfusion.tasks.reading import generators
from hfusion.tasks.task import Evaluation, Step, Task
from hfusion.tasks.train import TrainError, train_arranged
from hfusion.tasks.training_report import Report

# Seconds between two messages with results, and between two checks whether training is to stop.
_TELL, _LOOK = 0.2, 1.0


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
    """A result that the driver must answer with the members that stop, see `ArrayTrainer.answers`. Training waits."""

    result_message: ResultMessage


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


class _Stopped(Exception):
    """Raised inside training to end it when the driver has asked this process to stop."""


class _Outbox:
    """Collects the results and notes of an array, and sends them to the driver a few times a second.

    ``epoch``: None to send every step. Minibatches per epoch to send only the latest step and the last of each epoch.
    """

    def __init__(self, tell: Callable[[Message], None], epoch: int | None) -> None:
        self._tell, self._epoch = tell, epoch
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
        self._sent = time.monotonic()
        notes = tuple(self._notes.popleft() for _ in range(len(self._notes)))
        results, self._results = tuple(self._results), []
        if results or notes:
            self._tell(ResultMessage(results, notes))


class ArrayTrainer:
    """Trains arrays on one device.

    Args:
        name: the name of the device in the cluster.
        machine: a machine with this one device.
    """

    def __init__(self, name: str, machine: Machine) -> None:
        self._name, self._machine = name, machine
        self.stopping = Event()
        # The driver's answers to `StopQuery` messages, received by another thread.
        self.answers: SimpleQueue[list[int]] = SimpleQueue()
        self.call_state: dict[str, Any] = {}

    @property
    def device(self) -> Device:
        (device,) = self._machine.devices
        return device

    def info(self) -> DeviceInfo:
        device = self.device
        rates = self._machine.calibrate()[device.name]
        return DeviceInfo(self._name, device.physical, device.memory, rates)

    def run(self, job: ArrayJob | CallJob, part: Callable[[Any], Any], tell: Callable[[Message], None]) -> None:
        """Run a job. The last message passed to ``tell`` is its result or error.

        ``part(reference)`` returns a stored object.
        """
        try:
            tell(self._trained(job, part, tell) if isinstance(job, ArrayJob) else Answered(job.call(self, part)))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, TrainError) and error.__cause__ is not None else error
            tell(failure(cause))

    def _trained(self, job: ArrayJob, part: Callable[[Any], Any], tell: Callable[[Message], None]) -> ArrayDone:
        # Each array unpacks its own copies, since iterating over a loader changes its state.
        parts: dict[str, Any] = {}

        def get(key: str) -> Any:
            if key not in parts:
                parts[key] = part(job.parts[key])
            return parts[key]

        sent: Task = unpack(job.parcel, get)
        outbox = _Outbox(tell, None if job.sends_every_step else sent.epoch)

        def heard(result: Step | Evaluation) -> None:
            if self.stopping.is_set():
                raise _Stopped
            outbox.add(result)

        def ask(result: Step | Evaluation) -> list[int]:
            # Send earlier results first, so that the driver receives all in order.
            if job.sends_every_step:
                outbox.send()
            tell(StopQuery(ResultMessage((result,))))
            while not self.stopping.is_set():
                with suppress(Empty):
                    return self.answers.get(timeout=_LOOK)
            raise _Stopped

        task, name, members = replace(sent, callbacks=(heard,)), job.name, job.members
        planned = None
        if job.room is not None:
            arrays = arrays_of(task, job.room)
            if job.checkpoint is not None:
                check_folder(job.checkpoint, [array.plan.name for array in arrays], resume=True, task=task.name)
            if len(arrays) > 1:
                tell(Divided(tuple((array.plan.name, array.members) for array in arrays)))
            planned = arrays[0]
            name, members = planned.plan.name, planned.members
            del arrays
        arranged, plan = arrange_one(task, members, name, self._machine, planned)
        answers, notes = ask if job.awaits_answers else None, None if job.checkpoint is None else outbox.note
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
