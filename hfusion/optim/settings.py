"""The checked hyper-parameters of a param group, and which members may go through a kernel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.optim.hyper import Values

Flags: TypeAlias = tuple[bool, ...]


@dataclass(frozen=True, eq=False)
class Settings:
    """The checked hyper-parameters of a param group: ``columns[hyper][member]``, ``members[member][hyper]``.

    The learning rate comes first and the weight decay last. ``buffers``: for each member, the names of the
    state stacks that its update uses.
    """

    columns: list[list[float]]
    flags: Flags
    maximize: bool
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
        return torch.tensor([float(bool(names)) for names in self.buffers])

    @cached_property
    def unit(self) -> Values | None:
        """The values of a step with lr 1 and no weight decay, if that step is the same for all members.

        None if it is not, if nothing would be gained, or if weight decay is 0 for some members only: a
        product with 0 would carry the NaN of a broken parameter into its gradient.
        """
        inner = {values[1:-1] for values in self.members}
        decays = {values[-1] != 0 for values in self.members}
        if len(self.lengths) == 1 or len(inner) > 1 or len(decays) > 1:
            return None
        return (1.0, *inner.pop(), 0.0)


def run_lengths(values: Sequence[object]) -> list[int]:
    """The lengths of the runs of equal neighbours."""
    return [len(list(run)) for _, run in groupby(values)]
