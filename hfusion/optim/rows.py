"""Rows of stacked tensors: what one kernel call works on, and the views that are kept from step to step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

# Measured on a CPU, in ns: what it costs to copy an element of a parameter, its gradient and its state into
# scratch tensors and back, and to do so at all for one more parameter. A GPU's kernels take many tensors in
# one launch anyway.
_COPY_ELEMENT = 0.7
_COPY_TENSOR = 2000


@dataclass(frozen=True)
class Traits:
    """Of an optimizer's native kernel. ``tensor_ns``: what one more tensor adds to a call on a CPU, of any
    size.

    ``decoupled``: weight decay scales the parameter, and is not added to the gradient.
    """

    tensor_ns: float
    decoupled: bool = False


class Row(NamedTuple):
    """Consecutive members that one kernel call updates: lists over parameters, each tensor ``[members,
    ...]``.

    ``number`` is that of this step, from 1, and ``step`` the same as a float32 scalar on their
    device.
    """

    params: list[Tensor]
    grads: list[Tensor]
    buffers: list[list[Tensor]]
    number: float
    step: Tensor


class RowPlan:
    """The rows of some stacks, for fixed lengths of the runs of members.

    ``stacks``: the parameters, then each state buffer; each a list of tensors ``[B, *shape]`` in the same
    order. ``tensor_ns``: what one more tensor adds to a kernel call; parameters that are cheaper to copy
    next to each other than to hand over one by one are copied.
    """

    def __init__(self, stacks: Sequence[list[Tensor]], lengths: list[int], tensor_ns: float) -> None:
        self.lengths = lengths
        self.contiguous = all(tensor.is_contiguous() for tensor in chain.from_iterable(stacks))
        small = _small(stacks[0], len(lengths) * tensor_ns) if self.contiguous else []
        self._direct = [index for index in range(len(stacks[0])) if index not in set(small)]
        self._pack = _Pack([[stack[index] for index in small] for stack in stacks], small) if small else None
        scratch = self._pack.scratch if self._pack else [None] * (len(stacks) + 1)
        self._grad_scratch = scratch[-1]
        # rows[stack][run] is a list of tensors.
        self.rows = [
            self._cut([stack[index] for index in self._direct], part)
            for stack, part in zip(stacks, scratch, strict=False)
        ]

    def load(self, grads: list[Tensor]) -> list[list[Tensor]]:
        """The rows of this step's gradients; small parameters and their state are copied side by side."""
        # The fused kernels read memory in order, whatever the strides of a gradient say.
        if self.contiguous:
            grads = [grad.contiguous() for grad in grads]
        if self._pack:
            self._pack.load(grads)
            grads = [grads[index] for index in self._direct]
        return self._cut(grads, self._grad_scratch)

    def store(self) -> None:
        """Write the small parameters and their state back after the kernels ran."""
        if self._pack:
            self._pack.store()

    def _cut(self, tensors: list[Tensor], scratch: Tensor | None) -> list[list[Tensor]]:
        if scratch is not None:
            tensors = [*tensors, scratch]
        if len(self.lengths) == 1:
            return [tensors]
        return list(
            map(list, zip(*(torch.split_with_sizes(tensor, self.lengths) for tensor in tensors), strict=True))
        )


class _Pack:
    """Scratch tensors ``[B, total]`` that hold many small stacks side by side during a step."""

    def __init__(self, stacks: Sequence[list[Tensor]], indices: list[int]) -> None:
        first = stacks[0][0]
        self._members = len(first)
        self._indices = indices
        sizes = [tensor[0].numel() for tensor in stacks[0]]
        self.scratch: list[Tensor | None] = []
        self._loads: list[tuple[list[Tensor], Tensor]] = []
        self._sources: list[Tensor] = []
        for stack in stacks:
            scratch = first.new_empty(self._members, sum(sizes))
            self.scratch.append(scratch)
            self._loads.append(([tensor.view(self._members, -1) for tensor in stack], scratch))
            self._sources += torch.split_with_sizes(scratch, sizes, 1)
        self._targets = [*chain.from_iterable(flat for flat, _ in self._loads)]
        self._grads = first.new_empty(self._members, sum(sizes))
        self.scratch.append(self._grads)

    def load(self, grads: list[Tensor]) -> None:
        for flat, scratch in self._loads:
            torch.cat(flat, 1, out=scratch)
        torch.cat([grads[index].view(self._members, -1) for index in self._indices], 1, out=self._grads)

    def store(self) -> None:
        torch._foreach_copy_(self._targets, self._sources)


def _small(params: list[Tensor], cost: float) -> list[int]:
    if params[0].device.type != "cpu":
        return []
    limit = (cost - _COPY_TENSOR) / _COPY_ELEMENT
    small = [index for index, param in enumerate(params) if 0 < param.numel() <= limit]
    return small if len(small) > 1 else []
