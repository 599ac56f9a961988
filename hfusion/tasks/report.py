"""What a run of `hfusion.train` gave."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.schedule.plan import Plan
from hfusion.schedule.timeline import Timeline


@dataclass(frozen=True, eq=False)
class TaskReport:
    """What a task gave, on the CPU.

    ``losses``: float ``[steps, B]``, a row per minibatch. ``eval_losses``: float ``[epochs, minibatches, B]``, None
    where the task has no eval loader. Both end where the last member stopped. ``stopped``: the members that stopped
    before the task ended, each with how many minibatches it had; from there on its losses are NaN.
    """

    losses: Tensor
    eval_losses: Tensor | None
    stopped: Mapping[int, int]
    _arrays: tuple[tuple[tuple[int, ...], FusedModule], ...]

    @cached_property
    def models(self) -> list[nn.Module]:
        """The trained members, of their original class, in the order of the task's models."""
        found = {
            index: model
            for members, array in self._arrays
            for index, model in zip(members, array.unfuse(), strict=True)
        }
        return [found[index] for index in sorted(found)]


@dataclass(frozen=True, eq=False)
class Report(Mapping[str, TaskReport]):
    """What a run gave, by name of task. ``peak``: the most bytes that were accounted for at once, by device."""

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
