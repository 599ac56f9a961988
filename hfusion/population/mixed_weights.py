"""Best weights and averages of the members of several groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from hfusion.array.member_functions import MemberFunction
from hfusion.capture.registered_tensors import tensors
from hfusion.core.calls import take_entries
from hfusion.core.patience import numbers
from hfusion.core.row_indices import check_once, rows_of
from hfusion.population.average import check_alike, checked_weights, weighted_mean
from hfusion.population.best import BestMembers, BestRecord, no_best, tensors_of_member
from hfusion.population.member_layout import check_entries
from hfusion.population.members import apart
from hfusion.population.weights import check_not_underway

if TYPE_CHECKING:
    from hfusion.population.member_layout import PlacedGroup
    from hfusion.population.mixed import MixedMembers


class MixedBest:
    """Each member's best weights, see `hfusion.population.best.BestMembers`."""

    def __init__(self, mixed: MixedMembers) -> None:
        self._mixed = mixed

    def _collected(self, name: str, missing: float) -> Tensor:
        values = [getattr(BestMembers(group.members), name) for group in self._mixed.groups]
        layout = self._mixed.layout
        if not values:
            return torch.full(
                (len(self._mixed),), missing, dtype=torch.float64 if name == "scores" else torch.int64, device="cpu"
            )
        stack = layout.collected(values)
        stack[layout.free] = missing
        return stack

    @property
    def scores(self) -> Tensor:
        """The best metrics: float64 ``[rows]``, NaN where a row has none."""
        return self._collected("scores", float("nan"))

    @property
    def ages(self) -> Tensor:
        """Number of updates of each member at its best: int64 ``[rows]``, -1 for rows without one."""
        return self._collected("ages", -1)

    @property
    def waited(self) -> Tensor:
        """Number of successive metrics without an improvement: int64 ``[rows]``."""
        return self._collected("waited", 0)

    def update(
        self, metrics: Tensor | Sequence[float], *, mode: Literal["min", "max"] = "min", least: float = 0.0
    ) -> list[int]:
        """Keep the weights of members whose metric has improved by more than ``least``, and return their rows."""
        with self._mixed._lock:
            values = numbers(metrics, len(self._mixed))
            improved: list[int] = []
            for group in self._mixed.groups:
                of_group = [float("nan") if row is None else values[row] for row in group.rows]
                local = BestMembers(group.members).update(of_group, mode=mode, least=least)
                improved += [row for index in local if (row := group.rows[index]) is not None]
        return sorted(improved)

    def restore(self, rows: int | Sequence[int] | None = None) -> list[int]:
        """Write the best weights into their members, all or those in ``rows``, and return the written rows."""
        with self._mixed._lock:
            chosen = rows_of(list(range(len(self._mixed))) if rows is None else rows, len(self._mixed))
            written: set[int] = set()
            for group, local in self._by_group(chosen):
                written |= {group.rows[index] or 0 for index in BestMembers(group.members).restore(local)}
        return [row for row in chosen if row in written]

    def clear(self, rows: int | Sequence[int] | None = None) -> None:
        """Remove the records of all members, or of members in ``rows``, and free their memory."""
        chosen = rows_of(list(range(len(self._mixed))) if rows is None else rows, len(self._mixed))
        for group, local in self._by_group(chosen):
            BestMembers(group.members).clear(local)

    def __getitem__(self, row: int) -> nn.Module:
        """Return a copy of the member in ``row`` with its best weights. Raises ValueError if there is no record."""
        (index,) = rows_of(row, len(self._mixed))
        group, local = self._mixed.layout.slot_of(index)
        tag = group.members._roll.tag(local)
        if self._mixed.best.get(tag, BestRecord()).weights is None:
            raise no_best(tag, index)
        return BestMembers(group.members)[local]

    def _by_group(self, rows: Sequence[int]) -> list[tuple[PlacedGroup, list[int]]]:
        """Return each group of members in ``rows``, with their rows in the group."""
        slots = [slot for row in rows if (slot := self._mixed.layout.slots[row]) is not None]
        groups = [(group, [local for other, local in slots if other is group]) for group in self._mixed.groups]
        return [(group, local) for group, local in groups if local]


@torch.no_grad()
def average_mixed(
    mixed: MixedMembers,
    rows: int | Sequence[int] | None,
    weights: Tensor | Sequence[float] | None,
    into: int | Sequence[int] | Literal["all"] | None,
    optimizer: Literal["keep", "reset"],
) -> nn.Module | None:
    """See `hfusion.population.weights.MemberWeights.average`; members have the same keys and shapes.

    Raises:
        ValueError: also if members differ in keys or shapes.
    """
    if optimizer not in ("keep", "reset"):
        raise ValueError(f'optimizer={optimizer!r}: it is "keep" or "reset"')
    with mixed._lock:
        sources = _members(mixed, rows)
        shares = checked_weights(weights, sources)
        targets = [] if into is None else _members(mixed, None if isinstance(into, str) and into == "all" else into)
        held = {row: _tensors(mixed, row) for row in dict.fromkeys([*sources, *targets])}
        check_alike(held)
        counted = list(shares)
        share = torch.tensor(list(shares.values()), dtype=torch.float64, device="cpu")
        means: dict[str, Tensor] = {}
        for name, last in held[counted[-1]].items():
            if last.is_floating_point() or last.is_complex():
                means[name] = weighted_mean(torch.stack([held[row][name].to(last.device) for row in counted]), share)
            else:
                means[name] = last.clone()
        if into is None:
            group, local = mixed.layout.slot_of(sources[0])
            model = apart(group.members.fused, local)
            named = dict(tensors(model))
            for name, mean in means.items():
                named[name].detach().copy_(mean)
            return model
        for row in targets:
            group, local = mixed.layout.slot_of(row)
            check_not_underway(group.members._updates, local, row)
        for row in targets:
            for name, mean in means.items():
                held[row][name].copy_(mean)
        if optimizer == "reset":
            for row in targets:
                group, local = mixed.layout.slot_of(row)
                group.members.optimizer.restart([local])
    return None


def _members(mixed: MixedMembers, rows: Any) -> list[int]:
    """Return ``rows`` as a list, or all rows with members for None. Raises ValueError for free or repeated rows."""
    chosen = mixed.layout.live if rows is None else rows_of(rows, len(mixed))
    check_once(chosen)
    for row in chosen:
        mixed.layout.slot_of(row)
    return list(chosen)


def _tensors(mixed: MixedMembers, row: int) -> dict[str, Tensor]:
    """Return a member's tensors by key, as views of its group's tensors, without shared ones; tied ones once."""
    group, local = mixed.layout.slot_of(row)
    return tensors_of_member(group.members.fused, local)


def active_mixed(mixed: MixedMembers) -> list[int]:
    """Return the rows of members that train."""
    return sorted(row for g in mixed.groups for local in g.members.active_rows if (row := g.rows[local]) is not None)


def each_mixed(
    mixed: MixedMembers, fn: MemberFunction, args: Any, rows: int | Sequence[int] | None, kwargs: Any
) -> None:
    """See `hfusion.Population.each`."""
    with mixed._lock:
        check_entries((args, kwargs), len(mixed))
        chosen = active_mixed(mixed) if rows is None else _members(mixed, rows)
        slots = [mixed.layout.slot_of(row) for row in chosen]
        for group in mixed.groups:
            if of_group := [local for other, local in slots if other is group]:
                entries = group.entries()
                arguments = {name: take_entries(value, entries) for name, value in kwargs.items()}
                group.members.each(fn, *(take_entries(value, entries) for value in args), rows=of_group, **arguments)
