"""Rows of stacked tensors: what one kernel call works on, and the views that are kept from step to step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Row(NamedTuple):
    """Consecutive members that one kernel call updates: lists over parameters, tensors ``[members, ...]``.

    ``number`` is that of this step, from 1, and ``step`` the same as a float32 scalar on their device.
    """

    params: list[Tensor]
    grads: list[Tensor]
    buffers: list[list[Tensor]]
    number: float
    step: Tensor


class RowPlan:
    """The rows of some stacks, for fixed lengths of the runs of members.

    ``stacks``: the parameters, then each state buffer; each a list of tensors ``[B, *shape]`` in the same
    order. ``used``: for each member, the places of its buffers among the state buffers.
    """

    def __init__(self, stacks: Sequence[list[Tensor]], lengths: list[int], used: Sequence[Sequence[int]]) -> None:
        self._lengths = lengths
        starts = [sum(lengths[:place]) for place in range(len(lengths))]
        params, *state = (self._cut(stack, torch.split_with_sizes) for stack in stacks)
        buffers = [[state[index][place] for index in used[start]] for place, start in enumerate(starts)]
        self._rows = list(zip(starts, params, buffers, strict=True))

    def load(self, grads: list[Tensor]) -> Iterator[tuple[int, list[Tensor], list[Tensor], list[list[Tensor]]]]:
        """For each row its first member, parameters, gradients and buffers; the gradients are only read."""
        # Views that autograd does not track are cheaper.
        parts = self._cut(grads, torch.unsafe_split_with_sizes)
        for (start, params, buffers), part in zip(self._rows, parts, strict=True):
            yield start, params, part, buffers

    def _cut(self, stack: list[Tensor], split: Callable[..., Sequence[Tensor]]) -> list[list[Tensor]]:
        if len(self._lengths) == 1:
            return [stack]
        return list(map(list, zip(*(split(tensor, self._lengths) for tensor in stack), strict=True)))
