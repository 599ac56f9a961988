"""The driver of a run on a cluster: it sends arrays to devices, handles their messages, and assembles the report."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch

from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.jobs import PlacedArray, SharedParts
from hfusion.cluster.messages import DeviceInfo, DeviceLost, Executor, Lost
from hfusion.cluster.node import ArrayDone, Divided, Message, ResultMessage, StopQuery, loader_generators
from hfusion.core.errors import HFusionError, PlanError
from hfusion.core.event_log import EventLog, first_line
from hfusion.device.forked_worker import Failure
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline
from hfusion.tasks.array_log import ArrayLogs, ArrayNote
from hfusion.tasks.stopping import OnResult, answered
from hfusion.tasks.task import Evaluation, Step
from hfusion.tasks.train import TrainError
from hfusion.tasks.training_report import Report, TaskReport, joined

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
        self._tasks = [array.task for array in placed]
        # The entries of each task, and the minibatches of each entry.
        self._numbers = {array.task: [number] for number, array in enumerate(placed)}
        self._shown = [0] * len(placed)
        # How many minibatches and evaluations of each array were passed to callbacks.
        self._counts: Counter[tuple[int, type]] = Counter()
        # How many were passed to ``on_result``, and the members that it stopped at each result.
        self._on_result_counts: Counter[tuple[int, type]] = Counter()
        self._stops: dict[tuple[int, type, int], list[int]] = {}
        budgets = [device.budget for device in executor.devices]
        self._placement = Placement([array.size for array in placed], budgets, max_failures)
        self._parts = SharedParts(placed, executor)
        self._running_arrays: dict[int, int] = {}
        self._done: dict[int, tuple[int, ArrayDone]] = {}
        self._failed: dict[int, BaseException] = {}
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
                self._running_arrays[device] = number
                self._start_array(device, number)
            for device, message in self._executor.wait(GLANCE):
                self._hear(device, message)
            self._wait_for_devices()
        return self._result()

    def _start_array(self, device: int, number: int) -> None:
        try:
            self._executor.start_job(device, self._arrays[number].job(self._parts))
        except HFusionError as error:
            self._fail(device, error)

    def _hear(self, device: int, message: Message) -> None:
        if isinstance(message, Lost):
            self._lose(device, message.reason)
        elif isinstance(message, DeviceInfo):
            self._placement.join(message.budget)
        elif isinstance(message, ResultMessage):
            for result in message.results:
                self._tell(device, result)
            for note in message.notes:
                self._note(device, self._running_arrays.get(device), note)
        elif isinstance(message, Divided):
            self._divide(self._running_arrays[device], message.arrays)
        elif isinstance(message, StopQuery):
            self._executor.answer(device, self._answer(device, *message.result_message.results))
        elif isinstance(message, Failure):
            self._fail(device, message.error_of(f"the process of {self._executor.devices[device].name!r}"))
        elif isinstance(message, ArrayDone):
            number = self._running_arrays.pop(device)
            self._placement.end(device)
            self._done[number] = (device, message)
            self._show(number, self._arrays[number].task.steps)

    def _divide(self, number: int, arrays: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        """Let a task be several arrays, of which its worker trains the first."""
        task = self._arrays[number]
        first, *others = (task.array(*array) for array in arrays)
        self._arrays[number] = first
        for other in others:
            self._arrays.append(other)
            self._shown.append(0)
            self._numbers[task.task].append(self._placement.add(other.size))

    def _show(self, number: int, steps: int) -> None:
        self._shown[number] = steps
        task = self._arrays[number].task
        counts = [self._shown[other] for other in self._numbers[task]]
        self.show(self._tasks.index(task), sum(counts) // len(counts))

    def _note(self, device: int | None, number: int | None, event: Step | Evaluation | ArrayNote) -> None:
        if number is not None:
            array = self._arrays[number]
            location = {} if device is None else self._executor.devices[device].log_fields
            self._logs.hear(array.name, array.task, array.members, event, location)

    def _tell(self, device: int, result: Step | Evaluation) -> None:
        number = self._running_arrays.get(device)
        if number is None or number in self._failed:
            return
        array, count = self._arrays[number], self._count(number, result)
        if isinstance(result, Step):
            self._show(number, count)
        if count <= self._counts[number, type(result)]:
            # An array that lost its process repeats minibatches: callbacks have already received this result.
            return
        self._counts[number, type(result)] = count
        self._note(device, number, result)
        try:
            for callback in array.task.callbacks:
                callback(result)
        except Exception as error:
            # From here on, results that the node sends for this array are ignored.
            self._give_up(device, number, error)

    def _count(self, number: int, result: Step | Evaluation) -> int:
        """Return the number of minibatches, or of evaluations, up to and including this result."""
        if isinstance(result, Evaluation):
            return result.epoch + 1
        return result.epoch * self._arrays[number].task.epoch + result.step + 1

    def _answer(self, device: int, result: Step | Evaluation) -> list[int]:
        """Return the members that ``on_result`` stops. If it raises, give up the array and return no members."""
        number = self._running_arrays.get(device)
        if number is None or number in self._failed or self._on_result is None:
            return []
        key, count = (number, type(result)), self._count(number, result)
        if count <= self._on_result_counts[key]:
            # A repeated result gets its earlier answer: a stateful ``on_result`` could stop other members now.
            return self._stops.get((*key, count), [])
        self._on_result_counts[key] = count
        try:
            members = answered(self._on_result(result), result)
        except Exception as error:
            self._give_up(device, number, error)
            return []
        if members:
            self._stops[*key, count] = members
        return members

    def _give_up(self, device: int | None, number: int, error: BaseException) -> None:
        """Mark an array as failed. Only its first error is kept."""
        if number not in self._failed:
            self._failed[number] = error
            self._note(device, number, ArrayNote("failed", None, error=first_line(error)))

    def _fail(self, device: int, error: BaseException) -> None:
        number = self._running_arrays.pop(device)
        # What cannot be planned for this device may fit a larger one.
        if isinstance(error, PlanError):
            if self._placement.exceed(device):
                return
        else:
            self._placement.end(device)
        self._give_up(device, number, error)

    def _lose(self, device: int, reason: str) -> None:
        self._note(device, self._running_arrays.pop(device, None), ArrayNote("lost", None, error=reason))
        self._last_loss = f"{self._executor.devices[device].name!r} at last: {reason}"
        for number in self._placement.lose(device, back=self._executor.revive(device)):
            count = self._placement.failures[number]
            self._give_up(device, number, DeviceLost(f"its device was lost {count} times, {self._last_loss}"))

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
                self._give_up(None, number, DeviceLost(f"no device that it fits is left, {self._last_loss}"))

    def _result(self) -> Report:
        report = self._report()
        if not self._failed:
            return report
        failed = [self._arrays[number] for number in sorted(self._failed)]
        names = dict.fromkeys(array.task.name for array in failed)
        first = self._failed[min(self._failed)]
        quoted_names = ", ".join(map(repr, names))
        kind = "task" if len(names) == 1 else "tasks"
        raise TrainError(
            f"{kind} {quoted_names} failed: {type(first).__name__}: {first}; finished: {', '.join(report) or 'none'} "
            "(error.report)",
            report,
        ) from first

    def _report(self) -> Report:
        tasks: dict[str, TaskReport] = {}
        for task, numbers in self._numbers.items():
            if all(number in self._done and number not in self._failed for number in numbers):
                tasks[task.name] = joined(
                    [self._part(self._arrays[number], self._done[number][1]) for number in numbers]
                )
        plan = self._plan()
        return Report(tasks, plan, self._timeline(plan), self._peak())

    def _part(self, placed_array: PlacedArray, done: ArrayDone) -> tuple[tuple[int, ...], TaskReport]:
        """Return the members and report of an array, and copy its state into the user's objects."""
        report = done.report[placed_array.task.name]
        for generator, state in zip(loader_generators(placed_array.task), done.generators, strict=True):
            generator.set_state(state)
        array = placed_array.trained_array()
        with torch.no_grad():
            for name, tensor in tensors(array):
                if name in done.tensors:
                    tensor.copy_(done.tensors[name])
        if isinstance(placed_array.task.optimizer, FusedOptimizer) and done.optimizer is not None:
            placed_array.task.optimizer.load_state_dict(done.optimizer)
        return placed_array.members, replace(report, _arrays=((placed_array.members, array),))

    def _plan(self) -> Plan:
        devices = self._executor.devices
        order = sorted(self._done)
        tasks = tuple(self._done[number][1].report.plan.tasks[0] for number in order)
        loads, evicts = ([getattr(device.rates, name) for device in devices] for name in ("load", "evict"))
        actions = max(device.rates.action_seconds for device in devices)
        budgets = {device.name: device.budget for device in devices}
        return Plan(tasks, budgets, min(loads), min(evicts), actions)

    def _timeline(self, plan: Plan) -> Timeline:
        """Return the timeline of all devices since the driver started, by the clocks of the nodes."""
        names = [device.name for device in self._executor.devices]
        spans = []
        for device, done in self._done.values():
            offset = done.start_time - self._began
            for span in done.report.timeline.actions:
                start, end = span.start + offset, span.end + offset
                spans.append(replace(span, device=names[device], start=start, end=end))
        return Timeline(tuple(sorted(spans, key=lambda span: span.start)), tuple(names), plan.lower_bound)

    def _peak(self) -> dict[str, int]:
        peak = {device.name: 0 for device in self._executor.devices}
        names = [*peak]
        for device, done in self._done.values():
            peak[names[device]] = max(peak[names[device]], *done.report.peak.values())
        return peak


# Assign arrays to devices, without contacting any worker: the largest first, and whoever is idle takes the next.


class Placement:
    """Assigns arrays to devices. A running array stays on its device until it ends or the device is lost.

    Args:
        sizes: an estimate for each array, by which they start.
        budgets: the memory of each device, in bytes.
        max_failures: how often the device of an array may be lost before the array is given up.
    """

    def __init__(self, sizes: Sequence[float], budgets: Sequence[int], max_failures: int) -> None:
        self._budgets, self._max_failures = list(budgets), max_failures
        self._sizes: list[float] = []
        self.failures: list[int] = []
        # For each array, the memory of the largest device that was too small for it.
        self._too_small: list[int] = []
        self._running: dict[int, int] = {}
        self._lost: set[int] = set()
        self._waiting: list[int] = []
        for size in sizes:
            self.add(size)

    @property
    def over(self) -> bool:
        """True if no array runs or waits."""
        return not self._running and not self._waiting

    @property
    def stranded(self) -> list[int]:
        """The arrays that wait while none runs and no remaining device takes one of them."""
        idle = not self._running and not any(self._next_array(device) is not None for device in self._remaining())
        return sorted(self._waiting) if idle else []

    def _remaining(self) -> Iterator[int]:
        return (device for device in range(len(self._budgets)) if device not in self._lost)

    def add(self, size: float) -> int:
        """Let one more array wait, and return its index."""
        self._sizes.append(size)
        self.failures.append(0)
        self._too_small.append(0)
        self._wait(len(self._sizes) - 1)
        return len(self._sizes) - 1

    def _wait(self, number: int) -> None:
        self._waiting = sorted([*self._waiting, number], key=lambda waiting: (-self._sizes[waiting], waiting))

    def starts(self) -> Iterator[tuple[int, int]]:
        """Yield each idle device that begins an array now, and that array."""
        for device in self._remaining():
            number = None if device in self._running else self._next_array(device)
            if number is not None:
                self._waiting.remove(number)
                self._running[device] = number
                yield device, number

    def _next_array(self, device: int) -> int | None:
        fitting = (number for number in self._waiting if self._too_small[number] < self._budgets[device])
        return next(fitting, None)

    def end(self, device: int) -> int:
        """Note that the array on a device has ended or failed, and return its index."""
        return self._running.pop(device)

    def exceed(self, device: int) -> bool:
        """Let the array on a device wait for a larger one. Return False if there is none; then the array has ended."""
        number = self.end(device)
        self._too_small[number] = self._budgets[device]
        if any(self._budgets[other] > self._budgets[device] for other in self._remaining()):
            self._wait(number)
            return True
        return False

    def lose(self, device: int, *, back: bool) -> list[int]:
        """Note that a device was lost; ``back``: it was restarted. Return its array if it must be given up.

        Otherwise that array waits again.
        """
        if not back:
            self._lost.add(device)
        if device not in self._running:
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
