"""The members of an array over the ranks of torch.distributed: each rank trains its own, and steps alone."""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch import distributed as dist


def rows(members: int, rank: int | None = None, world: int | None = None) -> slice:
    """Return the slice of ``members`` members that this rank trains: ``models[hf.rows(len(models))]``.

    Ranks get consecutive members; their numbers differ by at most one. A step needs no other rank.

    Args:
        rank, world: by default those of torch.distributed's default group. Before `init_process_group` those that
            torchrun sets in RANK and WORLD_SIZE. Without either, one process has all members.

    Raises:
        ValueError: there are fewer members than ranks, or the rank is out of range.

    Example:
        >>> rows(10, rank=1, world=4)
        slice(3, 6, None)
    """
    if (rank is None) != (world is None):
        raise ValueError(f"rows({members}, rank={rank}, world={world}): give rank and world both, or neither")
    if rank is None or world is None:
        rank, world = _rank_and_world()
    if world < 1 or not 0 <= rank < world:
        raise ValueError(f"rank={rank} of world={world}: ranks are 0 to {max(world, 1) - 1}")
    if members < world:
        max_processes = max(members, 1)
        raise ValueError(
            f"{members} members for {world} ranks: {world - max(members, 0)} would have none; start at most "
            f"{max_processes} processes, such as by torchrun --nproc-per-node {max_processes}, or train more members"
        )
    small, large = divmod(members, world)
    start = rank * small + min(rank, large)
    return slice(start, start + small + (rank < large))


def gather_rows(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the values ``[rows, ...]`` of all ranks' members on every rank: ``[B, ...]``, in the order of the ranks.

    For losses and metrics that are compared between members. All ranks of ``group`` call it, with any number of rows
    each. Tensors must be on the device that the backend needs: the GPU for nccl. In one process, without
    torch.distributed, it returns its argument.

    Raises:
        ValueError: a tensor has no dimension of rows, or ranks differ in dtype or in the other dimensions.

    Example:
        >>> import torch, hfusion as hf
        >>> hf.gather_rows(torch.tensor([0.3, 0.1]))  # in one process
        tensor([0.3000, 0.1000])
    """
    if not values.dim():
        raise ValueError("gather_rows got a tensor without dims: its first dim is that of this rank's rows")
    if not _running():
        return values
    values = values.detach()
    kinds: list[tuple[int, tuple[int, ...], torch.dtype]] = [(0, (), values.dtype)] * dist.get_world_size(group)
    dist.all_gather_object(kinds, (len(values), tuple(values.shape[1:]), values.dtype), group)
    if len({kind[1:] for kind in kinds}) > 1:
        description = ", ".join(
            f"rank {rank}: {[count, *shape]} {dtype}" for rank, (count, shape, dtype) in enumerate(kinds)
        )
        raise ValueError(f"gather_rows got {description}: all but the first dim are the same on all ranks")
    max_rows = max(count for count, _, _ in kinds)
    # all_gather needs tensors of the same size on all ranks.
    padded = values.new_zeros(max_rows, *values.shape[1:])
    padded[: len(values)] = values
    blocks = [torch.empty_like(padded) for _ in kinds]
    dist.all_gather(blocks, padded, group)
    return torch.cat([block[:count] for block, (count, _, _) in zip(blocks, kinds, strict=True)])


def _running() -> bool:
    return dist.is_available() and dist.is_initialized()


def _rank_and_world() -> tuple[int, int]:
    """Return the rank of this process and the number of ranks."""
    if _running():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
