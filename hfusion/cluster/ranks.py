"""The members of an array over the ranks of torch.distributed: each rank trains its own, and steps alone."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hfusion.core.member_table import MemberTable, is_row, pairs
from hfusion.population.members import EventKind, new_names
from hfusion.population.population import Population
from hfusion.population.training_group import TrainingGroup
from hfusion.population.weights import member_tensors


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
        rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        if _running():
            rank, world = dist.get_rank(), dist.get_world_size()
    if not is_row(members):
        raise ValueError(f"rows({members!r}): give the number of members, such as len(models)")
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
    if not isinstance(values, Tensor) or not values.dim():
        raise ValueError("gather_rows got no tensor, or one without dims: its first dim is that of this rank's rows")
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


# Members of a population that is spread over ranks, copied from one rank to another by send and receive.


def copy_rows(pop: Population, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
    """Copy members between the populations of all ranks, as ``pop.copy(src, dst)`` does within one.

    Rows are numbered over all ranks in order, as in the results of `gather_rows`. Call it between updates, on all ranks
    with the same rows; only ranks that send or receive a member wait. In one process it is ``pop.copy``.

    Raises:
        ValueError: as ``pop.copy``.

    Example:
        >>> import torch, hfusion as hf
        >>> models = [torch.nn.Linear(2, 1) for _ in range(2)]
        >>> sgd = lambda params: hf.optim.SGD(params, lr=0.1)
        >>> pop = hf.Population(models, optimizer=sgd, loss=torch.nn.functional.mse_loss, compile=False)
        >>> hf.copy_rows(pop, src=0, dst=1)
        >>> bool(torch.equal(pop.models[0].weight, pop.models[1].weight))
        True
    """
    if not _running():
        pop.copy(src, dst)
        return
    array = pop.array
    widths: list[Any] = [0] * dist.get_world_size()
    dist.all_gather_object(widths, len(pop))
    owners = [owner for owner, width in enumerate(widths) for _ in range(width)]
    rank = dist.get_rank()
    first = owners.index(rank)
    moves = [(owners[source], source, owners[target], target) for source, target in pairs(src, dst, len(owners))]
    crossing = [move for move in moves if move[0] != move[2]]
    # All are read before one is written; each rank takes its part in the same order, so that none waits for ever.
    states = {source: _member_state(array, source - first) for from_rank, source, _, _ in crossing if from_rank == rank}
    received: list[tuple[int, Any]] = []
    for from_rank, source, to_rank, target in crossing:
        if from_rank == rank:
            dist.send_object_list([states[source]], to_rank)
        elif to_rank == rank:
            box: list[Any] = [None]
            dist.recv_object_list(box, from_rank)
            received.append((target - first, box[0]))
    local_pairs = [(source - first, target - first) for a, source, b, target in moves if a == b == rank]
    if local_pairs:
        pop.copy(*map(list, zip(*local_pairs, strict=True)))
    for row, member in received:
        _put(pop, row, member)


def _member_state(group: TrainingGroup, row: int) -> dict[str, Any]:
    """Return the state of the member in a row; for a free or frozen row, a dict with an ``error`` message."""
    tag = group.table["tag"][row]
    if tag is None or bool(group.table["frozen"][row]):
        state = "is free" if tag is None else f"holds {tag!r}, which went bad and is frozen"
        return {"error": f"row {row} of rank {dist.get_rank()} {state}: copy a healthy member"}
    return {
        "tables": {name: table.take([row]).to("cpu") for name, table in _tables(group).items()},
        "scheduler": None if group.scheduler is None else group.scheduler.member_state(row),
        "kind": None if group.scheduler is None else group.scheduler.kinds[row],
    }


def _put(population: Population, row: int, member: dict[str, Any]) -> None:
    if "error" in member:
        raise ValueError(member["error"])
    group, received = population.array, member["tables"]
    own, tag = _tables(group), received["member"]["tag"][0]
    if odd := sorted(_columns(own) ^ _columns(received)):
        raise ValueError(f"{odd[0]} is in the population of one of the ranks only: make them alike on all")
    kind = None if group.scheduler is None else group.scheduler.kinds[row]
    if kind != member["kind"]:
        raise ValueError(
            f"{tag!r} has the scheduler {member['kind']} and row {row} of rank {dist.get_rank()} has {kind}: "
            "a function that makes a scheduler does not go to another rank; give both members the same one"
        )
    group.drop_gradients()
    name = group.table["tag"][row]
    for kind, table in own.items():
        table.put([row], received[kind])
    if group.scheduler is not None:
        group.scheduler.load_member(row, member["scheduler"])
    if is_new := name is None:
        (name,) = new_names([None], population.tags, population._history)
    group.table.enter(row, name, row)
    if is_new:
        group.table.note(row, EventKind.START)
    group.table.note(row, EventKind.COPY, tag)
    population._changed()


def _tables(group: TrainingGroup) -> dict[str, MemberTable]:
    """Return all that a member has but its schedule, as live tables by name."""
    group.optimizer.initialise()
    module = MemberTable(len(group), dict(member_tensors(group.fused)))
    return {name: table for name, table in group.tables().items() if name != "schedule"} | {"module": module}


def _columns(tables: dict[str, MemberTable]) -> set[str]:
    """Return the names of the columns that members have on all ranks or on none."""
    kept = {name: table for name, table in tables.items() if name != "best"}
    names = {f"{kind}/{name}" for kind, table in kept.items() for name in table.columns}
    return {name for name in names if not name.startswith(("member/sum", "member/absent", "member/before"))}
