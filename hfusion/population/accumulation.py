"""Gradient accumulation of a population: the progress of each member's update over its own number of calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.population.gradients import GradientSums
from hfusion.population.update_guard import Buffers


@dataclass
class Accumulation:
    """Progress of the members' updates.

    Attributes:
        calls: how many calls make an update, int64 ``[rows]``.
        initial_calls: the number that all members began with, the default for joining members; None if they differed.
        done: how many calls of the present update were made, int64 ``[rows]``.
        spoilt: members whose present update has a loss that is not finite, bool ``[rows]``.
        sums: the gradients of the present updates.
        buffers: copies of what forward writes to, from before the present updates; None if not needed.
    """

    calls: Tensor
    initial_calls: int | None
    done: Tensor
    spoilt: Tensor
    sums: GradientSums
    buffers: Buffers | None = None

    @staticmethod
    def of(calls: int | Sequence[int] | Tensor, members: int) -> Accumulation:
        """Return the state of members before their first call. Raises ValueError for invalid or too few ``calls``."""
        counts = _counts(calls, members)
        initial_calls = int(counts[0]) if bool((counts == counts[0]).all()) else None
        nothing = torch.zeros(members, dtype=torch.int64, device="cpu")
        return Accumulation(counts, initial_calls, nothing, nothing.bool(), GradientSums(members))

    @cached_property
    def sums_gradients(self) -> bool:
        """True if any member accumulates several calls."""
        return bool((self.calls > 1).any())

    @property
    def underway(self) -> list[int]:
        """The rows of members that have made some of the calls of an update."""
        rows: list[int] = self.done.nonzero().reshape(-1).tolist()
        return rows

    @property
    def weights(self) -> Tensor:
        """Weight of a call in each member's update, float64 ``[rows]``."""
        return self.calls.double().reciprocal()

    def hold_buffers(self, fused: FusedModule) -> None:
        """Save the tensors that forward may write to, for members that begin an update."""
        if not self.sums_gradients:
            self.buffers = Buffers(fused)
            return
        begins = self.done == 0
        if self.buffers is None or bool(begins.all()):
            self.buffers = Buffers(fused)
        elif bool(begins.any()):
            self.buffers.renew(begins)

    def count(self, training: Tensor) -> Tensor:
        """Count a call of members ``training``. Return which complete an update or do not train, bool ``[rows]``."""
        self.done = self.done + training
        return (self.done == self.calls) | ~training

    def end(self, rows: Tensor) -> None:
        """Let the next call of members ``rows``, bool ``[rows]``, be the first of an update."""
        self.done, self.spoilt = self.done.masked_fill(rows, 0), self.spoilt & ~rows
        if not self.underway:
            self.buffers, self.sums = None, GradientSums(len(self.done))

    def restart(self, rows: Sequence[int], calls: int | Sequence[int] | Tensor | None) -> Accumulation:
        """Return it with ``calls`` of members that start in ``rows``. Raises ValueError for None if members differ."""
        if calls is None and self.initial_calls is None:
            raise ValueError("accumulate differs between the members: give it for those that join, accumulate=...")
        counts = self.calls.clone()
        counts[list(rows)] = _counts(self.initial_calls if calls is None else calls, len(rows))
        return replace(self, calls=counts)

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the unfinished updates of members ``rows``."""
        mask = torch.zeros_like(self.spoilt)
        mask[list(rows)] = True
        self.sums.clear(rows)
        self.end(mask)

    def of_rows(self, rows: Sequence[int], part: FusedModule) -> Accumulation:
        """Return a copy of the state of members ``rows``, for an array ``part`` of them."""
        places = list(rows)
        buffers = None if self.buffers is None else self.buffers.of_rows(places, part)
        return replace(
            self,
            calls=self.calls[places],
            done=self.done[places],
            spoilt=self.spoilt[places],
            sums=self.sums.of_rows(places),
            buffers=buffers,
        )

    def put_rows(self, rows: Sequence[int], part: Accumulation, fused: FusedModule) -> None:
        """Copy the progress of the first members of ``part`` to members ``rows`` of ``fused``."""
        count, places = len(rows), list(rows)
        if part.underway or self.underway:
            self.sums.put_rows(places, part.sums)
            if part.buffers is not None:
                if self.buffers is None:
                    self.buffers = Buffers(fused)
                self.buffers.put_rows(places, part.buffers)
        done, spoilt = self.done.clone(), self.spoilt.clone()
        done[places], spoilt[places] = part.done[:count], part.spoilt[:count]
        self.done, self.spoilt = done, spoilt
        self.end(torch.zeros_like(spoilt))

    def rearranged(self, sources: Sequence[int], fused: FusedModule) -> Accumulation:
        """Return it with row b taken from row ``sources[b]``, for an array ``fused`` whose rows have moved already."""
        return self.of_rows(sources, fused)


def _counts(calls: int | Sequence[int] | Tensor | None, members: int) -> Tensor:
    values = calls.tolist() if isinstance(calls, Tensor) else calls
    values = [values] * members if isinstance(values, int) else list(values or ())
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in values):
        raise ValueError(f"accumulate={calls}: at least one call of step makes an update, and a whole number of them")
    if len(values) != members:
        raise ValueError(f"accumulate has {len(values)} values for {members} members: give one, or one for each")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
