"""Results of `hfusion.train`, printed on one screen of 24 lines and 100 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.core.text import aligned, readable
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline
from hfusion.step.step_signatures import CallReport

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
        rows = [[str(m), *(_short(column[m]) for column in columns), self._end(m)] for m in order]
        head = ["member", "lr", "first loss", self.metric, "minibatches"]
        table = aligned([head, *_shortened(rows, last=5)], left=1)
        arrays = [str(report)[:_COLUMNS] for report in self.arrays[:_MAX_ARRAYS]]
        more = [f"... {len(self.arrays) - _MAX_ARRAYS} more"] if len(self.arrays) > _MAX_ARRAYS else []
        return "\n".join([*arrays, *more, f"{len(order)} members, the best first", *table])

    __repr__ = __str__

    def _end(self, member: int) -> str:
        return f"stopped after {self.stopped[member]}" if member in self.stopped else str(len(self.losses))


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
        rows = [_task_row(name, task) for name, task in self.items()]
        table = aligned([titles, *_shortened(rows, last=1)], left=1) if rows else []
        lines = [head, f"peak: {', '.join(peaks[:_MAX_DEVICES])}{rest}", *table]
        return "\n".join(text[:_COLUMNS] for text in lines)

    __repr__ = __str__


def _task_row(name: str, task: TaskReport) -> list[str]:
    final, order = task.final_losses, task.ranked
    best, middle, worst = order[0], order[(len(order) - 1) // 2], order[-1]
    counts = [str(number) for number in (len(order), len(task.stopped), len(task.losses))]
    member = [_short(final[best]), str(best), _short(task.rates[best])]
    return [_cut(name), *counts, task.metric, *member, _short(final[middle]), _short(final[worst])]


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


def joined(parts: Sequence[tuple[Sequence[int], TaskReport]]) -> TaskReport:
    """Merge the reports of a task's arrays, each given with its members in the order of its columns."""
    reports = [report for _, report in parts]
    order = torch.tensor([member for members, _ in parts for member in members], device="cpu").argsort()

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
        tuple(array for report in reports for array in report._arrays),
        tuple(array for report in reports for array in report.arrays),
        torch.cat(epochs)[order] if epochs else None,
    )
