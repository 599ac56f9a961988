"""Blocks of neighbouring members, as arrays in the memory of their rows, to compute one block after another.

The activations of a block are freed before those of the next block are allocated: a step needs the memory of one block.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from hfusion.array.gathered_rows import GatheredRows
from hfusion.capture.registered_tensors import tensors
from hfusion.core.gradient_usage import absent_rows, freeze_rows, frozen_rows, mark_absent


class MemberBlock(GatheredRows):
    """Neighbouring members as a separate array, whose tensors are views of their rows.

    Programs are derived from those of the whole array, if there are any. `load` moves the block to as many other
    members.
    """

    # Views of rows have the full row shape, so members must not differ in shapes.

    @staticmethod
    def _room(stack: Tensor, rows: Sequence[int] | None) -> Tensor:
        values = stack.detach() if rows is None else _view(stack, rows)
        return nn.Parameter(values, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else values

    @torch.no_grad()
    def _load_tensors(self, resized: bool) -> None:
        shared, stacks = self.array._array.comparison.shared, dict(tensors(self.whole))
        for name, tensor in tensors(self.array):
            stack = stacks[name]
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad != stack.requires_grad:
                tensor.requires_grad_(stack.requires_grad)
            tensor.data = stack.detach() if name in shared else _view(stack, self.rows)
            if name not in shared:
                frozen = frozen_rows(stack)
                freeze_rows(tensor, None if frozen is None else frozen[self.rows])


def _view(stack: Tensor, rows: Sequence[int]) -> Tensor:
    return stack.detach()[rows[0] : rows[-1] + 1]


class BlockGradients:
    """Collects the gradients of an array from one block of members after another.

    They are added to the existing gradients of the array.
    """

    def __init__(self, whole: nn.Module) -> None:
        self._params = dict(whole.named_parameters())
        self._names_with_gradient = {name for name, param in self._params.items() if param.grad is not None}
        # By name, a bool tensor [B] that is True for members without a gradient so far.
        self._absent: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, block: MemberBlock) -> None:
        """Move the gradients of ``block`` into the rows of its members; gradients of shared tensors are summed."""
        block.array._views.settle()
        shared, rows = block.array._array.comparison.shared, slice(block.rows[0], block.rows[-1] + 1)
        for name, param in block.array.named_parameters():
            grad, param.grad = param.grad, None
            if grad is None:
                continue
            whole, absent = self._params[name], absent_rows(grad)
            if name in shared:
                if absent is not None and bool(absent.all()):
                    continue
                whole.grad = grad if whole.grad is None else whole.grad.add_(grad)
                continue
            if whole.grad is None:
                whole.grad = torch.zeros_like(whole, memory_format=torch.contiguous_format)
            if name not in self._absent:
                before = absent_rows(whole.grad) if name in self._names_with_gradient else None
                everybody = torch.full((len(whole),), name not in self._names_with_gradient, device="cpu")
                self._absent[name] = everybody if before is None else before.clone()
            if name in self._names_with_gradient:
                whole.grad[rows] += grad
                self._absent[name][rows] &= True if absent is None else absent
            else:
                whole.grad[rows] = grad
                self._absent[name][rows] = False if absent is None else absent
            mark_absent(whole.grad, self._absent[name])
