"""Positions of members in a population of several groups: rows of the population, and rows within groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.calls import entry_counts
from hfusion.population.grouping import PopulationGroup, may_share, signature
from hfusion.population.members import key_of
from hfusion.population.plain_member import PlainMember
from hfusion.population.population import ArrayGroup


@dataclass(eq=False)
class PlacedGroup:
    """Members that are computed together.

    Attributes:
        members: an array, or one plain member.
        rows: the population's row of each row of ``members``; None for a free row.
        number: the number of this group, never used again.
        why: why it is a group of its own.
        key: determines the random numbers of the group.
    """

    members: ArrayGroup
    rows: list[int | None]
    number: int
    why: str
    key: int = field(init=False)
    signature: Any = field(init=False)

    def __post_init__(self) -> None:
        self.key = key_of(next(tag for tag in self.members._roll.tags if tag is not None))
        self.signature = signature(self.model)

    @property
    def is_plain(self) -> bool:
        return isinstance(self.members, PlainMember)

    def may_take(self, model: nn.Module, model_signature: Any) -> bool:
        """Return whether the structure of a model, whose signature is ``model_signature``, allows it to join."""
        return bool(self.signature == model_signature) and may_share(self.model, model)

    @property
    def model(self) -> nn.Module:
        """One of the members, as a module around its tensors."""
        return self.members.fused._member(0)

    @property
    def live(self) -> list[int]:
        """The population's rows of the members, in the order of the group."""
        return [row for row in self.rows if row is not None]

    def described(self) -> PopulationGroup:
        return PopulationGroup(tuple(sorted(self.live)), "plain" if self.is_plain else "array", self.why)

    def entries(self, by_row: Mapping[int, int] | None = None) -> list[int]:
        """Return the entry of stacked arguments for each row of the group; by default its row of the population."""
        # Inputs of a free row of the group do not matter.
        first = self.live[0]
        rows = [first if row is None else row for row in self.rows]
        return rows if by_row is None else [by_row[row] for row in rows]


def check_entries(values: Any, rows: int) -> None:
    """Raise a ValueError unless each stacked tensor in nested ``values`` has ``rows`` entries."""
    for entries in entry_counts(values):
        if entries != rows:
            raise ValueError(
                f"a stacked argument has {entries} entries for a population of {rows} rows: give one for each row"
            )


@dataclass(frozen=True, eq=False)
class MemberLayout:
    """The group of each row of the population, and the row there.

    Attributes:
        slots: for each row of the population, its group and the row there; None for a free row.
        order: for each row of the population, its index into the concatenated rows of all groups; free rows have the
            index after the last.
    """

    slots: tuple[tuple[PlacedGroup, int] | None, ...]
    order: Tensor

    @staticmethod
    def of(groups: Sequence[PlacedGroup], size: int) -> MemberLayout:
        slots: list[tuple[PlacedGroup, int] | None] = [None] * size
        total = sum(len(group.rows) for group in groups)
        order = torch.full((size,), total, device="cpu")
        start = 0
        for group in groups:
            for local, row in enumerate(group.rows):
                if row is not None:
                    slots[row] = group, local
                    order[row] = start + local
            start += len(group.rows)
        return MemberLayout(tuple(slots), order)

    @property
    def live(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, slot in enumerate(self.slots) if slot is None]

    @property
    def tags(self) -> list[str | None]:
        """The members' names by row."""
        return [None if slot is None else slot[0].members._roll.tags[slot[1]] for slot in self.slots]

    def slot_of(self, row: int) -> tuple[PlacedGroup, int]:
        """Return a member's group and its row there. Raises ValueError for a free row."""
        slot = self.slots[row]
        if slot is None:
            raise ValueError(f"row {row} is free; members are in rows {self.live}")
        return slot

    def collected(self, values: Sequence[Tensor]) -> Tensor:
        """Return ``[rows]``, gathered from a tensor ``[rows of the group]`` of each group; NaN or 0 for free rows."""
        first = values[0]
        dtype = first.dtype
        for value in values[1:]:
            dtype = torch.promote_types(dtype, value.dtype)
        empty = torch.full((1,), float("nan") if dtype.is_floating_point else 0, dtype=dtype, device=first.device)
        joined = torch.cat([*(value.to(first.device, dtype) for value in values), empty])
        return joined[self.order.to(first.device)]
