"""The far side: a process that trains arrays on one device, one after the other, and tells how it goes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Event
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion.array.array_editing import changed_tensors
from hfusion.cluster.messages import Answered, DeviceInfo, Lost, Raised
from hfusion.cluster.serialization import unpack
from hfusion.device.machine import Device, Machine
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.plan import TaskPlan
from hfusion.schedule.timeline import Timeline
from hfusion.tasks.array_log import ArrayEvent, ArrayNote
from hfusion.tasks.reading import generators
from hfusion.tasks.task import Evaluation, Step, Task
from hfusion.tasks.train import TrainError, train_array
from hfusion.tasks.training_report import Report

# Seconds from one telling of results to the next, and from one look at whether it ends to the next.
_TELL, _LOOK = 0.2, 1.0


@dataclass(frozen=True)
class ArrayJob:
    """An array to train.

    Attributes:
        parcel: its task.
        parts: where what the task leaves out is kept, by key.
        plan: as it is trained; None: the process plans.
        asks: every result is answered, see `StopQuery`.
        tells: the driver wants every result, and not the latest alone, and those that end an epoch.
    """

    name: str
    members: tuple[int, ...]
    parcel: bytes
    parts: dict[str, Any]
    policy: str
    checkpoint: Path | None
    every: int | None
    plan: TaskPlan | None = None
    asks: bool = False
    tells: bool = True


class CallJob(Protocol):
    """Another request to a process of a cluster. It is pickled."""

    def call(self, trainer: ArrayTrainer, part: Callable[[Any], Any]) -> Any:
        """Return the answer; ``part`` gives stored objects by key. ``trainer.kept`` persists between calls."""


@dataclass(frozen=True)
class Told:
    """Results of minibatches and evaluations, in order; ``at``: when the last one was there, see `time.monotonic`.

    ``notes``: what else has happened to the array, if that is logged.
    """

    results: tuple[Step | Evaluation, ...]
    at: float
    notes: tuple[ArrayNote, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """All losses as one tensor, as to pickle each takes a tenth of a small minibatch."""
        losses = [result.losses for result in self.results]
        if len({each.dtype for each in losses}) != 1:
            return vars(self)
        heads = [(type(each), {**vars(each), "losses": each.losses.shape}) for each in self.results]
        joined = torch.cat([each.reshape(-1) for each in losses])
        return {"heads": heads, "losses": joined, "at": self.at, "notes": self.notes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "heads" in state:
            pieces = state["losses"].split([head["losses"].numel() for _, head in state["heads"]])
            made = zip(state["heads"], pieces, strict=True)
            results = (kind(**{**head, "losses": piece.view(head["losses"])}) for (kind, head), piece in made)
            state = {"results": tuple(results), "at": state["at"], "notes": state["notes"]}
        self.__dict__.update(state)


@dataclass(frozen=True)
class StopQuery:
    """A result for which an array waits: the driver answers with the members that stop, see `ArrayTrainer.answers`."""

    told: Told


@dataclass(frozen=True, eq=False)
class ArrayDone:
    """An array is trained. The driver writes what it has become into its own array and optimizer.

    Attributes:
        report: without the array.
        tensors: of the array, by name, but frozen ones, which the driver has.
        optimizer: the state dict of the task's optimizer, if that came as an object.
        begun: when its timeline begins, on the clock of its process.
        generators: the states of those that the loaders draw from, after the training.
    """

    report: Report
    tensors: dict[str, Tensor]
    optimizer: dict[str, Any] | None
    begun: float
    generators: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class ArrayLeft:
    """An array has left its device, as it was asked to, and is saved. ``begun``: as of `ArrayDone`."""

    timeline: Timeline
    peak: Mapping[str, int]
    begun: float


# What a job ends with.
End: TypeAlias = ArrayDone | ArrayLeft | Answered | Raised
Message: TypeAlias = Told | StopQuery | End | Lost | DeviceInfo


class _Stopped(Exception):
    """The driver does not want this any more."""


class _Outbox:
    """Results and notes of an array, which go to the driver together, a few times a second.

    ``epoch``: its minibatches, where of others than the last of an epoch the latest result alone is sent; else None.
    """

    def __init__(self, tell: Callable[[Message], None], epoch: int | None) -> None:
        self._tell, self._epoch = tell, epoch
        self._results: list[Step | Evaluation] = []
        # Threads that save add to it, too.
        self._notes: deque[ArrayNote] = deque()
        self._sent = time.monotonic()

    def add(self, result: Step | Evaluation) -> None:
        if self._epoch is not None:
            ends = self._epoch
            self._results = [each for each in self._results if isinstance(each, Evaluation) or each.step + 1 == ends]
        self._results.append(result)
        if time.monotonic() - self._sent > _TELL:
            self.send()

    def note(self, index: int, event: ArrayEvent, device: str | None) -> None:
        if isinstance(event, ArrayNote) and event.event == "copied":
            # An array that goes on from this save gives these results no more.
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
            self._tell(Told(results, self._sent, notes))


class ArrayTrainer:
    """Trains arrays on one device.

    Args:
        name: of the device in the cluster.
        machine: of one device.
    """

    def __init__(self, name: str, machine: Machine) -> None:
        self._name, self._machine = name, machine
        self.stopping = Event()
        # The name of an array that is to leave; another thread sets it.
        self.leaving: str | None = None
        # What another thread got for an `StopQuery`.
        self.answers: SimpleQueue[list[int]] = SimpleQueue()
        self.kept: dict[str, Any] = {}

    @property
    def device(self) -> Device:
        (device,) = self._machine.devices
        return device

    def info(self) -> DeviceInfo:
        device = self.device
        rates = self._machine.calibrate()[device.name]
        return DeviceInfo(self._name, device.physical, device.memory, rates, time.time())

    def run(self, job: ArrayJob | CallJob, part: Callable[[Any], Any], tell: Callable[[Message], None]) -> None:
        """Train an array, or do what is asked; the last that is told is how it ended.

        ``part`` gives what is kept somewhere.
        """
        try:
            tell(self._trained(job, part, tell) if isinstance(job, ArrayJob) else Answered(job.call(self, part)))
        except BaseException as error:
            cause = error.__cause__ if isinstance(error, TrainError) and error.__cause__ is not None else error
            tell(Raised(cause))

    def _trained(
        self, job: ArrayJob, part: Callable[[Any], Any], tell: Callable[[Message], None]
    ) -> ArrayDone | ArrayLeft:
        # A copy for each array: reading changes what a loader is.
        parts: dict[str, Any] = {}

        def get(key: str) -> Any:
            if key not in parts:
                parts[key] = part(job.parts[key])
            return parts[key]

        task = unpack(job.parcel, get)
        outbox = _Outbox(tell, None if job.tells else task.epoch)

        def heard(result: Step | Evaluation) -> None:
            if self.stopping.is_set():
                raise _Stopped
            outbox.add(result)

        def ask(result: Step | Evaluation) -> list[int]:
            # First what came before, so that the driver hears all in order.
            if job.tells:
                outbox.send()
            tell(StopQuery(Told((result,), time.monotonic())))
            while not self.stopping.is_set():
                with suppress(Empty):
                    return self.answers.get(timeout=_LOOK)
            raise _Stopped

        report = train_array(
            replace(task, callbacks=(heard,)),
            job.members,
            job.name,
            self._machine,
            job.policy,
            job.checkpoint,
            job.every,
            lambda: self.leaving == job.name,
            job.plan,
            ask if job.asks else None,
            None if job.checkpoint is None else outbox.note,
        )
        ended = time.time()
        outbox.send()
        optimizer = task.optimizer if isinstance(task.optimizer, FusedOptimizer) else None
        begun = ended - max((span.end for span in report.timeline.actions), default=0.0)
        found = report[task.name]
        if len(found.losses) < task.steps and len(found.stopped) < len(job.members):
            return ArrayLeft(report.timeline, report.peak, begun)
        ((_, array),) = found._arrays
        return ArrayDone(
            replace(report, tasks={task.name: replace(found, _arrays=())}),
            {name: tensor.detach().cpu() for name, tensor in changed_tensors(array).items()},
            None if optimizer is None else optimizer.state_dict(),
            begun,
            tuple(each.get_state() for each in loader_generators(task)),
        )


def loader_generators(task: Task) -> list[torch.Generator]:
    """Return the generators that reading the loaders of a task draws from."""
    return [each for loader in (task.loader, task.eval_loader) for each in generators(loader)]
