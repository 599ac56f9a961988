"""The checked hyper-parameters of a param group, and which members may go through a kernel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.optim.hyper import MemberVector, Values

Flags: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Settings:
    """The checked hyper-parameters of a param group: ``columns[hyper][member]``, ``members[member][hyper]``.

    ``vectors``: the param group's own, from which ``columns`` were read. ``buffers``: for each member, the names of the
    state stacks that its update uses.
    """

    vectors: list[MemberVector]
    columns: list[list[float]]
    flags: Flags
    members: list[Values]
    buffers: list[tuple[str, ...]]

    @cached_property
    def names(self) -> list[str]:
        """The state stacks that some member uses."""
        return list(dict.fromkeys(name for names in self.buffers for name in names))

    @cached_property
    def used(self) -> list[list[int]]:
        """For each member, the places in ``names`` of its stacks."""
        return [[self.names.index(name) for name in names] for names in self.buffers]

    @cached_property
    def lengths(self) -> list[int]:
        """The lengths of the runs of neighbouring members with equal values."""
        return run_lengths(self.members)

    @cached_property
    def advance(self) -> Tensor:
        """What a step adds to the counts: float32 ``[B]``, 1 where a member keeps state."""
        return torch.tensor([float(bool(names)) for names in self.buffers], dtype=torch.float32)

    @cached_property
    def table(self) -> Tensor:
        """``columns`` as one float64 tensor ``[hyper, member]``."""
        return torch.tensor(self.columns, dtype=torch.float64)

    @cached_property
    def bits(self) -> int:
        """``flags`` as one number, the first in its lowest bit."""
        return sum(flag << place for place, flag in enumerate(self.flags))


def run_lengths(values: Sequence[object]) -> list[int]:
    """The lengths of the runs of equal neighbours."""
    return [len(list(run)) for _, run in groupby(values)]
