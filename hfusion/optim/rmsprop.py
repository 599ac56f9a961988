"""RMSprop for an array of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class RMSprop(FusedOptimizer):
    """``torch.optim.RMSprop`` with a value of each hyper-parameter per member (Tieleman and Hinton, 2012).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``alpha``, ``eps``, ``weight_decay``
    and ``momentum``: one value, or one per member. ``centered`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("alpha"),
        Hyper("eps"),
        Hyper("weight_decay"),
        Hyper("momentum"),
    )
    options: ClassVar[tuple[str, ...]] = ("centered", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.RMSprop

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-2,
        alpha: HyperValue = 0.99,
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 0.0,
        momentum: HyperValue = 0.0,
        centered: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("square_avg", *["grad_avg"] * o.centered, *["momentum_buffer"] * (h.momentum > 0))

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return {
            "lr": h.lr,
            "alpha": h.alpha,
            "fresh": 1 - h.alpha,
            "eps": h.eps,
            "decay": unless_zero(h.weight_decay),
            "momentum": unless_zero(h.momentum),
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        square = state["square_avg"].mul_(s.alpha).addcmul_(s.fresh * grad, grad)
        if o.centered:
            mean = state["grad_avg"].lerp_(grad, s.fresh)
            square = square.addcmul(mean, mean, value=-1)
        step = grad / square.sqrt().add_(s.eps)
        if s.momentum is not None:
            buffer = state["momentum_buffer"]
            step = torch.where(s.momentum > 0, s.momentum * buffer + step, step)
            # Members without momentum keep what they have.
            buffer.copy_(torch.where(s.momentum > 0, step, buffer))
        param.addcmul_(step, s.lr, value=-1)
