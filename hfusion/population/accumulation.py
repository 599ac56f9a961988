"""Gradient accumulation of a group: the progress of each member's update over its own number of calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.core.calls import stacked
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.membership import member_rows
from hfusion.core.row_indices import write_rows
from hfusion.optim import GradScaler
from hfusion.optim.device_numbers import sent
from hfusion.optim.group import membership_of
from hfusion.population.update_guard import Buffers


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``loss`` for targets of `weighed`: with the same values, and gradients multiplied by the weight."""

    @wraps(loss, updated=())
    def weighted_loss(output: Any, target: Any) -> Any:
        value = loss(output, target["target"])
        held = value.detach()
        # The added term is zero for every finite weight; a value that is not finite stays so.
        weight = target["weight"].to(torch.promote_types(value.dtype, torch.float32))
        return held + (value - held) * weight

    return weighted_loss


def weighed(target: Any, weights: Tensor, scaler: GradScaler | None, device: torch.device) -> dict[str, Any]:
    """Return ``target`` with each member's weight, float64 ``[B]``, times its loss scale, on ``device``."""
    return {"target": target, "weight": stacked(sent(weights if scaler is None else scaler.scale(weights), device))}


class GradientSums:
    """Gradients summed over several calls, kept outside of ``grad``, which a compiled step overwrites.

    Members may have made different numbers of calls: a row without a call so far is zero, and marked as absent.

    Attributes:
        sums: by the key of a parameter, ``[rows, ...]``.
        absent: by key, the members that have had no gradient so far: bool ``[rows]``.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self.sums: dict[str, Tensor] = {}
        self.absent: dict[str, Tensor] = {}

    def begin(self, name: str, like: Tensor) -> None:
        """Begin sums of a parameter, without a gradient so far. ``like``: of the members' shape ``[..., *shape]``."""
        self.sums[name] = like.new_zeros(self._members, *like.shape[1:])
        self.absent[name] = torch.ones(self._members, dtype=torch.bool, device="cpu")

    @torch.no_grad()
    def add(self, fused: FusedModule) -> None:
        """Add the gradients of one call."""
        for name, param in fused.named_parameters():
            if param.grad is None:
                continue
            grad, absent = member_rows(param.grad, membership_of(param)), absent_rows(param.grad)
            absent = torch.zeros(self._members, dtype=torch.bool, device="cpu") if absent is None else absent.cpu()
            if name in self.sums:
                self.sums[name].add_(grad)
                self.absent[name] = self.absent[name] & absent
            else:
                # Cloned, since a replayed step writes its gradients to the same memory again.
                self.sums[name], self.absent[name] = grad.clone(), absent

    @torch.no_grad()
    def take(self, fused: FusedModule, due: Tensor) -> None:
        """Write the sums of members ``due``, bool ``[rows]``, to the parameters' ``grad``, and begin new sums."""
        everybody = bool(due.all())
        for name, param in fused.named_parameters():
            param.grad = None
            if name not in self.sums:
                continue
            sums, absent = self.sums[name], self.absent[name]
            if membership_of(param).standalone:
                param.grad = None if bool(absent) else sums[0]
                continue
            param.grad = sums if everybody else sums.clone()
            if not everybody:
                param.grad[~due.to(sums.device)] = 0
            mark_absent(param.grad, absent | ~due)
        if everybody:
            self.sums, self.absent = {}, {}
        else:
            self.clear(due.nonzero().reshape(-1).tolist())

    def of_rows(self, rows: Sequence[int]) -> GradientSums:
        """Return copies of the sums of members ``rows``."""
        part, places = GradientSums(len(rows)), list(rows)
        part.sums = {name: sums[places] for name, sums in self.sums.items()}
        part.absent = {name: absent[places] for name, absent in self.absent.items()}
        return part

    def put_rows(self, rows: Sequence[int], part: GradientSums) -> None:
        """Write the sums of the first members of ``part`` over those of members ``rows``."""
        self.clear(rows)
        for name, sums in part.sums.items():
            if name not in self.sums:
                self.begin(name, sums)
            write_rows(self.sums[name], rows, sums[: len(rows)])
            write_rows(self.absent[name], rows, part.absent[name][: len(rows)])

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the sums of members ``rows``."""
        for name, sums in self.sums.items():
            sums[list(rows)] = 0
            self.absent[name][list(rows)] = True


@dataclass
class Accumulation:
    """Progress of the members' updates.

    Attributes:
        calls: how many calls make an update, int64 ``[rows]``.
        initial_calls: the number that all members began with, the default for joining members; None if they differed.
        done: how many calls of the present update were made, int64 ``[rows]``.
        spoilt: members whose present update has a loss that is not finite, bool ``[rows]``.
        sums: the gradients of the present updates.
        buffers: copies of what forward writes to, from before the present updates; None if not needed.
    """

    calls: Tensor
    initial_calls: int | None
    done: Tensor
    spoilt: Tensor
    sums: GradientSums
    buffers: Buffers | None = None

    @staticmethod
    def of(calls: int | Sequence[int] | Tensor, members: int) -> Accumulation:
        """Return the state of members before their first call. Raises ValueError for invalid or too few ``calls``."""
        counts = _counts(calls, members)
        initial_calls = int(counts[0]) if bool((counts == counts[0]).all()) else None
        nothing = torch.zeros(members, dtype=torch.int64, device="cpu")
        return Accumulation(counts, initial_calls, nothing, nothing.bool(), GradientSums(members))

    @cached_property
    def sums_gradients(self) -> bool:
        """True if any member accumulates several calls."""
        return bool((self.calls > 1).any())

    @property
    def underway(self) -> list[int]:
        """The rows of members that have made some of the calls of an update."""
        rows: list[int] = self.done.nonzero().reshape(-1).tolist()
        return rows

    @property
    def weights(self) -> Tensor:
        """Weight of a call in each member's update, float64 ``[rows]``."""
        return self.calls.double().reciprocal()

    def stacks(self) -> dict[str, Tensor]:
        """The progress of the members' present updates, by name: live tensors ``[rows, ...]``."""
        stacks = {"done": self.done, "spoilt": self.spoilt}
        stacks |= {f"sums/{name}": sums for name, sums in self.sums.sums.items()}
        stacks |= {f"absent/{name}": absent for name, absent in self.sums.absent.items()}
        return stacks | {f"before/{name}": v for name, v in (self.buffers.saved_values if self.buffers else {}).items()}

    def hold_buffers(self, fused: FusedModule) -> None:
        """Save the tensors that forward may write to, for members that begin an update."""
        if not self.sums_gradients:
            self.buffers = Buffers(fused)
            return
        begins = self.done == 0
        if self.buffers is None or bool(begins.all()):
            self.buffers = Buffers(fused)
        elif bool(begins.any()):
            self.buffers.renew(begins)

    def count(self, training: Tensor) -> Tensor:
        """Count a call of members ``training``. Return which complete an update or do not train, bool ``[rows]``."""
        self.done = self.done + training
        return (self.done == self.calls) | ~training

    def end(self, rows: Tensor) -> None:
        """Let the next call of members ``rows``, bool ``[rows]``, be the first of an update."""
        self.done, self.spoilt = self.done.masked_fill(rows, 0), self.spoilt & ~rows
        if not self.underway:
            self.buffers, self.sums = None, GradientSums(len(self.done))

    def restart(self, rows: Sequence[int], calls: int | Sequence[int] | Tensor | None) -> Accumulation:
        """Return it with ``calls`` of members that start in ``rows``. Raises ValueError for None if members differ."""
        if calls is None and self.initial_calls is None:
            raise ValueError("accumulate differs between the members: give it for those that join, accumulate=...")
        counts = self.calls.clone()
        counts[list(rows)] = _counts(self.initial_calls if calls is None else calls, len(rows))
        return replace(self, calls=counts)

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the unfinished updates of members ``rows``."""
        mask = torch.zeros_like(self.spoilt)
        mask[list(rows)] = True
        self.sums.clear(rows)
        self.end(mask)

    def of_rows(self, rows: Sequence[int], part: FusedModule) -> Accumulation:
        """Return a copy of the state of members ``rows``, for an array ``part`` of them."""
        places = list(rows)
        buffers = None if self.buffers is None else self.buffers.of_rows(places, part)
        return replace(
            self,
            calls=self.calls[places],
            done=self.done[places],
            spoilt=self.spoilt[places],
            sums=self.sums.of_rows(places),
            buffers=buffers,
        )

    def put_rows(self, rows: Sequence[int], part: Accumulation, fused: FusedModule) -> None:
        """Copy the progress of the first members of ``part`` to members ``rows`` of ``fused``."""
        count, places = len(rows), list(rows)
        if part.underway or self.underway:
            self.sums.put_rows(places, part.sums)
            if part.buffers is not None:
                if self.buffers is None:
                    self.buffers = Buffers(fused)
                self.buffers.put_rows(places, part.buffers)
        done, spoilt = self.done.clone(), self.spoilt.clone()
        done[places], spoilt[places] = part.done[:count], part.spoilt[:count]
        self.done, self.spoilt = done, spoilt
        self.end(torch.zeros_like(spoilt))

    def rearranged(self, sources: Sequence[int], fused: FusedModule) -> Accumulation:
        """Return it with row b taken from row ``sources[b]``, for an array ``fused`` whose rows have moved already."""
        return self.of_rows(sources, fused)


def _counts(calls: int | Sequence[int] | Tensor | None, members: int) -> Tensor:
    values = calls.tolist() if isinstance(calls, Tensor) else calls
    values = [values] * members if isinstance(values, int) else list(values or ())
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in values):
        raise ValueError(f"accumulate={calls}: at least one call of step makes an update, and a whole number of them")
    if len(values) != members:
        raise ValueError(f"accumulate has {len(values)} values for {members} members: give one, or one for each")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
