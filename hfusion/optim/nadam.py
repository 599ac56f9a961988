"""NAdam for an array of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class NAdam(FusedOptimizer):
    """``torch.optim.NAdam`` with a value of each hyper-parameter per member (Dozat, 2016).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay``,
    ``momentum_decay`` and each of ``betas``: one value, or one per member. ``decoupled_weight_decay`` and
    ``maximize`` are set per param group. Raises ValueError if parameters do not belong to a fused module, or if
    values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True, name="beta1"),
        Hyper("betas", 1, high=1.0, below=True, name="beta2"),
        Hyper("eps"),
        Hyper("weight_decay"),
        Hyper("momentum_decay", low=-float("inf")),
    )
    options: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay", "maximize")
    numbers: ClassVar[Mapping[str, float]] = {"step": 0.0, "mu_product": 1.0}
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.NAdam

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 2e-3,
        betas: Sequence[HyperValue] = (0.9, 0.999),
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 0.0,
        momentum_decay: HyperValue = 4e-3,
        decoupled_weight_decay: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        mu, mu_next = (h.beta1 * (1 - 0.5 * 0.96 ** (step * h.momentum_decay)) for step in (n.step, n.step + 1))
        # torch rounds the product to float32, and so the factor, too.
        n.mu_product.mul_(mu.to(n.mu_product))
        product = n.mu_product.double()
        return {
            "grad": h.lr * (1 - mu) / (1 - product),
            "mean": h.lr * mu_next / (1 - product * mu_next),
            "fresh1": 1 - h.beta1,
            "beta2": h.beta2,
            "fresh2": 1 - h.beta2,
            "correction": 1 - h.beta2**n.step,
            "eps": h.eps,
            "decay": None if o.decoupled_weight_decay else unless_zero(h.weight_decay),
            "shrink": 1 - h.lr * h.weight_decay if o.decoupled_weight_decay else None,
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        if s.shrink is not None:
            param.mul_(s.shrink)
        mean = state["exp_avg"].lerp_(grad, s.fresh1)
        square = state["exp_avg_sq"].mul_(s.beta2).addcmul_(s.fresh2 * grad, grad)
        scale = square.div(s.correction).sqrt_().add_(s.eps)
        param.addcdiv_(s.grad * grad, scale, value=-1).addcdiv_(s.mean * mean, scale, value=-1)
