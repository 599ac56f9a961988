"""Guards between gradients and update: freezing of members that are not finite, and clipping."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from hfusion.array.array_editing import written_keys
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError
from hfusion.core.membership import is_per_member, member_rows, membership
from hfusion.core.row_indices import write_rows
from hfusion.optim import clip_grad_norm_, clip_grad_value_
from hfusion.optim.hyper import HyperValue, member_vector, plain
from hfusion.optim.native_kernels import FiniteCheck
from hfusion.optim.scaler import overflowing

OnNonfinite = Literal["freeze", "raise", "ignore"]

# Number of elements up to which one thread checks as fast as several.
_ONE_THREAD = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Bounds of the members' gradients: ``"clip_norm"`` of their norm, ``"clip_value"`` of their magnitude.

    Attributes:
        values: by name, float64 ``[rows]``; a name is missing where nothing is clipped by it.
        initial: the bounds that all members began with, the defaults for joining members; None if they differed.
    """

    values: dict[str, Tensor]
    initial: dict[str, float | None]

    @staticmethod
    def of(rows: int, **given: HyperValue | None) -> Limits:
        """Create limits. Raises ValueError for a wrong number of values, or a value below 0."""
        values = {name: _checked(name, value, rows) for name, value in given.items() if value is not None}
        first = {name: float(bounds[0]) for name, bounds in values.items()}
        return Limits(
            values, {name: first[name] if bool((v == first[name]).all()) else None for name, v in values.items()}
        )

    def rearranged(self, sources: Sequence[int]) -> Limits:
        """Return limits in which member b has those of the former member ``sources[b]``."""
        rows = list(sources)
        return replace(self, values={name: values[rows] for name, values in self.values.items()})

    def with_rows(self, rows: Sequence[int], **given: HyperValue | None) -> Limits:
        """Return limits with those of members that start in ``rows``; None stands for what all members began with.

        Raises ValueError for None if members began with different limits, or for a limit that the population lacks.
        """
        changed = dict(self.values)
        for name, value in given.items():
            if name not in changed:
                if value is not None:
                    raise ValueError(f"{name}={value}: this population has no {name}; give it one when it is made")
                continue
            if value is None and self.initial[name] is None:
                raise ValueError(
                    f"{name} differs between the members: say what it is for those that join, {name}=...; "
                    'float("inf") clips nothing'
                )
            changed[name] = changed[name].clone()
            changed[name][list(rows)] = _checked(name, self.initial[name] if value is None else value, len(rows))
        return replace(self, values=changed)

    def clip(self, fused: FusedModule) -> None:
        """Clip gradients, first by value, then by norm; those of parameters that all members share are not clipped."""
        if not self.values:
            return
        params = [p for p in fused.parameters() if p.grad is not None and is_per_member(p)]
        if not params:
            return
        if "clip_value" in self.values:
            clip_grad_value_(params, self.values["clip_value"])
        if "clip_norm" in self.values:
            clip_grad_norm_(params, self.values["clip_norm"])


def _checked(name: str, value: HyperValue | None, rows: int) -> Tensor:
    values: Tensor = plain(member_vector(name, value, rows))
    if not bool((values >= 0).all()):
        raise ValueError(f"{name}={values.tolist()}: every limit must be at least 0")
    return values


def bad_rows(fused: FusedModule, losses: Tensor, check: FiniteCheck) -> Tensor:
    """Return the members whose loss or gradients are not all finite: bool ``[rows]``, on the CPU."""
    grads = [param.grad for param in fused.parameters() if param.grad is not None and is_per_member(param)]
    if all_finite(grads, losses.detach(), check):
        return torch.zeros(len(fused), dtype=torch.bool, device="cpu")
    bad: Tensor = ~losses.detach().isfinite().cpu()
    return bad | overflowing([grad.reshape(len(fused), -1) for grad in grads], len(fused))


def gradients_finite(fused: FusedModule, losses: Tensor, check: FiniteCheck) -> bool:
    """Return whether losses and all gradients are finite, as `all_finite`."""
    return all_finite([grad for param in fused.parameters() if (grad := param.grad) is not None], losses, check)


def all_finite(grads: Sequence[Tensor], losses: Tensor, check: FiniteCheck) -> bool:
    """Return whether all values are finite. Also False if one call cannot tell, for tensors of different dtypes,
    devices or layouts, or if squares overflow.
    """
    checked_tensors = [*grads, losses]
    # Several threads check more elements than this faster.
    if sum(map(Tensor.numel, grads)) < _ONE_THREAD and (answer := check(checked_tensors)) is not None:
        return answer
    if len({(tensor.dtype, tensor.device, tensor.layout) for tensor in checked_tensors}) > 1:
        return False
    if losses.layout is not torch.strided or not all(tensor.numel() for tensor in checked_tensors):
        return False
    # Computing the largest magnitude would take five times as long.
    return math.isfinite(float(torch.stack(torch._foreach_norm(checked_tensors, 2)).sum()))


def check_common(fused: FusedModule) -> None:
    """Raise a FusionError where a gradient that all members share is not finite."""
    for name, param in fused.named_parameters():
        if param.grad is not None and not is_per_member(param) and not bool(param.grad.isfinite().all()):
            raise FusionError(
                f"the gradient of {name}, which all members train together, is not finite: one member that diverges "
                "spoils it for all, so that none can go on as if healthy; freeze it, or give each member its own"
            )


class Buffers:
    """Copies of an array's buffers and other tensors that forward writes to, to restore where a step does not count."""

    def __init__(self, fused: FusedModule) -> None:
        self._fused = fused
        self._snapshots: dict[str, tuple[Tensor, Tensor]] = {}
        self._keep(fused.named_buffers())
        self._keep_written(written_keys(fused))
        held = weakref.ref(self)

        def on_program(compiled: Any) -> None:
            if (buffers := held()) is not None:
                buffers._keep_written(compiled.written)

        # Called with programs that this step creates, before they run. The array holds only a weak reference.
        fused._on_program = on_program

    def __getstate__(self) -> tuple[FusedModule, dict[str, Tensor]]:
        return self._fused, self.saved_values

    def __setstate__(self, state: tuple[FusedModule, dict[str, Tensor]]) -> None:
        # A pickle does not keep that the rows are views of the array's tensors.
        fused, values = state
        Buffers.__init__(self, fused)
        named = dict(tensors(fused))
        self._keep((name, named[name]) for name in values.keys() - self._snapshots.keys())
        for name, value in values.items():
            self._snapshots[name][1].copy_(value)

    def _keep_written(self, keys: frozenset[str]) -> None:
        if further := keys - self._snapshots.keys():
            self._keep((name, tensor) for name, tensor in tensors(self._fused) if name in further)

    def _keep(self, named: Iterable[tuple[str, Tensor]]) -> None:
        # ``rows`` is a view: writing to it writes to the tensor itself.
        for name, tensor in named:
            if (mark := membership(tensor)) is not None and mark.is_own:
                rows = member_rows(tensor.detach(), mark)
                self._snapshots[name] = rows, rows.clone()

    @property
    def saved_values(self) -> dict[str, Tensor]:
        """The saved values, by key."""
        return {name: saved for name, (_, saved) in self._snapshots.items()}

    def renew(self, rows: Tensor) -> None:
        """Save the present values of members ``rows``, bool ``[rows]``."""
        for tensor, before in self._snapshots.values():
            places = rows.nonzero().reshape(-1).to(tensor.device)
            before[places] = tensor[places]

    def of_rows(self, rows: Sequence[int], part: FusedModule) -> Buffers:
        """Return the saved values of members ``rows``, for an array ``part`` of them."""
        buffers = Buffers(part)
        for name, (_, before) in self._snapshots.items():
            if name in buffers._snapshots:
                held = buffers._snapshots[name][1]
                held.copy_(before[list(rows)])
        return buffers

    def put_rows(self, rows: Sequence[int], part: Buffers) -> None:
        """Replace the saved values of members ``rows`` by those of the first members of ``part``."""
        named = dict(tensors(self._fused))
        self._keep((name, named[name]) for name in part._snapshots.keys() - self._snapshots.keys())
        for name, (_, before) in part._snapshots.items():
            write_rows(self._snapshots[name][1], rows, before[: len(rows)])

    @torch.no_grad()
    def put_back(self, rows: Tensor) -> None:
        """Restore the buffers of members ``rows``, bool ``[rows]``."""
        for tensor, before in self._snapshots.values():
            places = rows.nonzero().reshape(-1).to(tensor.device)
            tensor[places] = before[places]
