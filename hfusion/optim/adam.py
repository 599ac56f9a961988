"""Adam and AdamW for an array of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class Adam(FusedOptimizer):
    """``torch.optim.Adam`` with a value of each hyper-parameter per member (Kingma and Ba, 2015).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and each
    of ``betas``: one value, or one per member. ``amsgrad`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True, name="beta1"),
        Hyper("betas", 1, high=1.0, below=True, name="beta2"),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("amsgrad", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.Adam
    kernel: ClassVar[str | None] = "adam"

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-3,
        betas: Sequence[HyperValue] = (0.9, 0.999),
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * o.amsgrad)

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return _moments(h, o, n.step, unless_zero(h.weight_decay), None)

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = decayed(ascent(grad, o.maximize), param, s.decay)
        mean, square = state["exp_avg"], state["exp_avg_sq"]
        mean.lerp_(grad, s.weight)
        square.mul_(s.beta2).addcmul_(s.fresh * grad, grad)
        if o.amsgrad:
            highest = state["max_exp_avg_sq"]
            square = torch.maximum(highest, square, out=highest)
        if s.shrink is not None:
            param.mul_(s.shrink)
        param.addcdiv_(s.step * mean, square.sqrt().mul_(s.scale).add_(s.eps), value=-1)


def _moments(h: Any, o: Any, step: Tensor, decay: Tensor | None, shrink: Tensor | None) -> Mapping[str, Tensor | None]:
    near = 1 - h.beta1 < 0.5
    return {
        "sign": torch.full_like(h.lr, -1 if o.maximize else 1),
        "decay": decay,
        "shrink": shrink,
        "near": near.to(h.lr),
        "toward": torch.where(near, 1 - h.beta1, -h.beta1),
        "beta2": h.beta2,
        "fresh": 1 - h.beta2,
        "scale": (1 - h.beta2**step).rsqrt(),
        "eps": h.eps,
        "step": h.lr / (1 - h.beta1**step),
        # The weight of torch.lerp; kernels get ``near`` and ``toward`` instead.
        "weight": 1 - h.beta1,
    }


class AdamW(Adam):
    """``torch.optim.AdamW`` with a value of each hyper-parameter per member (Loshchilov and Hutter, 2019).

    Like :class:`Adam`, with decoupled weight decay.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.AdamW
    kernel: ClassVar[str | None] = "adamw"

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-3,
        betas: Sequence[HyperValue] = (0.9, 0.999),
        eps: HyperValue = 1e-8,
        weight_decay: HyperValue = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, master_weights=master_weights
        )

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return _moments(h, o, n.step, None, 1 - h.lr * h.weight_decay)
