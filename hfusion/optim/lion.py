"""Lion for an array of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent
from hfusion.optim.hyper import Hyper, HyperValue


class Lion(FusedOptimizer):
    """Lion with a value of each hyper-parameter per member (Chen and others, 2023).

    Source: "Symbolic Discovery of Optimization Algorithms", algorithm 2.

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``weight_decay``, which is
    decoupled, and each of ``betas``: one value, or one per member. ``maximize`` is set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True, name="beta1"),
        Hyper("betas", 1, high=1.0, below=True, name="beta2"),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("maximize",)

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-4,
        betas: Sequence[HyperValue] = (0.9, 0.99),
        weight_decay: HyperValue = 0.0,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("exp_avg",)

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        return {"lr": h.lr, "shrink": 1 - h.lr * h.weight_decay, "near": 1 - h.beta1, "fresh": 1 - h.beta2}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        grad = ascent(grad, o.maximize)
        direction = torch.lerp(state["exp_avg"], grad, s.near).sign_()
        param.mul_(s.shrink).addcmul_(direction, s.lr, value=-1)
        state["exp_avg"].lerp_(grad, s.fresh)
