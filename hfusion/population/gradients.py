"""Gradients of a population between backward and update: weighted, and summed over several calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
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
        absent: by key, the members, bool ``[rows]``, that have had no gradient so far; None if all have had one.
    """

    def __init__(self, members: int) -> None:
        self._members = members
        self.sums: dict[str, Tensor] = {}
        self.absent: dict[str, Tensor | None] = {}

    @torch.no_grad()
    def add(self, fused: FusedModule) -> None:
        """Add the gradients of one call."""
        for name, param in fused.named_parameters():
            if param.grad is None:
                continue
            grad, absent = member_rows(param.grad, membership_of(param)), absent_rows(param.grad)
            if name not in self.sums:
                # Cloned, since a replayed step writes its gradients to the same memory again.
                self.sums[name], self.absent[name] = grad.clone(), absent
                continue
            before = self.absent[name]
            self.sums[name].add_(grad)
            self.absent[name] = None if absent is None or before is None else absent & before

    @torch.no_grad()
    def take(self, fused: FusedModule, due: Tensor) -> None:
        """Write the sums of members ``due``, bool ``[rows]``, to the parameters' ``grad``, and begin new sums."""
        everybody = bool(due.all())
        for name, param in fused.named_parameters():
            param.grad = None
            if name not in self.sums:
                continue
            absent = self.absent[name]
            if membership_of(param).standalone:
                param.grad = None if absent is not None and bool(absent) else self.sums[name][0]
                continue
            if everybody:
                param.grad = self.sums[name]
                mark_absent(param.grad, absent)
                continue
            others = ~due
            grad = self.sums[name].clone()
            grad[others.to(grad.device)] = 0
            mark_absent(grad, others if absent is None else others | absent)
            param.grad = grad
            self.sums[name][due.to(grad.device)] = 0
            self.absent[name] = due.clone() if absent is None else due | absent
        if everybody:
            self.sums, self.absent = {}, {}

    def of_rows(self, rows: Sequence[int]) -> GradientSums:
        """Return copies of the sums of members ``rows``."""
        part = GradientSums(len(rows))
        for name, sums in self.sums.items():
            absent = self.absent[name]
            part.sums[name] = sums[list(rows)]
            part.absent[name] = None if absent is None else absent[list(rows)]
        return part

    def put_rows(self, rows: Sequence[int], part: GradientSums) -> None:
        """Write the sums of the first members of ``part`` over those of members ``rows``."""
        count, places = len(rows), list(rows)
        for name in [*self.sums, *(name for name in part.sums if name not in self.sums)]:
            part_sums, part_absent = part.sums.get(name), part.absent.get(name)
            if name not in self.sums:
                assert part_sums is not None
                self.sums[name] = part_sums.new_zeros(self._members, *part_sums.shape[1:])
                self.absent[name] = torch.ones(self._members, dtype=torch.bool, device="cpu")
            if part_sums is None:
                self.sums[name][places] = 0
            else:
                write_rows(self.sums[name], places, part_sums[:count])
            absent = self.absent[name]
            absent = torch.zeros(self._members, dtype=torch.bool, device="cpu") if absent is None else absent.clone()
            absent[places] = True if part_sums is None else False if part_absent is None else part_absent[:count]
            self.absent[name] = absent

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the sums of members ``rows``."""
        for name, value in self.sums.items():
            value[list(rows)] = 0
            absent = self.absent[name]
            absent = torch.zeros(self._members, dtype=torch.bool, device="cpu") if absent is None else absent.clone()
            absent[list(rows)] = True
            self.absent[name] = absent
