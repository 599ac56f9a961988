"""SGD for an array of models."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch.optim.sgd import sgd

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import Hyper, HyperValue, Values
from hfusion.optim.rows import Row
from hfusion.optim.settings import Flags


class SGD(FusedOptimizer):
    """``torch.optim.SGD`` for every member of an array (torch.optim.SGD).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``momentum``, ``dampening``
    and ``weight_decay``: one value, or one per member. ``nesterov`` and ``maximize`` hold for a whole group.
    Raises ValueError for parameters of no fused module and for values of the wrong number or range.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("momentum"),
        Hyper("dampening", low=-float("inf")),
        Hyper("weight_decay"),
    )
    flags: ClassVar[tuple[str, ...]] = ("nesterov", "maximize")
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.SGD
    counts_steps: ClassVar[bool] = False
    kernel: ClassVar[str] = "sgd"

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
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    @staticmethod
    def check(values: Values, flags: Flags) -> None:
        _, momentum, dampening, _ = values
        if flags[0] and (momentum <= 0 or dampening != 0):
            raise ValueError(
                f"nesterov needs a momentum above 0 and no dampening, and a member has momentum={momentum}, "
                f"dampening={dampening}"
            )

    @staticmethod
    def buffers(values: Values, flags: Flags) -> tuple[str, ...]:
        return ("momentum_buffer",) if values[1] != 0 else ()

    @classmethod
    def fused(cls, row: Row, values: Values, flags: Flags) -> None:
        lr, momentum, dampening, weight_decay = values
        nesterov, maximize = flags
        torch._fused_sgd_(
            row.params,
            row.grads,
            row.buffers[0] if row.buffers else [],
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
            is_first_step=row.number == 1,
        )

    @classmethod
    def general(cls, row: Row, values: Values, flags: Flags) -> None:
        lr, momentum, dampening, weight_decay = values
        nesterov, maximize = flags
        begun = bool(row.buffers) and row.number > 1
        # Where there is None, torch puts the buffer that it begins.
        buffers: list[Any] = [*row.buffers[0]] if begun else [None] * len(row.params)
        sgd(
            row.params,
            row.grads,
            buffers,
            lr=lr,
            momentum=momentum,
            dampening=dampening,
            weight_decay=weight_decay,
            nesterov=nesterov,
            maximize=maximize,
        )
        if row.buffers and not begun:
            torch._foreach_copy_(row.buffers[0], buffers)
