"""Adamax for an array of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class Adamax(FusedOptimizer):
    """``torch.optim.Adamax`` with a value of each hyper-parameter per member (Kingma and Ba, 2015).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``maximize`` is set per param group. Raises ValueError if parameters
    do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True, name="beta1"),
        Hyper("betas", 1, high=1.0, below=True, name="beta2"),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("maximize",)
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adamax

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 2e-3,
        betas: Sequence[HyperValue] = (0.9, 0.999),
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 0.0,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("exp_avg", "exp_inf")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return {
            "lr": h.lr / (1 - h.beta1**n.step),
            "fresh": 1 - h.beta1,
            "beta2": h.beta2,
            "eps": h.eps,
            "decay": unless_zero(h.weight_decay),
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        mean, largest = state["exp_avg"].lerp_(grad, s.fresh), state["exp_inf"]
        torch.maximum(largest.mul_(s.beta2), grad.abs().add_(s.eps), out=largest)
        param.addcdiv_(s.lr * mean, largest, value=-1)
