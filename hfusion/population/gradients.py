"""Gradients of a population between its program and its update: of scaled losses, and of several calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.core.calls import stacked
from hfusion.core.usage import absent_rows, mark_absent


def weighted(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A loss with the values of ``loss`` and gradients times a weight, for targets of `weighed`."""

    @wraps(loss, updated=())
    def found(output: Any, target: Any) -> Any:
        value = loss(output, target["target"])
        held = value.detach()
        # Nothing is added, whatever the weight; where there is no finite value, no finite one comes out.
        weight = target["weight"].to(torch.promote_types(value.dtype, torch.float32))
        return held + (value - held) * weight

    return found


def weighed(target: Any, weights: Tensor) -> dict[str, Any]:
    """A target with a weight of each member, float64 ``[B]``."""
    return {"target": target, "weight": stacked(weights)}


class GradientSums:
    """The sums of the gradients of several calls, which a compiled step would write over."""

    def __init__(self) -> None:
        self._found: dict[str, Tensor] = {}
        self._absent: dict[str, Tensor | None] = {}

    @torch.no_grad()
    def add(self, fused: FusedModule) -> None:
        """Those of one call."""
        for name, param in fused.named_parameters():
            if param.grad is None:
                continue
            grad, absent = param.grad, absent_rows(param.grad)
            if name not in self._found:
                # A step that is replayed has its gradients in the same memory again.
                self._found[name], self._absent[name] = grad.clone(), absent
                continue
            before = self._absent[name]
            self._found[name].add_(grad)
            self._absent[name] = None if absent is None or before is None else absent & before

    def give(self, fused: FusedModule) -> None:
        """Let the parameters have them; the next call is the first again."""
        for name, param in fused.named_parameters():
            param.grad = self._found.pop(name, None)
            if param.grad is not None:
                mark_absent(param.grad, self._absent.pop(name))
