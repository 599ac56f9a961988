"""Adadelta for an array of models."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.optim.adadelta import adadelta

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.hyper import Hyper, HyperValue, Values
from hfusion.optim.rows import Row
from hfusion.optim.settings import Flags

# torch has no fused Adadelta, but a dozen elementwise operators. They run on blocks that stay in the
# processor's cache; tensors that cost less to copy than these calls are copied next to each other.
_BLOCK = 1 << 17
_SMALL = 1 << 11


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
    kernel: ClassVar[str] = "adadelta"

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
    def fused(cls, row: Row, values: Values, flags: Flags) -> None:
        lists = [row.params, row.grads, *row.buffers]
        if row.params[0].device.type != "cpu":
            _update(lists, values, flags, foreach=True)
            return
        small, large = _by_size(lists)
        packs = [_flatten_dense_tensors(tensors) for tensors in small] if small[0] else []
        for index, pack in enumerate(packs):
            large[index].append(pack)
        blocks = [[part for tensor in tensors for part in _parts(tensor)] for tensors in large]
        _update(blocks, values, flags, foreach=False)
        for pack, tensors in zip(packs, small, strict=False):
            if tensors is not small[1]:
                torch._foreach_copy_(tensors, _unflatten_dense_tensors(pack, tensors))

    @classmethod
    def general(cls, row: Row, values: Values, flags: Flags) -> None:
        _update([row.params, row.grads, *row.buffers], values, flags, foreach=None)


def _by_size(lists: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    small = [param.numel() <= _SMALL for param in lists[0]]
    large = [not is_small for is_small in small]
    return [list(compress(ts, small)) for ts in lists], [list(compress(ts, large)) for ts in lists]


def _parts(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor] if tensor.numel() <= _BLOCK else tensor.view(-1).split(_BLOCK)


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
