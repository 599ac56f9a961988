"""What a run of `hfusion.train` reports: results, printed on 24 lines of 100 columns; events, their log, and bars."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import median
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.core.errors import HFusionError
from hfusion.core.event_log import EventLog
from hfusion.core.text import aligned, readable
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline
from hfusion.step.step_signatures import CallReport
from hfusion.tasks.task import Evaluation, Step, Task

if TYPE_CHECKING:
    from rich.console import Console

_COLUMNS, _MAX_ROWS, _MAX_DEVICES, _MAX_NAME, _MAX_ARRAYS = 100, 18, 3, 24, 3


@dataclass(frozen=True)
class ArrayReport:
    """The steps and eager fallbacks of the members of one array.

    ``calls``: how each kind of minibatch was computed by `hfusion.train_step`. It is empty if the array ran eagerly,
    bit for bit as the plain loop; ``why`` is the reason.
    """

    name: str
    members: tuple[int, ...]
    resident: bool
    shards: int
    calls: tuple[CallReport, ...] = ()
    why: str = ""

    def __str__(self) -> str:
        where = "resident" if self.resident else f"spilled in {_count(self.shards, 'shard')}"
        how = "; ".join(map(str, self.calls)) or ("eager" + (f": {self.why}" if self.why else ""))
        return f"{_cut(self.name)}: {_count(len(self.members), 'member')}, {where}, {how}"


@dataclass(frozen=True, eq=False)
class TaskReport:
    """Results of a task, on the CPU.

    Attributes:
        losses: float ``[steps, B]``, a row per minibatch. Ends when the last member stopped.
        eval_losses: float ``[epochs, minibatches, B]``; None without an eval loader. Ends when the last member stopped.
        stopped: the members that stopped before the task ended, each with the number of minibatches that it was
            trained on. Its later losses are NaN.
        rates: float64 ``[B]``, the learning rates before the first minibatch; NaN for an optimizer without ``lr``.
        arrays: how the members were computed.
        best_epochs: int64 ``[B]``, the epoch, from 0, whose weights were restored for each member, -1 if none; None
            unless the task restores best weights.
    """

    losses: Tensor
    eval_losses: Tensor | None
    stopped: Mapping[int, int]
    rates: Tensor
    _arrays: tuple[tuple[tuple[int, ...], FusedModule], ...]
    arrays: tuple[ArrayReport, ...] = ()
    best_epochs: Tensor | None = None

    @cached_property
    def models(self) -> list[nn.Module]:
        """The trained members, of their original class, in the order of the task's models."""
        models = {
            index: model
            for members, array in self._arrays
            for index, model in zip(members, array.unfuse(), strict=True)
        }
        return [models[index] for index in sorted(models)]

    @cached_property
    def final_losses(self) -> Tensor:
        """The final loss of each member, ``[B]``: the mean of its last evaluation; its last loss if no eval loader.

        If the task restores best weights, the mean of its best evaluation. With an eval loader, NaN for a member that
        stopped before its first evaluation.
        """
        steps = torch.tensor(
            [self.stopped.get(member, len(self.losses)) for member in range(self.losses.shape[1])], device="cpu"
        )
        if self.eval_losses is None:
            return self.losses.gather(0, steps.sub(1).unsqueeze(0))[0]
        means = self.eval_losses.mean(1)
        if self.best_epochs is not None:
            best = means.gather(0, self.best_epochs.clamp(min=0).unsqueeze(0))[0]
            return best.masked_fill(self.best_epochs < 0, torch.nan)
        epochs = torch.arange(len(means), device="cpu").unsqueeze(1)
        return means.gather(0, epochs.masked_fill(means.isnan(), 0).amax(0, keepdim=True))[0]

    @property
    def metric(self) -> str:
        """What `final_losses` are: ``"last loss"``, ``"eval loss"`` or ``"best eval loss"``."""
        return (
            "last loss" if self.eval_losses is None else "eval loss" if self.best_epochs is None else "best eval loss"
        )

    @property
    def ranked(self) -> list[int]:
        """The members in order of their final losses, lowest first. Members with a loss of NaN come last."""
        values = self.final_losses.nan_to_num(torch.inf, torch.inf).tolist()
        return sorted(range(len(values)), key=values.__getitem__)

    def __str__(self) -> str:
        order = self.ranked
        columns = (self.rates, self.losses[0], self.final_losses)
        ends = {m: f"stopped after {count}" for m, count in self.stopped.items()}
        rows = [[str(m), *(_short(column[m]) for column in columns), ends.get(m, str(len(self.losses)))] for m in order]
        head = ["member", "lr", "first loss", self.metric, "minibatches"]
        table = aligned([head, *_shortened(rows, last=5)], left=1)
        arrays = [str(report)[:_COLUMNS] for report in self.arrays[:_MAX_ARRAYS]]
        more = [f"... {len(self.arrays) - _MAX_ARRAYS} more"] if len(self.arrays) > _MAX_ARRAYS else []
        return "\n".join([*arrays, *more, f"{len(order)} members, the best first", *table])

    __repr__ = __str__


@dataclass(frozen=True, eq=False)
class Report(Mapping[str, TaskReport]):
    """Results of a run, by name of task. ``plan``: the plan that ran.

    ``peak``: the largest number of bytes accounted for at one time, by device.
    """

    tasks: Mapping[str, TaskReport]
    plan: Plan
    timeline: Timeline
    peak: Mapping[str, int]

    def __getitem__(self, name: str) -> TaskReport:
        return self.tasks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    def __str__(self) -> str:
        members = sum(task.losses.shape[1] for task in self.values())
        line = self.timeline
        head = (
            f"{_count(len(self), 'task')}, {_count(members, 'member')}, {_count(len(self.peak), 'device')}: "
            f"{line.makespan:.1f} s, computing {line.utilisation:.0%} of the time"
        )
        peaks = [f"{_cut(n)} {readable(size)} of {readable(self.plan.devices[n])}" for n, size in self.peak.items()]
        rest = f", and {len(peaks) - _MAX_DEVICES} more" if len(peaks) > _MAX_DEVICES else ""
        titles = ["task", "members", "stopped", "minibatches", "metric", "best", "member", "lr", "median", "worst"]
        rows = []
        for name, task in self.items():
            final, order = task.final_losses, task.ranked
            best, middle, worst = order[0], order[(len(order) - 1) // 2], order[-1]
            counts = [str(number) for number in (len(order), len(task.stopped), len(task.losses))]
            member = [_short(final[best]), str(best), _short(task.rates[best])]
            rows.append([_cut(name), *counts, task.metric, *member, _short(final[middle]), _short(final[worst])])
        table = aligned([titles, *_shortened(rows, last=1)], left=1) if rows else []
        lines = [head, f"peak: {', '.join(peaks[:_MAX_DEVICES])}{rest}", *table]
        return "\n".join(text[:_COLUMNS] for text in lines)

    __repr__ = __str__


def _short(value: Tensor) -> str:
    return f"{float(value):.4g}"


def _cut(name: str) -> str:
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 3]}..."


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _shortened(rows: Sequence[list[str]], last: int) -> list[list[str]]:
    """Return at most as many rows as fit a screen: the first ones, a count of those left out, and ``last`` ones."""
    if len(rows) <= _MAX_ROWS:
        return list(rows)
    left_out = [f"... {len(rows) - _MAX_ROWS + 1} more", *[""] * (len(rows[0]) - 1)]
    return [*rows[: _MAX_ROWS - 1 - last], left_out, *rows[-last:]]


def joined(reports: Sequence[TaskReport]) -> TaskReport:
    """Merge the reports of a task's arrays. Their columns are in the order of each one's members."""
    arrays = tuple(array for report in reports for array in report._arrays)
    order = torch.tensor([member for members, _ in arrays for member in members], device="cpu").argsort()

    def in_order(columns: Sequence[Tensor]) -> Tensor:
        """Return values ``[rows, ..., B]`` in member order; NaN after the end of a shorter array."""
        rows = max(map(len, columns))
        blocks = [torch.cat([c, c.new_full((rows - len(c), *c.shape[1:]), torch.nan)]) for c in columns]
        return torch.cat(blocks, -1)[..., order]

    evaluations = [report.eval_losses for report in reports if report.eval_losses is not None]
    epochs = [report.best_epochs for report in reports if report.best_epochs is not None]
    return TaskReport(
        in_order([report.losses for report in reports]),
        in_order(evaluations) if evaluations else None,
        dict(sorted((member, steps) for report in reports for member, steps in report.stopped.items())),
        torch.cat([report.rates for report in reports])[order],
        arrays,
        tuple(array for report in reports for array in report.arrays),
        torch.cat(epochs)[order] if epochs else None,
    )


# Events of arrays, and their log.

# Seconds between lines that only tell that an array goes on; an epoch has a line of its own.
_PAUSE = 5.0
# Members whose losses are all in a line.
_SHOWN = 8


@dataclass(frozen=True)
class ArrayNote:
    """An event of an array other than its results.

    Attributes:
        event: started, resumed, copied (before a save is written), saved, stopped, finished, failed or lost.
        minibatches: how many it had been trained on.
        members: those that have stopped.
        error: the first line of one.
    """

    event: str
    minibatches: int | None
    members: tuple[int, ...] = ()
    error: str | None = None


ArrayEvent: TypeAlias = Step | Evaluation | ArrayNote
# Called with the index of an array, the event, and the device if there is one; from threads of devices and of saves.
ArrayListener: TypeAlias = Callable[[int, ArrayEvent, str | None], None]


@dataclass
class _Logged:
    """What the log has of an array: how many minibatches it was trained on, when that was written, who has stopped."""

    trained: int = 0
    at: float = -math.inf
    stopped: set[int] = field(default_factory=set)


class ArrayLogs:
    """Writes the events of arrays to their logs."""

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._arrays: dict[str, _Logged] = defaultdict(_Logged)

    def hear(
        self, name: str, task: Task, members: Sequence[int], event: ArrayEvent, location: Mapping[str, object]
    ) -> None:
        """Write an event of the array ``name`` of a task. ``location``: fields for the device, node and process."""
        if not self._log.writes or (isinstance(event, ArrayNote) and event.event == "copied"):
            return
        array, values = self._arrays[name], {}
        if isinstance(event, ArrayNote):
            array.stopped.update(event.members)
            what, done = event.event, array.trained if event.minibatches is None else event.minibatches
            values["error"] = event.error
        elif isinstance(event, Step):
            what, done = "trained", event.epoch * task.epoch + event.step + 1
            now = time.monotonic()
            if done % task.epoch and now - array.at <= _PAUSE:
                return
            array.trained, array.at = done, now
            values["loss"] = _losses_text(event.losses)
        else:
            what, done = "evaluated", (event.epoch + 1) * task.epoch
            values["loss"] = _losses_text(event.losses.mean(0))
        counts = {
            "epoch": f"{done // task.epoch}/{task.epochs}",
            "minibatch": f"{done}/{task.steps}",
            "members": f"{len(members) - len(array.stopped)}/{len(members)}",
        }
        self._log.array(name, what, {**location, **counts, **values})


def _losses_text(losses: Tensor) -> str:
    """Format the loss of each member, or for many members the least, the greatest and the median.

    >>> import torch
    >>> _losses_text(torch.tensor([0.25, 0.5])), _losses_text(torch.arange(9.0))
    ('0.25 0.5', '0 to 8, median 4')
    """
    values = [float(value) for value in losses.tolist()]
    if len(values) <= _SHOWN:
        return " ".join(f"{value:.4g}" for value in values)
    numbers = [value for value in values if not math.isnan(value)] or [math.nan]
    return f"{min(numbers):.4g} to {max(numbers):.4g}, median {median(numbers):.4g}"


# Progress of a run: a bar for each task, or a few lines where output cannot be redrawn.

# More bars than this fit no screen.
_MAX_BARS = 12
# Minimum seconds between two redraws.
_REDRAW = 0.1


class TaskBars:
    """Progress in a terminal: a bar for each task, or a single one for many tasks. Elsewhere ten lines in all.

    Args:
        tasks: the name and the number of minibatches of each task.
        begun: how many of them were trained before.
    """

    def __init__(self, tasks: Sequence[tuple[str, int]], begun: Sequence[int], console: Console | None = None) -> None:
        # Imported late: only progress bars need it.
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._console = Console() if console is None else console
        self._names, self._totals = [name for name, _ in tasks], [steps for _, steps in tasks]
        self._done, self._start, self._lock = [*begun], perf_counter(), Lock()
        self._draws = self._console.is_terminal and not self._console.is_dumb_terminal and not self._console.is_jupyter
        # Task names are not read as markup. No auto_refresh: rich does not wait for its drawing thread at the end.
        text = TextColumn("{task.description}", markup=False)
        columns = (text, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bars = Progress(*columns, console=self._console, auto_refresh=False, disable=not self._draws)
        rows = [(name, total, done) for (name, total), done in zip(tasks, begun, strict=True)]
        if len(tasks) > _MAX_BARS:
            rows = [(f"{len(tasks)} tasks", sum(self._totals), sum(begun))]
        self._rows = [self._bars.add_task(name, total=total, completed=done) for name, total, done in rows]
        self._drawn, self._tenth = perf_counter(), self._tenths()

    def __enter__(self) -> TaskBars:
        self._bars.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self._bars.refresh()
        self._bars.stop()

    def _tenths(self) -> int:
        return 10 * sum(self._done) // max(1, sum(self._totals))

    def reach(self, index: int, steps: int, over: bool = False) -> None:
        """Set a task to ``steps`` minibatches; fewer than before if it restarted from a checkpoint.

        ``over``: it ends there.
        """
        with self._lock:
            self._done[index] = steps
            if over:
                self._totals[index] = steps
            if self._draws:
                alone = len(self._rows) == len(self._names)
                done, total = (counts[index] if alone else sum(counts) for counts in (self._done, self._totals))
                self._bars.update(self._rows[index if alone else 0], completed=done, total=total)
                if perf_counter() - self._drawn > _REDRAW:
                    self._bars.refresh()
                    self._drawn = perf_counter()
            elif self._tenths() > self._tenth:
                self._tenth = self._tenths()
                shown = ", ".join(self._names[:3]) + (f" and {len(self._names) - 3} more" if self._names[3:] else "")
                seconds = perf_counter() - self._start
                line = f"{sum(self._done)}/{sum(self._totals)} minibatches of {shown}, {seconds:.0f} s"
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)


class TrainError(HFusionError):
    """A task failed. ``report`` has the results of the tasks that were done before.

    Example:
        >>> import torch, hfusion as hf
        >>> def fail(told):
        ...     raise RuntimeError("a callback that fails")
        >>> task = hf.Task(
        ...     [torch.nn.Linear(2, 1) for _ in range(2)],
        ...     torch.nn.functional.mse_loss,
        ...     lambda params: hf.optim.SGD(params, lr=0.1),
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     callbacks=[fail],
        ... )
        >>> try:
        ...     hf.train([task], hf.Machine([hf.Device("cpu", memory="1GiB")]))
        ... except hf.TrainError as error:
        ...     type(error.__cause__).__name__, len(error.report.tasks)
        ('RuntimeError', 0)
    """

    # As users import it, in tracebacks.
    __module__ = "hfusion"

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report

    @staticmethod
    def of(names: Sequence[str], cause: BaseException, report: Report) -> TrainError:
        """Return the error of the tasks ``names``, of which the first failed by ``cause``."""
        failed = f"{'task' if len(names) == 1 else 'tasks'} {', '.join(map(repr, names))} failed"
        finished = f"finished: {', '.join(report) or 'none'} (error.report)"
        return TrainError(f"{failed}: {type(cause).__name__}: {cause}; {finished}", report)
