"""Adam and AdamW for an array of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch.optim.adam import adam

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import Hyper, HyperValue, Values
from hfusion.optim.rows import Row
from hfusion.optim.settings import Flags


class Adam(FusedOptimizer):
    """``torch.optim.Adam`` for every member of an array (Kingma and Ba, 2015; torch.optim.Adam).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``eps``, ``weight_decay`` and
    each of ``betas``: one value, or one per member. ``amsgrad`` and ``maximize`` hold for a whole group.
    Raises ValueError for parameters of no fused module and for values of the wrong number or range.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("betas", 0, high=1.0, below=True),
        Hyper("betas", 1, high=1.0, below=True),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    flags: ClassVar[tuple[str, ...]] = ("amsgrad", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adam
    kernel: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

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
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @staticmethod
    def buffers(values: Values, flags: Flags) -> tuple[str, ...]:
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if flags[0] else ("exp_avg", "exp_avg_sq")

    @classmethod
    def fused(cls, row: Row, values: Values, flags: Flags) -> None:
        lr, beta1, beta2, eps, weight_decay = values
        amsgrad, maximize = flags
        kernel = torch._fused_adamw_ if cls.decoupled else torch._fused_adam_
        kernel(
            row.params,
            row.grads,
            row.buffers[0],
            row.buffers[1],
            row.buffers[2] if amsgrad else [],
            [row.step] * len(row.params),
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            amsgrad=amsgrad,
            maximize=maximize,
        )

    @classmethod
    def general(cls, row: Row, values: Values, flags: Flags) -> None:
        lr, beta1, beta2, eps, weight_decay = values
        amsgrad, maximize = flags
        adam(
            row.params,
            row.grads,
            row.buffers[0],
            row.buffers[1],
            row.buffers[2] if amsgrad else [],
            [torch.tensor(row.number - 1) for _ in row.params],
            has_complex=any(param.is_complex() for param in row.params),
            decoupled_weight_decay=cls.decoupled,
            amsgrad=amsgrad,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=weight_decay,
            eps=eps,
            maximize=maximize,
        )


class AdamW(Adam):
    """``torch.optim.AdamW`` for every member of an array (Loshchilov and Hutter, 2019; torch.optim.AdamW).

    As :class:`Adam`, with the weight decay decoupled from the gradient.
    """

    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.AdamW
    kernel: ClassVar[str] = "adamw"
    decoupled: ClassVar[bool] = True

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
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize)
