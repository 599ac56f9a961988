"""Decompositions of operators for which a compiler of whole graphs then generates better code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

aten = torch.ops.aten

# In lower precision the values between the operators would be rounded.
_EXACT = (torch.float32, torch.float64)


def bias_apart(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Decompose `torch.baddbmm` and `torch.addmm`, so that the sum fuses with the operators after it.

    A single call would first copy the bias into the result.
    """
    if beta != 1 or alpha != 1 or bias.dtype not in _EXACT:
        return NotImplemented
    if a.dim() == 3:
        return bias + torch.bmm(a, b)
    # In three dims, where inductor does not find the addmm again.
    return (bias + torch.mm(a, b).unsqueeze(0)).squeeze(0)


def batch_norm_in_two_passes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm in training: first the mean, then the variance about it, as plain sums.

    Inductor writes Welford's recurrence instead, which is no more accurate and several times the arithmetic. Inputs of
    lower precision are widened, as in torch's kernel, where statistics and parameters are not of that precision, too.
    """
    dtype = x.dtype
    if not training or any(t is not None and t.dtype not in _EXACT for t in (weight, bias, running_mean, running_var)):
        return NotImplemented
    x = x.to(running_mean.dtype)
    dims, shape = [0, *range(2, x.dim())], [1, -1, *(1,) * (x.dim() - 2)]
    count = x.numel() // x.shape[1]
    mean = _realize(x.sum(dims) / count)
    centred = x - mean.view(shape)
    variance = _realize((centred * centred).sum(dims) / count)
    inverse = _realize(torch.rsqrt(variance + eps))
    y = centred * _realize(inverse if weight is None else inverse * weight).view(shape)
    y = y if bias is None else y + bias.view(shape)
    running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
    running_var.copy_(running_var * (1 - momentum) + variance * (count / (count - 1) * momentum))
    return y.to(dtype), mean, inverse


def _realize(vector: Tensor) -> Tensor:
    """Store ``vector [C]`` in memory: inductor would recompute it for every element it is combined with."""
    return vector.as_strided(vector.shape, (1,))


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = {
    aten.addmm.default: bias_apart,
    aten.baddbmm.default: bias_apart,
    aten._native_batch_norm_legit.default: batch_norm_in_two_passes,
}
