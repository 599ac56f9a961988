"""A member that moves from one group of a population to another, with all that belongs to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from hfusion.core.member_table import MemberTable
from hfusion.population.members import apart

if TYPE_CHECKING:
    from hfusion.population.training_group import TrainingGroup


@dataclass(frozen=True)
class MemberState:
    """A member's model and training state, independent of any group: tables of one row, see `TrainingGroup.tables`."""

    model: nn.Module
    tables: dict[str, MemberTable]

    @property
    def tag(self) -> str:
        """The member's name."""
        return self.tables["member"]["tag"][0]  # type: ignore[no-any-return]


def copy_member_state(group: TrainingGroup, row: int) -> MemberState:
    """Return a copy of the member in ``row`` of a group, with its training state."""
    group._roll.tag(row)
    group.fused._views.update(group.fused)
    tables = {name: table.take([row]) for name, table in group.tables().items()}
    return MemberState(apart(group.fused, row), tables)


def put_member_state(group: TrainingGroup, row: int, tables: dict[str, MemberTable]) -> None:
    """Write the training state of a member to a row of a group that has its model already, and what it lacks here."""
    group.optimizer.put([row], tables)
    for name, table in group._own_tables().items():
        if name in tables and table is not group.table:
            table.put([row], tables[name])
    group.put_rows([row], tables["member"])
