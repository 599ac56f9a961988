"""What keeps a member that goes bad from being trained on, and what bounds a step: between gradients and update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.core.errors import FusionError
from hfusion.core.membership import membership
from hfusion.optim import clip_grad_norm_, clip_grad_value_
from hfusion.optim.hyper import HyperValue, member_vector, plain
from hfusion.optim.scaler import not_finite

OnNonfinite = Literal["freeze", "raise", "ignore"]


@dataclass(frozen=True)
class Limits:
    """The largest norm and magnitude of the members' gradients, ``[rows]`` each; None where nothing is clipped."""

    norm: Tensor | None
    value: Tensor | None

    @staticmethod
    def of(norm: HyperValue | None, value: HyperValue | None, rows: int) -> Limits:
        """Raises ValueError for a wrong number of values, or one below 0."""
        return Limits(_limit("clip_norm", norm, rows), _limit("clip_value", value, rows))

    def rearranged(self, sources: Sequence[int]) -> Limits:
        rows = list(sources)
        return Limits(*(None if own is None else own[rows] for own in (self.norm, self.value)))

    def with_rows(self, rows: Sequence[int], norm: HyperValue | None, value: HyperValue | None) -> Limits:
        """With the limits of members that start; without a value, none. Raises ValueError as `of`."""
        made = self
        for name, given in (("norm", norm), ("value", value)):
            own: Tensor | None = getattr(self, name)
            if own is None:
                if given is not None:
                    raise ValueError(
                        f"clip_{name}={given}: this population has no clip_{name}; give it one when it is made"
                    )
                continue
            found = _limit(f"clip_{name}", float("inf") if given is None else given, len(rows))
            assert found is not None
            own = own.clone()
            own[list(rows)] = found
            made = replace(made, **{name: own})
        return made

    def clip(self, fused: FusedModule) -> None:
        """First by value, then by norm. Parameters that all members share are left as they are."""
        params = [p for p in fused.parameters() if p.grad is not None and stacked(p)]
        if not params:
            return
        if self.value is not None:
            clip_grad_value_(params, self.value)
        if self.norm is not None:
            clip_grad_norm_(params, self.norm)


def _limit(name: str, value: HyperValue | None, rows: int) -> Tensor | None:
    if value is None:
        return None
    found: Tensor = plain(member_vector(name, value, rows))
    if not bool((found >= 0).all()):
        raise ValueError(f"{name}={found.tolist()}: every limit must be at least 0")
    return found


def stacked(tensor: Tensor) -> bool:
    """Whether every member has a row of it."""
    found = membership(tensor)
    return found is not None and found.stacked


def bad_rows(fused: FusedModule, losses: Tensor) -> Tensor:
    """The members whose loss or gradients are not all finite: bool ``[rows]``, on the CPU."""
    bad = ~losses.detach().isfinite().cpu()
    for param in fused.parameters():
        if param.grad is not None and stacked(param):
            bad = bad | not_finite(param.grad, len(fused))
    return bad


def check_common(fused: FusedModule) -> None:
    """Raise a FusionError where a gradient that all members share is not finite."""
    for name, param in fused.named_parameters():
        if param.grad is not None and not stacked(param) and not bool(param.grad.isfinite().all()):
            raise FusionError(
                f"the gradient of {name}, which all members train together, is not finite: who goes bad spoils it "
                "for all, so that none can go on as if it were healthy; freeze it, or give each member its own"
            )


class Buffers:
    """The buffers of an array as they were, to be put back where a step does not count."""

    def __init__(self, fused: FusedModule) -> None:
        self._pairs = [(b, b.detach().clone()) for b in fused.buffers() if stacked(b)]

    @torch.no_grad()
    def put_back(self, rows: Tensor) -> None:
        """Those of members ``rows``, bool ``[rows]``."""
        for buffer, before in self._pairs:
            places = rows.nonzero().reshape(-1).to(buffer.device)
            buffer[places] = before[places]
