"""Adadelta for an array of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class Adadelta(FusedOptimizer):
    """``torch.optim.Adadelta`` with a value of each hyper-parameter per member (Zeiler, 2012).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``rho``, ``eps`` and
    ``weight_decay``: one value, or one per member. ``maximize`` is set per param group. Raises ValueError if
    parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("rho", high=1.0),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("maximize",)
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adadelta
    kernel: ClassVar[str | None] = "adadelta"

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1.0,
        rho: HyperValue = 0.9,
        eps: HyperValue = 1e-6,
        weight_decay: HyperValue = 0.0,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return {
            "sign": torch.full_like(h.lr, -1 if o.maximize else 1),
            "lr": h.lr,
            "decay": unless_zero(h.weight_decay),
            "rho": h.rho,
            "fresh": 1 - h.rho,
            "eps": h.eps,
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        square, moved = state["square_avg"], state["acc_delta"]
        square.mul_(s.rho).addcmul_(s.fresh * grad, grad)
        delta = (moved + s.eps).sqrt_().div_((square + s.eps).sqrt_()).mul_(grad)
        moved.mul_(s.rho).addcmul_(s.fresh * delta, delta)
        param.addcmul_(delta, s.lr, value=-1)
