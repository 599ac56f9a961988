"""Rearrange the stacks of an array whose members leave, join or are overwritten: move rows, add and free stacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from hfusion.array.array_description import Array, stack_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.membership import Membership, mark, note_added
from hfusion.core.row_indices import moved_rows

if TYPE_CHECKING:
    from hfusion.array.array_editing import Source
    from hfusion.array.module import FusedModule


@torch.no_grad()
def move_stacks(fused: FusedModule, sources: Sequence[Source], after: Array) -> dict[str, Tensor]:
    """Rearrange each stack to rows ``sources``, in the shapes of the array ``after``, and return its tensors by key.

    The memory of stacks that no member has any more is freed, and they are marked as unused.
    """
    joining = {index: dict(tensors(source)) for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    shapes = {name: shape for by_name in after.own_shapes for name, shape in by_name.items()} | after.row_shapes
    member_names = {name for by_name in fused._array.own_shapes for name in by_name}
    stacks, visited = dict[str, Tensor](), set[int]()
    for name, tensor in tensors(fused):
        unused = name in member_names and name not in shapes
        if not unused:
            stacks[name] = tensor
        if name in after.comparison.shared or id(tensor) in visited:
            continue
        visited.add(id(tensor))
        if unused:
            _empty(tensor, name, after.members)
        else:
            _move(tensor, sources, {index: by_name.get(name) for index, by_name in joining.items()}, shapes.get(name))
    added = {}
    for name in shapes.keys() - stacks.keys():
        rows = [joining[index].get(name) if index in joining else None for index in range(after.members)]
        like = next(row for row in rows if row is not None)
        added[name] = stack_of(rows, like, after.row_shapes.get(name))
    note_added(added.values())
    return stacks | added


def _move(
    stack: Tensor, sources: Sequence[Source], joining: Mapping[int, Tensor | None], shape: torch.Size | None
) -> None:
    grad, old_shape = stack.grad, stack.shape
    stack.grad = None
    moved = moved_rows(stack.detach(), sources, joining, shape)
    resize(stack, moved, moved.shape == old_shape)
    if grad is not None:
        stack.grad = _moved_grad(grad, sources, joining, shape)


def _empty(stack: Tensor, name: str, members: int) -> None:
    stack.grad = None
    resize(stack, torch.empty(0, dtype=stack.dtype, device=stack.device), False)
    mark(stack, Membership(name, members, True, True, shapes=(None,) * members))


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


def _moved_grad(
    grad: Tensor, sources: Sequence[Source], joining: Mapping[int, Any], shape: torch.Size | None
) -> Tensor:
    absent = absent_rows(grad)
    new_absent = torch.tensor(
        [False if absent is None or not isinstance(s, int) else bool(absent[s]) for s in sources], device="cpu"
    )
    new_absent[list(joining)] = True
    moved = moved_rows(grad, sources, dict.fromkeys(joining), shape)
    mark_absent(moved, new_absent)
    return moved
