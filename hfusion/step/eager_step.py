"""A training step by autograd: all members together, or one block of members after another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.array.array_editing import trust
from hfusion.array.gathered_rows import GatheredRows
from hfusion.array.module import FusedModule
from hfusion.array.per_model import PerModel
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import take_entries
from hfusion.core.errors import FusionError
from hfusion.core.layout import Listed
from hfusion.core.member_random import new_seeds, seeded
from hfusion.core.member_table import blocks_of
from hfusion.core.step_arguments import check_losses
from hfusion.device.backend import active_autocast, without_autocast


class EagerStep:
    """Forward, losses and gradients of an array by autograd."""

    def __init__(self, fused: FusedModule, loss: PerModel) -> None:
        self._fused, self._loss = fused, loss
        # Blocks by number of members.
        self._blocks: dict[int, GatheredRows] = {}

    def run(
        self, args: Sequence[Any], kwargs: dict[str, Any], target: Any, size: int | None, seeds: bool
    ) -> tuple[Tensor, Any]:
        """Accumulate the gradients of a step in ``.grad``. Return the losses ``[B]``, detached, and the outputs.

        Args:
            size: members per block; None for all members together. With blocks, the outputs are those of the first
                member, expanded to ``[B, ...]``.
            seeds: on a CPU, each member draws from a seed of its own, so that draws do not depend on blocks.
        """
        members = len(self._fused)
        seeds = seeds and all(param.is_cpu for param in self._fused.parameters())
        # Blocks draw from the seeds of the same step, made at the first draw.
        draws = cache(partial(new_seeds, members)) if seeds else None
        if size is not None and size < members:
            return self._run_blocks(args, kwargs, target, size, draws)
        with torch.enable_grad():
            with nullcontext() if draws is None else seeded(draws):
                losses = self._loss(outputs := self._fused(*args, **kwargs), target)
            check_losses(losses, members)
            backward(losses)
        return losses.detach(), outputs

    def _run_blocks(
        self, args: Sequence[Any], kwargs: dict[str, Any], target: Any, size: int, draws: Callable[[], Tensor] | None
    ) -> tuple[Tensor, Any]:
        fused, losses, outputs = self._fused, list[Tensor](), None
        for rows in blocks_of(len(fused), size):
            block = self._block(rows, size)
            block_args, block_kwargs, block_target = (
                take_entries(value, rows) for value in (tuple(args), kwargs, target)
            )
            own_draws = None if draws is None else lambda rows=rows: draws()[rows.start : rows.stop]
            with torch.enable_grad():
                with nullcontext() if own_draws is None else seeded(own_draws):
                    value = self._loss(block_outputs := block.array(*block_args, **block_kwargs), block_target)
                check_losses(value, len(rows))
                block.check_modes()
                backward(value)
            block.move_gradients()
            losses.append(value.detach())
            if outputs is None:
                outputs = _expanded(block_outputs, len(fused))
                part, whole = Arguments.of(block_args, block_kwargs), Arguments.of(tuple(args), kwargs)
                checked = None if part.ragged or whole.ragged else block.array.find(part)
                # The program of all members, and those of later blocks, need not repeat this block's self-check.
                if checked is not None and (program := fused.find(whole)) is not None:
                    trust(checked, program)
            # Free their memory before the next block runs.
            del block_outputs, value
        return torch.cat(losses), outputs

    def outputs(self, args: Sequence[Any], kwargs: dict[str, Any], size: int | None) -> Any:
        """Return the outputs that `run` would return, from a forward only."""
        if size is None:
            return self._fused(*args, **kwargs)
        rows = range(size)
        block_args, block_kwargs = take_entries(tuple(args), rows), take_entries(kwargs, rows)
        return _expanded(self._block(rows, size).array(*block_args, **block_kwargs), len(self._fused))

    def _block(self, rows: range, size: int) -> GatheredRows:
        """Return the array of the members ``rows``. Raises FusionError if they cannot be computed separately."""
        try:
            block = self._blocks.get(len(rows))
            if block is None or not block.fits():
                block = self._blocks[len(rows)] = GatheredRows(self._fused, rows, live=True)
            else:
                block.load(rows)
        except FusionError as error:
            raise FusionError(
                f"memory= lets a step compute {size} of {len(self._fused)} members at a time, which cannot be done "
                f"here. {error}; or give more memory"
            ) from error
        return block


def backward(losses: Tensor) -> None:
    """Compute the gradients of the sum of losses."""
    # torch recommends to leave autocast before backward.
    with without_autocast(active_autocast()):
        losses.sum().backward()


def _expanded(outputs: Any, members: int) -> Any:
    """Return the first member's outputs, expanded to all members."""

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return Listed(leaf[:1] * members) if isinstance(leaf, Listed) else leaf
        return leaf.detach()[:1].expand(members, *leaf.shape[1:]).requires_grad_(leaf.requires_grad)

    return pytree.tree_map(first, outputs)
