"""What a population keeps of its members' weights, and computes of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from hfusion.population.best import BestMembers, BestRecord

if TYPE_CHECKING:
    from hfusion.population.population import Population


class MemberWeights:
    """The weights of a population's members: their best ones, and their average."""

    _best: dict[str, BestRecord]

    @property
    def best(self) -> BestMembers:
        """Each member's best weights, to update, restore and copy: see `hfusion.population.best.BestMembers`."""
        return BestMembers(cast("Population", self))
