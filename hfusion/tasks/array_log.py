"""Events of the arrays of `hfusion.train`, their log, and the bars of a run."""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from threading import Lock
from time import perf_counter
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from hfusion.core.event_log import EventLog
from hfusion.tasks.task import Evaluation, Step, Task

if TYPE_CHECKING:
    from rich.console import Console


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
            values["loss"] = _short(event.losses)
        else:
            what, done = "evaluated", (event.epoch + 1) * task.epoch
            values["loss"] = _short(event.losses.mean(0))
        counts = {
            "epoch": f"{done // task.epoch}/{task.epochs}",
            "minibatch": f"{done}/{task.steps}",
            "members": f"{len(members) - len(array.stopped)}/{len(members)}",
        }
        self._log.array(name, what, {**location, **counts, **values})


def _short(losses: Tensor) -> str:
    """Format the loss of each member, or for many members the least, the greatest and the median.

    >>> import torch
    >>> _short(torch.tensor([0.25, 0.5])), _short(torch.arange(9.0))
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
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
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

    def reach(self, index: int, steps: int, *, over: bool = False) -> None:
        """Set a task to ``steps`` minibatches; fewer than before if it restarted from a checkpoint.

        ``over``: it ends there.
        """
        with self._lock:
            self._done[index] = steps
            if over:
                self._totals[index] = steps
            if self._draws:
                self._draw(index)
            elif self._tenths() > self._tenth:
                self._tenth = self._tenths()
                shown = ", ".join(self._names[:3]) + (f" and {len(self._names) - 3} more" if self._names[3:] else "")
                seconds = perf_counter() - self._start
                line = f"{sum(self._done)}/{sum(self._totals)} minibatches of {shown}, {seconds:.0f} s"
                self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def _draw(self, index: int) -> None:
        alone = len(self._rows) == len(self._names)
        done, total = (counts[index] if alone else sum(counts) for counts in (self._done, self._totals))
        self._bars.update(self._rows[index if alone else 0], completed=done, total=total)
        if perf_counter() - self._drawn > _REDRAW:
            self._bars.refresh()
            self._drawn = perf_counter()
