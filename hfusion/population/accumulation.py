"""Updates of a group that take several calls, or may be undone: gradient sums, and tensors that forward writes to."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hfusion.array.array_editing import written_keys
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.core.calls import stacked
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import is_per_member, member_rows
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


class Accumulation:
    """The progress of the members' updates, in columns of the group's table.

    The columns are ``calls``, how many calls make an update; ``done``, how many of the present one were made;
    ``spoilt``, whether it has a loss that is not finite; and by the key of a tensor

    - ``sum/``: the sum of its gradients, kept outside of ``grad``, which a compiled step overwrites. A row without a
      gradient so far is zero, and marked in ``absent/``.
    - ``before/``: if forward may write to it, its value before the present update, to restore if that does not count.

    Attributes:
        initial_calls: the number of calls that all members began with, the default for joining members; None if they
            differed.
        holds: whether tensors that forward may write to are held in ``before/``.
    """

    def __init__(self, table: MemberTable, initial_calls: int | None, holds: bool = False) -> None:
        self._table, self.initial_calls, self.holds = table, initial_calls, holds
        self._seen: tuple[Tensor, int, bool] | None = None

    @property
    def calls(self) -> Tensor:
        return self._table["calls"]  # type: ignore[no-any-return]

    @property
    def done(self) -> Tensor:
        return self._table["done"]  # type: ignore[no-any-return]

    @property
    def sums_gradients(self) -> bool:
        """True if any member accumulates several calls."""
        calls, seen = self.calls, self._seen
        if seen is None or seen[0] is not calls or seen[1] != calls._version:
            seen = self._seen = calls, calls._version, bool((calls > 1).any())
        return seen[2]

    @property
    def underway(self) -> list[int]:
        """The rows of members that have made some of the calls of an update."""
        rows: list[int] = self.done.nonzero().reshape(-1).tolist()
        return rows

    @property
    def weights(self) -> Tensor:
        """Weight of a call in each member's update, float64 ``[rows]``."""
        return self.calls.double().reciprocal()

    def count(self, training: Tensor) -> Tensor:
        """Count a call of members ``training``. Return which complete an update or do not train, bool ``[rows]``."""
        self._table["done"] = self.done + training
        return (self.done == self.calls) | ~training

    def end(self, rows: Tensor) -> None:
        """Let the next call of members ``rows``, bool ``[rows]``, be the first of an update."""
        self._table["done"] = self.done.masked_fill(rows, 0)
        self._table["spoilt"] = self._table["spoilt"] & ~rows
        if not self.underway:
            self.discard()

    def discard(self) -> None:
        """Discard the gradients of unfinished updates, and the values of tensors that forward may have written to."""
        self._table.drop("sum", "absent", "before")
        self.holds = False

    def clear(self, rows: Sequence[int]) -> None:
        """Discard the unfinished updates of members ``rows``."""
        self._table.clear(rows, ("done", "spoilt", "sum", "absent"))
        self.end(torch.zeros_like(self.done, dtype=torch.bool))

    @torch.no_grad()
    def add(self, fused: FusedModule) -> None:
        """Add the gradients of one call."""
        table = self._table
        for name, param in fused.named_parameters():
            if param.grad is None:
                continue
            grad, absent = member_rows(param.grad, membership_of(param)), absent_rows(param.grad)
            absent = torch.zeros(table.rows, dtype=torch.bool, device="cpu") if absent is None else absent.cpu()
            if f"sum/{name}" in table:
                table[f"sum/{name}"].add_(grad)
                table[f"absent/{name}"] = table[f"absent/{name}"] & absent
            else:
                # Cloned, since a replayed step writes its gradients to the same memory again.
                table[f"sum/{name}"], table[f"absent/{name}"] = grad.clone(), absent

    @torch.no_grad()
    def hand_over(self, fused: FusedModule, due: Tensor) -> None:
        """Write the sums of members ``due``, bool ``[rows]``, to the parameters' ``grad``, and begin new sums."""
        everybody, table = bool(due.all()), self._table
        for name, param in fused.named_parameters():
            param.grad = None
            if f"sum/{name}" not in table:
                continue
            sums, absent = table[f"sum/{name}"], table[f"absent/{name}"]
            if membership_of(param).standalone:
                param.grad = None if bool(absent) else sums[0]
                continue
            param.grad = sums if everybody else sums.clone()
            if not everybody:
                param.grad[~due.to(sums.device)] = 0
            mark_absent(param.grad, absent | ~due)
        if everybody:
            table.drop("sum", "absent")
        else:
            table.clear(due.nonzero().reshape(-1).tolist(), ("sum", "absent"))

    def hold_buffers(self, fused: FusedModule) -> None:
        """Save the tensors that forward may write to, for members that begin an update."""
        if self.holds and self.sums_gradients and not bool((begins := self.done == 0).all()):
            self.renew(fused, begins)
            return
        self._table.drop("before")
        self.holds = True
        self.hold(fused, [*(name for name, _ in fused.named_buffers()), *written_keys(fused)])
        array, accumulation = weakref.ref(fused), weakref.ref(self)

        def on_program(program: Any) -> None:
            held, module = accumulation(), array()
            if held is not None and module is not None and held.holds:
                held.hold(module, program.written)

        # Called with programs that this step creates, before they run.
        fused._on_program = on_program

    def hold(self, fused: FusedModule, names: Iterable[str]) -> None:
        """Save the present values of these tensors that are not held yet."""
        if names := [name for name in names if f"before/{name}" not in self._table]:
            for name, rows in _written_rows(fused, names):
                self._table[f"before/{name}"] = rows.clone()

    def renew(self, fused: FusedModule, members: Tensor) -> None:
        """Save the present values of ``members``, bool ``[rows]``, if values are held."""
        for name, rows in _written_rows(fused, list(self._table.of("before"))):
            places = members.nonzero().reshape(-1).to(rows.device)
            self._table[f"before/{name}"][places] = rows[places]

    @torch.no_grad()
    def put_back(self, fused: FusedModule, members: Tensor) -> None:
        """Restore the tensors that forward may have written to, of ``members``, bool ``[rows]``."""
        for name, rows in _written_rows(fused, list(self._table.of("before"))):
            places = members.nonzero().reshape(-1).to(rows.device)
            rows[places] = self._table[f"before/{name}"][places]


def _written_rows(fused: FusedModule, names: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return tensors by key as ``[rows, ...]``, without those that all members share; writing there writes to them."""
    found = ((name, tensor) for name, tensor in tensors(fused) if name in names) if names else ()
    return [(n, member_rows(t.detach(), membership_of(t))) for n, t in found if is_per_member(t)]


def check_calls(calls: int | Sequence[int] | Tensor | None, members: int) -> Tensor:
    """Return how many calls make an update, int64 ``[members]``. Raises ValueError for invalid or too few ``calls``."""
    values = calls.tolist() if isinstance(calls, Tensor) else calls
    values = [values] * members if isinstance(values, int) else list(values or ())
    if not all(isinstance(count, int) and not isinstance(count, bool) and count >= 1 for count in values):
        raise ValueError(f"accumulate={calls}: at least one call of step makes an update, and a whole number of them")
    if len(values) != members:
        raise ValueError(f"accumulate has {len(values)} values for {members} members: give one, or one for each")
    return torch.tensor(values, dtype=torch.int64, device="cpu")
