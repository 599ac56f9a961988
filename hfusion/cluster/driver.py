"""The driver of a run on a cluster: it sends arrays to devices, handles their messages, and assembles the report."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo, DeviceLost, Executor, Lost, pack
from hfusion.cluster.node import ArrayDone, ArrayJob, Divided, EventMessage, Message, StopQuery
from hfusion.core.errors import HFusionError, PlanError
from hfusion.core.event_log import EventLog, first_line
from hfusion.device.worker_process import Failure
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Span, Timeline
from hfusion.tasks.arrange import Room, array_of
from hfusion.tasks.minibatch_border import OnResult, answered, check_folder
from hfusion.tasks.reading import set_generators
from hfusion.tasks.task import Evaluation, Step, Task, check_loaders, check_tensors, find_hook, listed_models, seed_of
from hfusion.tasks.training_report import ArrayEvent, ArrayLogs, ArrayNote, Report, TaskReport, TrainError, joined

_log = logging.getLogger(__name__)

# Seconds between two checks of the devices while no message arrives.
GLANCE = 1.0


class Drive:
    """A run on a cluster. ``show(index, minibatches)`` is called when a task has been trained on more minibatches.

    Args:
        placed: the tasks. Those that a worker divides get entries for their other arrays.
        log: the log of the arrays' events.
        on_result: decides which members stop, see `hfusion.train`.
    """

    def __init__(
        self,
        placed: Sequence[PlacedArray],
        executor: Executor,
        max_failures: int,
        log: EventLog,
        on_result: OnResult | None = None,
    ) -> None:
        self._on_result = on_result
        self._arrays, self._executor, self._logs = list(placed), executor, ArrayLogs(log)
        self._arrays_of = {array.task: [array] for array in placed}
        budgets = [device.budget for device in executor.devices]
        self._placement = Placement([array.size for array in placed], budgets, max_failures)
        self._parts = SharedParts(placed, executor)
        self._began = time.time()
        # When arrays began to wait for a device to join, and why the last device was lost.
        self._stranded_since: float | None = None
        self._last_loss = ""
        self.show: Callable[[int, int], None] = lambda index, steps: None

    def run(self) -> Report:
        """Train all arrays and return the report. Raises TrainError at the end if an array failed."""
        placement = self._placement
        while not placement.over:
            for device, number in list(placement.starts()):
                try:
                    self._executor.start_job(device, self._arrays[number].packed_job(self._parts))
                except HFusionError as error:
                    self._fail(device, error)
            for device, message in self._executor.wait(GLANCE):
                self._hear(device, message)
            self._wait_for_devices()
        report = self._report()
        failed = [array for array in self._arrays if array.error is not None]
        if failed:
            first: Any = failed[0].error
            raise TrainError.of(list(dict.fromkeys(array.task.name for array in failed)), first, report) from first
        return report

    def _hear(self, device: int, message: Message) -> None:
        if isinstance(message, Lost):
            self._lose(device, message.reason)
        elif isinstance(message, DeviceInfo):
            self._placement.join(message.budget)
        elif isinstance(message, EventMessage):
            self._hear_events(device, message.events)
        elif isinstance(message, Divided):
            # The worker trains the first part of its array.
            number = self._placement.running[device]
            whole = self._arrays[number]
            parts = [whole.part(*array) for array in message.arrays]
            self._arrays[number], self._arrays_of[whole.task] = parts[0], parts
            for part in parts[1:]:
                self._arrays.append(part)
                self._placement.add(part.size)
        elif isinstance(message, StopQuery):
            self._hear_events(device, message.before)
            self._executor.answer(device, self._answer(device, message.result))
        elif isinstance(message, Failure):
            self._fail(device, message.error_of(f"the process of {self._executor.devices[device].name!r}"))
        elif isinstance(message, ArrayDone):
            array = self._arrays[self._placement.end(device)]
            array.done = device, message
            self._show(array, array.task.steps)

    def _show(self, array: PlacedArray, steps: int) -> None:
        array.trained = steps
        counts = [part.trained for part in self._arrays_of[array.task]]
        self.show([*self._arrays_of].index(array.task), sum(counts) // len(counts))

    def _note(self, device: int | None, array: PlacedArray, event: ArrayEvent) -> None:
        location = {} if device is None else self._executor.devices[device].log_fields
        self._logs.hear(array.job.name, array.task, array.job.members, event, location)

    def _array_on(self, device: int) -> PlacedArray | None:
        """Return the array that a device trains."""
        number = self._placement.running.get(device)
        return None if number is None else self._arrays[number]

    def _hear_events(self, device: int, events: Sequence[ArrayEvent]) -> None:
        array = self._array_on(device)
        if array is None:
            return
        for event in events:
            if isinstance(event, ArrayNote):
                self._note(device, array, event)
            elif array.error is None:
                self._tell(device, array, event)

    def _tell(self, device: int, array: PlacedArray, result: Step | Evaluation) -> None:
        count = array.count(result)
        if isinstance(result, Step):
            self._show(array, count)
        if count <= array.heard[type(result)]:
            # An array that lost its process repeats minibatches: callbacks have already received this result.
            return
        array.heard[type(result)] = count
        self._note(device, array, result)
        try:
            for callback in array.task.callbacks:
                callback(result)
        except Exception as error:
            self._give_up(device, array, error)

    def _answer(self, device: int, result: Step | Evaluation) -> list[int]:
        """Return the members that ``on_result`` stops. If it raises, give up the array and return no members."""
        array = self._array_on(device)
        if array is None or array.error is not None or self._on_result is None:
            return []
        kind, count = type(result), array.count(result)
        # A repeated result gets its earlier answer: a stateful ``on_result`` could stop other members now.
        if count > array.asked[kind]:
            array.asked[kind] = count
            try:
                if members := answered(self._on_result(result), result):
                    array.stops[kind, count] = members
            except Exception as error:
                self._give_up(device, array, error)
        return array.stops.get((kind, count), [])

    def _give_up(self, device: int | None, array: PlacedArray, error: BaseException) -> None:
        """Mark an array as failed. Only its first error is kept."""
        if array.error is None:
            array.error = error
            self._note(device, array, ArrayNote("failed", None, error=first_line(error)))

    def _fail(self, device: int, error: BaseException) -> None:
        array = self._arrays[self._placement.running[device]]
        # What cannot be planned for this device may fit a larger one.
        if isinstance(error, PlanError):
            if self._placement.exceed(device):
                return
        else:
            self._placement.end(device)
        self._give_up(device, array, error)

    def _lose(self, device: int, reason: str) -> None:
        if (array := self._array_on(device)) is not None:
            self._note(device, array, ArrayNote("lost", None, error=reason))
        self._last_loss = f"{self._executor.devices[device].name!r} at last: {reason}"
        for number in self._placement.lose(device, back=self._executor.revive(device)):
            count = self._placement.failures[number]
            error = DeviceLost(f"its device was lost {count} times, {self._last_loss}")
            self._give_up(device, self._arrays[number], error)

    def _wait_for_devices(self) -> None:
        """Give up the arrays that fit no device, if none has joined for too long."""
        stranded = self._placement.stranded
        if not stranded:
            self._stranded_since = None
            return
        now = time.monotonic()
        if self._stranded_since is None:
            self._stranded_since = now
            _log.warning("%d arrays wait for a device that they fit; lost was %s", len(stranded), self._last_loss)
        if now - self._stranded_since >= self._executor.timeout and not self._executor.starting:
            for number in self._placement.give_up_stranded():
                error = DeviceLost(f"no device that it fits is left, {self._last_loss}")
                self._give_up(None, self._arrays[number], error)

    def _report(self) -> Report:
        """Return the report of the tasks that are done, and copy their state into the user's objects."""
        tasks: dict[str, TaskReport] = {}
        for task, arrays in self._arrays_of.items():
            parts = [(array, array.done[1]) for array in arrays if array.done is not None and array.error is None]
            if len(parts) == len(arrays):
                tasks[task.name] = joined([self._part(*part) for part in parts])
        devices = self._executor.devices
        done = [array.done for array in self._arrays if array.done is not None]
        loads, evicts = ([getattr(device.rates, name) for device in devices] for name in ("load", "evict"))
        actions = max(device.rates.action_seconds for device in devices)
        budgets = {device.name: device.budget for device in devices}
        plans = tuple(message.report.plan.tasks[0] for _, message in done)
        plan = Plan(plans, budgets, min(loads), min(evicts), actions)
        # The timeline is that of all devices since the driver started, by the clocks of the nodes.
        spans, peak = list[Span](), dict.fromkeys(budgets, 0)
        for number, message in done:
            name, offset = devices[number].name, message.start_time - self._began
            peak[name] = max(peak[name], *message.report.peak.values())
            for span in message.report.timeline.actions:
                spans.append(replace(span, device=name, start=span.start + offset, end=span.end + offset))
        spans.sort(key=lambda span: span.start)
        return Report(tasks, plan, Timeline(tuple(spans), tuple(budgets), plan.lower_bound), peak)

    def _part(self, array: PlacedArray, done: ArrayDone) -> TaskReport:
        """Return the results of an array, and copy its state into the user's objects."""
        task, members = array.task, array.job.members
        for loader, states in zip((task.loader, task.eval_loader), done.generators, strict=True):
            set_generators(loader, states)
        fused = array_of(task, members)
        with torch.no_grad():
            for name, tensor in tensors(fused):
                if name in done.tensors:
                    tensor.copy_(done.tensors[name])
        if isinstance(task.optimizer, FusedOptimizer) and done.optimizer is not None:
            task.optimizer.load_state_dict(done.optimizer)
        return replace(done.report[task.name], _arrays=((members, fused),))


# Assign arrays to devices, without contacting any worker: the largest first, and whoever is idle takes the next.


class Placement:
    """Assigns arrays to devices. A running array stays on its device until it ends or the device is lost.

    Args:
        sizes: an estimate for each array, by which they start.
        budgets: the memory of each device, in bytes.
        max_failures: how often the device of an array may be lost before the array is given up.

    Attributes:
        running: the array of each device that trains one.
    """

    def __init__(self, sizes: Sequence[float], budgets: Sequence[int], max_failures: int) -> None:
        # A device that is lost has a budget of 0 from then on.
        self._budgets, self._max_failures = list(budgets), max_failures
        self._sizes: list[float] = []
        self.failures = Counter[int]()
        # For each array, the memory of the largest device that was too small for it.
        self._too_small = Counter[int]()
        self.running: dict[int, int] = {}
        self._waiting: list[int] = []
        for size in sizes:
            self.add(size)

    @property
    def over(self) -> bool:
        """True if no array runs or waits."""
        return not self.running and not self._waiting

    @property
    def stranded(self) -> list[int]:
        """The arrays that wait while none runs and no remaining device takes one of them."""
        idle = not self.running and all(self._next_array(device) is None for device in range(len(self._budgets)))
        return sorted(self._waiting) if idle else []

    def add(self, size: float) -> int:
        """Let one more array wait, and return its index."""
        self._sizes.append(size)
        self._wait(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _wait(self, number: int) -> None:
        self._waiting = sorted([*self._waiting, number], key=lambda waiting: (-self._sizes[waiting], waiting))

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield each idle device that begins an array now, and that array."""
        for device in range(len(self._budgets)):
            number = None if device in self.running else self._next_array(device)
            if number is not None:
                self._waiting.remove(number)
                self.running[device] = number
                yield device, number

    def _next_array(self, device: int) -> int | None:
        fitting = (number for number in self._waiting if self._too_small[number] < self._budgets[device])
        return next(fitting, None)

    def end(self, device: int) -> int:
        """Note that the array on a device has ended or failed, and return its index."""
        return self.running.pop(device)

    def exceed(self, device: int) -> bool:
        """Let the array on a device wait for a larger one. Return False if there is none; then the array has ended."""
        number = self.end(device)
        self._too_small[number] = self._budgets[device]
        if max(self._budgets) > self._budgets[device]:
            self._wait(number)
            return True
        return False

    def lose(self, device: int, *, back: bool) -> list[int]:
        """Note that a device was lost; ``back``: it was restarted. Return its array if it must be given up.

        Otherwise that array waits again.
        """
        if not back:
            self._budgets[device] = 0
        if device not in self.running:
            return []
        number = self.end(device)
        self.failures[number] += 1
        if self.failures[number] > self._max_failures:
            return [number]
        self._wait(number)
        return []

    def join(self, budget: int) -> None:
        """Append a device."""
        self._budgets.append(budget)

    def give_up_stranded(self) -> list[int]:
        """Return the stranded arrays and forget them."""
        stranded = self.stranded
        self._waiting = [number for number in self._waiting if number not in stranded]
        return stranded


# What is sent to the workers: tasks, their arrays, and the objects that they share.


@dataclass(eq=False)
class PlacedArray:
    """A task, or an array of it once a worker has planned the task as several arrays, and how far it is trained.

    Attributes:
        sent: a copy of the task, with a seed, as it is sent to the worker.
        job: its job, without the task.
        trained: the minibatches that it was trained on.
        heard, asked: how many minibatches and evaluations were passed to callbacks and to ``on_result``, by type.
        stops: the members that ``on_result`` stopped, by the type of result and its number.
        done: its device and its result.
        error: why it was given up.
    """

    task: Task
    sent: Task
    job: ArrayJob
    trained: int = 0
    heard: Counter[type] = field(default_factory=Counter)
    asked: Counter[type] = field(default_factory=Counter)
    stops: dict[tuple[type, int], list[int]] = field(default_factory=dict)
    done: tuple[int, ArrayDone] | None = None
    error: BaseException | None = None

    @property
    def size(self) -> float:
        """An estimate of the work by which arrays are compared: parameters that are stepped, over all minibatches."""
        models = listed_models(self.sent)
        modules = models if len(models) == 1 else [models[member] for member in self.job.members]
        return self.task.steps * float(sum(tensor.numel() for model in modules for _, tensor in tensors(model)))

    def count(self, result: Step | Evaluation) -> int:
        """Return the number of minibatches, or of evaluations, up to and including this result."""
        if isinstance(result, Evaluation):
            return result.epoch + 1
        return result.epoch * self.task.epoch + result.step + 1

    def part(self, name: str, members: tuple[int, ...]) -> PlacedArray:
        """Return an array of this task."""
        job = replace(self.job, name=name, members=members, room=None)
        return PlacedArray(self.task, _with_models(self.sent, members), job)

    def packed_job(self, parts: SharedParts) -> ArrayJob:
        """Return the job with the task."""
        parcel = pack(f"the task {self.task.name!r}", self.sent, parts.keys)
        return replace(self.job, parcel=parcel, parts=parts.references)


def check_sendable(tasks: Sequence[Task]) -> None:
    """Raise PlanError if a task has what a copy of it in another process would lack."""
    for task in tasks:
        if isinstance(task.scheduler, lr_scheduler.LRScheduler):
            raise PlanError(
                f"task {task.name!r}: a scheduler that exists cannot go to another process; give a function that makes "
                "one from an optimizer"
            )
        if hook := find_hook(listed_models(task), task.optimizer):
            raise PlanError(
                f"task {task.name!r}: {hook}, which cannot go to another process; remove it, or train in one process"
            )


def placed_tasks(
    tasks: Sequence[Task], devices: Sequence[DeviceInfo], job: ArrayJob, *, resume: bool
) -> list[PlacedArray]:
    """Return what is sent of the tasks. A worker plans each for the largest device, and trains its first array.

    ``job``: what the jobs of all tasks have in common.

    Raises:
        PlanError: tasks cannot be trained together.
        CheckpointError: the folder cannot be created, or holds saves that this run must not continue.
    """
    check_tensors(tasks)
    check_loaders([(task.name, task) for task in tasks])
    if job.checkpoint is not None:
        check_folder(job.checkpoint, [task.name for task in tasks], resume=resume)
    largest = max(devices, key=lambda device: device.budget)
    room = Room(largest.physical, largest.budget, largest.rates, keep=True)
    placed = []
    for task in tasks:
        members = tuple(range(task.members))
        # Drawn in the order in which one process draws them.
        sent = replace(_with_models(task, members), seed=seed_of(task))
        own = replace(job, name=task.name, members=members, room=room, sends_every_step=bool(task.callbacks))
        placed.append(PlacedArray(task, sent, own))
    return placed


def _with_models(task: Task, members: Sequence[int]) -> Task:
    """Return a copy of the task for another process: without callbacks, and only with the models of ``members``."""
    models = task.models
    if not isinstance(models, nn.Module):
        indices, placeholder = set(members), nn.Identity()
        models = [model if index in indices else placeholder for index, model in enumerate(models)]
    return replace(task, models=models, callbacks=())


class SharedParts:
    """Objects that several models or arrays share: loaders, and frozen tensors. They are sent to each node once."""

    def __init__(self, arrays: Sequence[PlacedArray], executor: Executor) -> None:
        sent = [array.sent for array in arrays]
        loaders = [loader for task in sent for loader in (task.loader, task.eval_loader) if loader is not None]
        models = [model for task in sent for model in listed_models(task) if not isinstance(model, FusedModule)]
        params = [param for model in models for _, param in tensors(model) if isinstance(param, nn.Parameter)]
        counts = Counter(id(param) for param in params if not param.requires_grad)
        shared = [*loaders, *(param for param in params if counts[id(param)] > 1)]
        # The objects are kept alive, so that their ids are not reused.
        self._objects: dict[int, Any] = {id(value): value for value in shared}
        self.keys = {number: f"part {index}" for index, number in enumerate(self._objects)}
        self.references = {self.keys[number]: executor.put(value) for number, value in self._objects.items()}
