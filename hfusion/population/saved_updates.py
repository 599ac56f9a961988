"""Unfinished updates of members in a save."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfusion.checkpoint.reader import SaveReader
from hfusion.checkpoint.save_contents import OWN, SaveWriter
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import padded_rows
from hfusion.optim.group import membership_of
from hfusion.population.accumulation import Accumulation
from hfusion.population.gradients import GradientSums
from hfusion.population.update_guard import Buffers

if TYPE_CHECKING:
    from hfusion.population.population import ArrayGroup

_CALLS, _DONE, _SPOILT = (f"population/{name}" for name in ("accumulate", "calls made", "spoilt"))
_SUM, _ABSENT, _BEFORE = (f"population/{name}/" for name in ("sums", "absent", "before"))


def save_updates(writer: SaveWriter, pop: ArrayGroup) -> None:
    """Save the members' progress in their updates, with sums of gradients if an update is unfinished."""
    updates = pop._updates
    writer.store_rows(_CALLS, updates.calls)
    if not updates.underway:
        return
    writer.store_rows(_DONE, updates.done)
    writer.store_rows(_SPOILT, updates.spoilt)
    for name, value in updates.sums.sums.items():
        absent = updates.sums.absent[name]
        writer.store_rows(_SUM + name, value)
        writer.store_rows(_ABSENT + name, torch.zeros_like(updates.spoilt) if absent is None else absent)
    if updates.buffers is not None:
        for name, value in updates.buffers.saved_values.items():
            writer.store_rows(_BEFORE + name, value)


def load_updates(wide: SaveReader, pop: ArrayGroup, free: Sequence[int], has_accumulate: bool) -> Accumulation:
    """Restore the members' progress in their updates, for a population whose tensors are loaded.

    ``has_accumulate``: whether the user has passed ``accumulate``.

    Raises:
        CheckpointError: ``accumulate`` differs from the save for a member whose update is unfinished.
    """
    calls = pop._updates.calls
    done = _saved_rows(wide, _DONE, torch.zeros_like(calls))
    saved = _saved_rows(wide, _CALLS, calls)
    if has_accumulate and bool(((done > 0) & (saved != calls)).any()):
        row = int(((done > 0) & (saved != calls)).nonzero()[0])
        raise CheckpointError(
            f"accumulate={int(calls[row])} for {wide.tags[row]!r}, which is in the midst of an update of "
            f"{int(saved[row])} calls: leave accumulate out"
        )
    updates = Accumulation.of(calls if has_accumulate else saved, len(calls))
    if pop._common and updates.initial_calls is None:
        raise CheckpointError(f"accumulate={updates.calls.tolist()}: members train a parameter together, and so update")
    updates.done, updates.spoilt = done, _saved_rows(wide, _SPOILT, updates.spoilt)
    if updates.underway:
        updates.sums = _sums(wide, pop, len(calls))
        updates.buffers = Buffers(pop.fused)
        for name, value in updates.buffers.saved_values.items():
            value.copy_(_saved_rows(wide, _BEFORE + name, value))
        updates.clear(free)
    return updates


def _sums(wide: SaveReader, pop: ArrayGroup, members: int) -> GradientSums:
    sums = GradientSums(members)
    for name, param in pop.fused.named_parameters():
        if any(OWN + _SUM + name in saved.tensors for saved, _ in wide.parts):
            like = torch.zeros_like(member_rows(param.detach(), membership_of(param)))
            sums.sums[name] = _saved_rows(wide, _SUM + name, like).to(param.device)
            sums.absent[name] = _saved_rows(wide, _ABSENT + name, torch.ones(members, dtype=torch.bool, device="cpu"))
    return sums


def _saved_rows(wide: SaveReader, key: str, otherwise: Tensor) -> Tensor:
    """Return the members' rows of a saved tensor; for saves that do not hold it, the rows of ``otherwise``."""
    rows, start = [], 0
    for saved, places in wide.parts:
        stack = saved.tensors.get(OWN + key)
        stop = start + len(places)
        if stack is not None and saved.body["module"].get("shapes") and stack.dim() == otherwise.dim():
            rows.append(padded_rows(stack[places], otherwise.shape[1:]))
        else:
            rows.append(otherwise[start:stop].cpu() if stack is None else stack[places])
        start = stop
    values = torch.cat(rows)
    if (values.dtype, values.shape) != (otherwise.dtype, otherwise.shape):
        raise CheckpointError(f"{wide.path}: {key} is {values.dtype} {list(values.shape)}")
    return values
