"""Rearrange the stacks of an array whose members leave, join or are overwritten."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hfusion.array.array_description import Array
from hfusion.capture.registered_tensors import tensors
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.row_indices import moved_rows

if TYPE_CHECKING:
    from hfusion.array.array_editing import Source
    from hfusion.array.module import FusedModule


@torch.no_grad()
def move_stacks(fused: FusedModule, sources: Sequence[Source], after: Array) -> None:
    """Rearrange each stack of an array to rows ``sources``, as the array ``after`` describes."""
    joining = {index: dict(tensors(source)) for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    visited = set[int]()
    for name, stack in tensors(fused):
        if name in after.comparison.shared or name not in after.shapes or id(stack) in visited:
            continue
        visited.add(id(stack))
        grad, old_shape = stack.grad, stack.shape
        stack.grad = None
        moved = moved_rows(stack.detach(), sources, {index: named[name] for index, named in joining.items()})
        resize(stack, moved, moved.shape == old_shape)
        if grad is not None:
            stack.grad = _moved_grad(grad, sources, joining)


def resize(tensor: Tensor, moved: Tensor, in_place: bool) -> None:
    """Replace the data of ``tensor`` by ``moved``, unless ``in_place``: then it has been written in place."""
    if not in_place:
        if tensor.requires_grad:
            # Autograd's node that accumulates into the tensor, which outputs that are still there hold, knows its
            # old shape; torch forgets it where the dtype changes (as of 2.11 to 2.13, `VariableHooks::set_data`).
            other_dtype = torch.float64 if tensor.dtype is torch.float32 else torch.float32
            tensor.data = torch.empty(0, dtype=other_dtype, device=tensor.device)
        tensor.data = moved
    # Values that autograd saved of the tensor have changed.
    increment_version(tensor)


def _moved_grad(grad: Tensor, sources: Sequence[Source], joining: Mapping[int, Any]) -> Tensor:
    absent = absent_rows(grad)
    new_absent = torch.tensor(
        [False if absent is None or not isinstance(s, int) else bool(absent[s]) for s in sources], device="cpu"
    )
    new_absent[list(joining)] = True
    moved = moved_rows(grad, sources, dict.fromkeys(joining))
    mark_absent(moved, new_absent)
    return moved
