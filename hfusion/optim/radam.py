"""RAdam for an array of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class RAdam(FusedOptimizer):
    """``torch.optim.RAdam`` with a value of each hyper-parameter per member (Liu and others, 2020).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``decoupled_weight_decay`` and ``maximize`` are set per param group.
    Raises ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True, name="beta1"),
        Hyper("betas", 1, high=1.0, below=True, name="beta2"),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("decoupled_weight_decay", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.RAdam

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-3,
        betas: Sequence[HyperValue] = (0.9, 0.999),
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 0.0,
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
        correction = 1 - h.beta2**n.step
        longest = 2 / (1 - h.beta2) - 1
        length = longest - 2 * n.step * h.beta2**n.step / correction
        rectified = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        step = h.lr / (1 - h.beta1**n.step)
        return {
            "plain": (length <= 5).to(h.lr),
            "step": torch.where(length > 5, step * (correction * rectified).sqrt(), step),
            "fresh1": 1 - h.beta1,
            "beta2": h.beta2,
            "fresh2": 1 - h.beta2,
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
        # Too few steps to know the variance: the mean alone.
        scale = torch.where(s.plain != 0, torch.ones_like(square), square.sqrt().add_(s.eps))
        param.addcdiv_(s.step * mean, scale, value=-1)
