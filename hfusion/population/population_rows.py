"""Views of a population's members by row, for one array and for several groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from hfusion.array.member_functions import MemberFunction, as_each
from hfusion.core.row_indices import Widths, row_of
from hfusion.optim.lr_scheduler import PerMember
from hfusion.population.best import BestMembers
from hfusion.population.grouping import TWINS, PopulationGroup
from hfusion.population.hparams import Hparams
from hfusion.population.members import Models
from hfusion.population.mixed import MixedMembers
from hfusion.population.mixed_views import MixedHparams, MixedScheduler
from hfusion.population.mixed_weights import MixedBest, active_mixed, each_mixed
from hfusion.population.population import ArrayGroup


class PopulationRows:
    """The members of a population by row: what they are called, how old they are, their models and numbers."""

    _members: ArrayGroup | MixedMembers

    @property
    def widths(self) -> Widths:
        """Number of rows for a number of members; several groups keep the largest number so far."""
        return self._members._widths if isinstance(self._members, ArrayGroup) else Widths(len(self._members))

    def clear_gradients(self) -> None:
        """Free the gradients of all members, which are not needed between updates."""
        members = self._members
        for array in [members] if isinstance(members, ArrayGroup) else [group.members for group in members.groups]:
            array.fused.zero_grad()

    @property
    def groups(self) -> tuple[PopulationGroup, ...]:
        """The groups of members, with their kind and the reason."""
        if isinstance(self._members, ArrayGroup):
            return (PopulationGroup(tuple(self._members._roll.live), "array", TWINS),)
        return tuple(group.described() for group in self._members.groups)

    def __len__(self) -> int:
        """The number of rows, free ones too."""
        return len(self._members)

    @property
    def hparams(self) -> Hparams | MixedHparams:
        """The hyper-parameters by name, vectors ``[rows]`` to read and write: ``pop.hparams["lr"][rows] *= 1.2``."""
        return self._members.hparams if isinstance(self._members, ArrayGroup) else MixedHparams(self._members)

    @property
    def models(self) -> Models:
        """The members by row, as modules that are live views; None where a row is free."""
        members = self._members
        return members.models if isinstance(members, ArrayGroup) else Models(members, members.model_of)

    @property
    def scheduler(self) -> PerMember | MixedScheduler | None:
        """The members' schedules; None without."""
        if isinstance(self._members, ArrayGroup):
            return self._members.scheduler
        return MixedScheduler(self._members) if self._members.options.schedules is not None else None

    @scheduler.setter
    def scheduler(self, scheduler: PerMember | None) -> None:
        if not isinstance(self._members, ArrayGroup):
            raise AttributeError(
                f"the members are {len(self._members.groups)} groups, each with schedulers of its own: give scheduler= "
                "when the population is made, or restart a member's, pop.scheduler.restart(rows, make)"
            )
        self._members.scheduler = scheduler

    @property
    def best(self) -> BestMembers | MixedBest:
        """Each member's best weights, to update, restore and copy: see `hfusion.population.best.BestMembers`."""
        return BestMembers(self._members) if isinstance(self._members, ArrayGroup) else MixedBest(self._members)

    @property
    def tags(self) -> list[str | None]:
        """The members' names by row; None where a row is free."""
        return self._members.tags if isinstance(self._members, ArrayGroup) else self._members.layout.tags

    @property
    def ages(self) -> Tensor:
        """Number of updates of the member in each row: int64 ``[rows]``."""
        if isinstance(self._members, ArrayGroup):
            return self._members.ages
        return self._members.collected(
            lambda group: group.ages, torch.zeros(len(self), dtype=torch.int64, device="cpu")
        )

    @property
    def frozen(self) -> list[int]:
        """The rows of members left out of steps after a loss or gradient was not finite; see ``on_nonfinite``."""
        if isinstance(self._members, ArrayGroup):
            return self._members.frozen
        rows = self._members.collected(
            lambda group: group._roll.frozen, torch.zeros(len(self), dtype=torch.bool, device="cpu")
        )
        frozen: list[int] = rows.nonzero().reshape(-1).tolist()
        return frozen

    @property
    def lineage(self) -> tuple[Any, ...]:
        """History of the members, in order: events with ``step``, ``tag``, ``what``, ``source``."""
        return tuple(self._members.lineage)

    @property
    def steps(self) -> int:
        """Number of updates of the population."""
        return self._members.steps

    def row(self, tag: str) -> int:
        """Return the row of the member with this name. Raises KeyError."""
        tags = self.tags
        if tag not in tags:
            raise KeyError(f"{tag!r} is no member; members are {[t for t in tags if t is not None]}")
        return row_of(tags.index(tag), len(tags))

    @property
    def active_rows(self) -> list[int]:
        """The rows of members that train: taken, and not frozen."""
        return self._members.active_rows if isinstance(self._members, ArrayGroup) else active_mixed(self._members)

    def each(
        self,
        fn: Callable[..., Any] | MemberFunction,
        *args: Any,
        rows: int | Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Run a function of one member's parameters and gradients for all members at once: see `hfusion.each`.

        Args:
            fn: the function, or what `hfusion.each` gave for it.
            rows: the members it is for, which may be frozen; None: all that train. Others stay as they are, to the bit.
            args, kwargs: passed on; values in `hfusion.stacked` have a row for each row of the population.

        Raises:
            ValueError: a row that is free or comes twice; and as `hfusion.each`.
        """
        if isinstance(self._members, ArrayGroup):
            self._members.each(fn, *args, rows=rows, **kwargs)
        else:
            each_mixed(self._members, as_each(fn), args, rows, kwargs)

    def register_gradient_hook(self, fn: Callable[..., Any] | MemberFunction) -> RemovableHandle:
        """Let `step` run a function between backward and update, before gradients are clipped.

        It is called as by `each`, once for each update, with gradients that are summed over ``accumulate`` calls and
        unscaled; for members that make this update only. Saves do not hold it.

        Returns: a handle whose ``remove()`` ends it.
        """
        if isinstance(self._members, ArrayGroup):
            return self._members.register_gradient_hook(fn)
        handle = RemovableHandle(self._members.hooks)
        self._members.hooks[handle.id] = as_each(fn)
        return handle
