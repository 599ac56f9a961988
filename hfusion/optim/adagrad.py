"""Adagrad for an array of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class Adagrad(FusedOptimizer):
    """``torch.optim.Adagrad`` with a value of each hyper-parameter per member (Duchi, Hazan and Singer, 2011).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``lr_decay``, ``weight_decay``,
    ``initial_accumulator_value`` and ``eps``: one value, or one per member. ``maximize`` is set per param group.
    Raises ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("lr_decay"),
        Hyper("weight_decay"),
        Hyper("initial_accumulator_value"),
        Hyper("eps"),
    )
    options: ClassVar[tuple[str, ...]] = ("maximize",)
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adagrad

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-2,
        lr_decay: HyperValue = 0.0,
        weight_decay: HyperValue = 0.0,
        initial_accumulator_value: HyperValue = 0.0,
        eps: HyperValue = 1e-10,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("sum",)

    @staticmethod
    def begin(h: Any, o: Any) -> Mapping[str, float]:
        return {"sum": h.initial_accumulator_value}

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return {
            "lr": h.lr / (1 + (n.step - 1) * h.lr_decay),
            "eps": h.eps,
            "decay": unless_zero(h.weight_decay),
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        total = state["sum"].addcmul_(grad, grad)
        param.addcdiv_(s.lr * grad, total.sqrt().add_(s.eps), value=-1)
