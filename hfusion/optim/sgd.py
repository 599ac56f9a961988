"""SGD for an array of models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import ascent, decayed, unless_zero
from hfusion.optim.hyper import Hyper, HyperValue


class SGD(FusedOptimizer):
    """``torch.optim.SGD`` with a value of each hyper-parameter per member.

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``momentum``, ``dampening`` and
    ``weight_decay``: one value, or one per member. ``nesterov`` and ``maximize`` are set per param group. Raises
    ValueError if parameters do not belong to a fused module, or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("momentum"),
        Hyper("dampening", low=-float("inf")),
        Hyper("weight_decay"),
    )
    options: ClassVar[tuple[str, ...]] = ("nesterov", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer] | None] = torch.optim.SGD
    counts_steps: ClassVar[bool] = False
    kernel: ClassVar[str | None] = "sgd"

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1e-3,
        momentum: HyperValue = 0.0,
        dampening: HyperValue = 0.0,
        weight_decay: HyperValue = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(params, locals())

    @staticmethod
    def check(h: Any, o: Any) -> None:
        if o.nesterov and (h.momentum <= 0 or h.dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and no dampening, and a member has momentum={h.momentum}, "
                f"dampening={h.dampening}"
            )

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("momentum_buffer",) if h.momentum != 0 else ()

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        momentum = unless_zero(h.momentum)
        return {
            "sign": torch.full_like(h.lr, -1 if o.maximize else 1),
            "lr": h.lr,
            "decay": unless_zero(h.weight_decay),
            "momentum": momentum,
            "fresh": 1 - h.dampening,
            "first": None if momentum is None else (n.step == 1).to(h.lr),
            "nesterov": torch.full_like(h.lr, o.nesterov),
        }

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        step = decayed(ascent(grad, o.maximize), param, s.decay)
        if s.momentum is not None:
            buffer = state["momentum_buffer"]
            mean = torch.where(s.first != 0, step, s.momentum * buffer + s.fresh * step)
            # Members without momentum keep what they have.
            buffer.copy_(torch.where(s.momentum != 0, mean, buffer))
            step = torch.where(s.momentum != 0, step + s.momentum * mean if o.nesterov else mean, step)
        param.addcmul_(step, s.lr, value=-1)
