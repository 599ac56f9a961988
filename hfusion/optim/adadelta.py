"""Adadelta for an array of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim.adadelta import adadelta

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import Hyper, HyperValue, Values
from hfusion.optim.rows import Row, Traits
from hfusion.optim.settings import Flags

# torch has no fused Adadelta; its dozen elementwise operators run on blocks that stay in the processor's
# cache.
_BLOCK = 1 << 17


class Adadelta(FusedOptimizer):
    """``torch.optim.Adadelta`` for every member of an array (Zeiler, 2012; torch.optim.Adadelta).

    ``params``: parameters of one fused module, or param groups of them. ``lr``, ``rho``, ``eps`` and
    ``weight_decay``: one value, or one per member. ``maximize`` holds for a whole group. Raises ValueError
    for parameters of no fused module and for values of the wrong number or range.
    """

    hypers: ClassVar[tuple[Hyper, ...]] = (
        Hyper("lr"),
        Hyper("rho", high=1.0),
        Hyper("eps"),
        Hyper("weight_decay"),
    )
    flags: ClassVar[tuple[str, ...]] = ("maximize",)
    torch_class: ClassVar[type[torch.optim.Optimizer]] = torch.optim.Adadelta
    traits: ClassVar[Traits] = Traits(tensor_ns=15000)

    def __init__(
        self,
        params: Any,
        lr: HyperValue = 1.0,
        rho: HyperValue = 0.9,
        eps: HyperValue = 1e-6,
        weight_decay: HyperValue = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults)

    @staticmethod
    def buffers(values: Values, flags: Flags) -> tuple[str, ...]:
        return ("square_avg", "acc_delta")

    @classmethod
    def native(cls, row: Row, values: Values, flags: Flags) -> None:
        lists = [row.params, row.grads, *row.buffers]
        if row.params[0].device.type != "cpu":
            _update(lists, values, flags, foreach=True)
            return
        for block in _blocks(lists):
            _update(block, values, flags, foreach=False)

    @classmethod
    def general(cls, row: Row, values: Values, flags: Flags) -> None:
        _update([row.params, row.grads, *row.buffers], values, flags, foreach=None)


def _blocks(lists: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    for tensors in zip(*lists, strict=True):
        if tensors[0].numel() <= _BLOCK:
            yield [[tensor] for tensor in tensors]
        else:
            yield from (
                [[part] for part in parts]
                for parts in zip(*(t.view(-1).split(_BLOCK) for t in tensors), strict=True)
            )


def _update(lists: list[list[Tensor]], values: Values, flags: Flags, foreach: bool | None) -> None:
    lr, rho, eps, weight_decay = values
    params, grads, square_avgs, acc_deltas = lists
    adadelta(
        params,
        grads,
        square_avgs,
        acc_deltas,
        [torch.zeros(()) for _ in params],
        foreach=foreach,
        has_complex=any(param.is_complex() for param in params),
        lr=lr,
        rho=rho,
        eps=eps,
        weight_decay=weight_decay,
        maximize=flags[0],
    )
