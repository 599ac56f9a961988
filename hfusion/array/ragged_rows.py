"""Divide members by the sizes of their batches, and join the results of blocks in the members' order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.core.errors import FusionError
from hfusion.core.layout import member_values, values_of
from hfusion.core.ragged import Ragged


def check_ragged(members: int, arguments: Arguments) -> None:
    """Raise a ValueError if a ragged argument does not hold one batch per member."""
    for leaf in arguments.ragged:
        if len(leaf) != members:
            raise ValueError(
                f"hf.stacked input holds {len(leaf)} batches, of sizes {list(leaf.sizes)}, but the array has {members} "
                "members; give it one batch per member"
            )


def rows_by_size(arguments: Arguments, rows: Sequence[int]) -> list[list[int]]:
    """Divide members by the sizes of their ragged arguments."""
    groups: dict[Any, list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(leaf[row].shape for leaf in arguments.ragged), []).append(row)
    return list(groups.values())


def call_by_size(members: int, arguments: Arguments, call: Callable[[Arguments], Any]) -> Any:
    """Call ``call`` with the arguments of the members of each size, and join the results."""
    check_ragged(members, arguments)
    blocks = []
    for rows in rows_by_size(arguments, range(members)):
        try:
            blocks.append((rows, call(arguments.of_rows(rows))))
        except Exception as error:
            sizes = [list(leaf[rows[0]].shape) for leaf in arguments.ragged]
            error.add_note(f"This is of members {rows}, whose tensors have the sizes {sizes}.")
            raise
    return joined_blocks(blocks)


def joined_blocks(blocks: Sequence[tuple[Sequence[int], Any]]) -> Any:
    """Join results ``[k, ...]`` of blocks of members into those of all: stacked, or `Ragged` if their sizes differ.

    Raises:
        FusionError: results of different structures.
    """
    flat = [pytree.tree_flatten(outputs) for _, outputs in blocks]
    order = [row for rows, _ in blocks for row in rows]
    kinds = [[_kind(leaf) for leaf in leaves] for leaves, _ in flat]
    for (rows, _), (_, spec), block_kinds in zip(blocks, flat, kinds, strict=True):
        if spec != flat[0][1] or block_kinds != kinds[0]:
            raise FusionError(
                f"members {list(blocks[0][0])} and {list(rows)} are given batches of different sizes, and give "
                f"{kinds[0]} and {block_kinds}, which an array cannot join. Return the same structure from all, or "
                "call the members by themselves: fused[i](...)"
            )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    rows_of_blocks = [rows for rows, _ in blocks]
    return pytree.tree_unflatten([_joined_leaves(order, rows_of_blocks, column) for column in columns], flat[0][1])


def _joined_leaves(order: Sequence[int], rows: Sequence[Sequence[int]], blocks: Sequence[Any]) -> Any:
    back = sorted(range(len(order)), key=order.__getitem__)
    if not isinstance(blocks[0], Tensor | Ragged):
        values = [
            value for block, of_block in zip(blocks, rows, strict=True) for value in values_of(block, len(of_block))
        ]
        return member_values([values[index] for index in back])
    shapes = {tensor.shape[1:] for tensor in blocks if isinstance(tensor, Tensor)}
    if len(shapes) != 1 or any(isinstance(block, Ragged) for block in blocks):
        tensors = [tensor for block in blocks for tensor in (block.unbind() if isinstance(block, Tensor) else block)]
        return Ragged(tensors[index] for index in back)
    whole = torch.cat(list(blocks))
    return whole if back == list(range(len(order))) else whole[torch.tensor(back, device=whole.device)]


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Ragged):
        leaf = leaf[0].unsqueeze(0)
    if not isinstance(leaf, Tensor):
        return "a value"
    return leaf.dim(), leaf.dtype, leaf.device
