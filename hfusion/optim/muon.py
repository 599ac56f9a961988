"""Muon for an array of models."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfusion.optim.base import FusedOptimizer
from hfusion.optim.formula import add, for_all, per_member
from hfusion.optim.hyper import HyperValue


class Muon(FusedOptimizer):
    """``torch.optim.Muon`` with a value of each hyper-parameter per member (Jordan and others, 2024).

    ``params``: parameters of one fused module that are matrices in each member, or param groups of them. ``lr``,
    ``weight_decay``, ``momentum`` and ``eps``: one value, or one per member. ``nesterov``, ``ns_coefficients``,
    ``ns_steps`` and ``adjust_lr_fn`` are set per param group. Members' matrices are orthogonalised
    separately, in one batch. Raises ValueError if parameters do not belong to a fused module or are not matrices,
    or if values have the wrong number or range.

    ``master_weights``: float32 copies of parameters in half precision, see `FusedOptimizer`.
    """

    lr: HyperValue = per_member(default=1e-3)
    weight_decay: HyperValue = per_member(default=0.1)
    momentum: HyperValue = per_member(default=0.95)
    nesterov: bool = for_all(default=True)
    ns_coefficients: tuple[float, float, float] = for_all(default=(3.4445, -4.7750, 2.0315))
    eps: HyperValue = per_member(default=1e-7)
    ns_steps: int = for_all(default=5)
    adjust_lr_fn: str | None = for_all(default=None)

    torch_class = torch.optim.Muon
    counts_steps = False
    elementwise = False

    @staticmethod
    def check(h: Any, o: Any) -> None:
        if o.adjust_lr_fn not in (None, "original", "match_rms_adamw"):
            raise ValueError(f"adjust_lr_fn={o.adjust_lr_fn!r}: it must be None, 'original' or 'match_rms_adamw'")
        if len(o.ns_coefficients) != 3:
            raise ValueError(f"ns_coefficients={o.ns_coefficients!r}: give three numbers")
        if not 0 <= o.ns_steps < 100:
            raise ValueError(f"ns_steps={o.ns_steps}: it must be at least 0 and below 100")

    @staticmethod
    def check_param(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        if len(shape) != 2 or dtype.is_complex:
            raise ValueError(
                f"parameter {name!r} is {str(dtype).removeprefix('torch.')} {list(shape)} in each member: Muon trains "
                "matrices of real numbers; give the others to another optimizer, such as hf.optim.AdamW"
            )

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("momentum_buffer",)

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "shrink": 1 - h.lr * h.weight_decay, "fresh": 1 - h.momentum}

    @staticmethod
    def update(
        param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        mean = torch.lerp(state["momentum_buffer"], grad, s.fresh)
        step = torch.lerp(grad, mean, s.momentum) if o.nesterov else mean
        step = _orthogonalised(step, s.eps, o.ns_coefficients, o.ns_steps)
        rate = s.lr * _adjustment(param.shape[-2:], o.adjust_lr_fn)
        return add(param * s.shrink, step.to(param.dtype), -rate), {"momentum_buffer": mean}


def _orthogonalised(matrices: Tensor, eps: Tensor, coefficients: tuple[float, float, float], steps: int) -> Tensor:
    """The nearest orthogonal matrix of each of ``[B, m, n]``, by Newton-Schulz iterations in bfloat16 as in torch."""
    a, b, c = coefficients
    iterate = matrices.bfloat16()
    tall = iterate.shape[-2] > iterate.shape[-1]
    if tall:
        iterate = iterate.mT
    iterate = iterate / iterate.norm(dim=(-2, -1), keepdim=True).clamp(min=eps.to(iterate.dtype))
    for _ in range(steps):
        gram = iterate @ iterate.mT
        iterate = torch.baddbmm(iterate, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), iterate, beta=a)
    return iterate.mT if tall else iterate


def _adjustment(shape: torch.Size, how: str | None) -> float:
    """Return the factor of the learning rate that makes steps of matrices of all shapes equally large."""
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if how == "match_rms_adamw" else math.sqrt(max(1.0, rows / columns))
