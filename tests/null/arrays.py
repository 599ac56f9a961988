"""Parameters of an array on the null CUDA device."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import Parameter

import hfusion as hf
from hfusion.core.membership import Membership, mark

MEMBERS, TENSORS = 16, 60
"""Of the optimizers that are counted."""


def parameters(dtype: torch.dtype = torch.float32) -> list[Parameter]:
    """Return ``TENSORS`` stacks of matrices, each with a gradient."""
    stacks = [
        mark(Parameter(torch.zeros(MEMBERS, 8, 6, dtype=dtype, device="cuda")), Membership(f"p{index}", MEMBERS, True))
        for index in range(TENSORS)
    ]
    for stack in stacks:
        stack.grad = torch.zeros_like(stack)
    return stacks


def move(tensors: list[Parameter]) -> None:
    """Let parameters lie elsewhere."""
    for tensor in tensors:
        tensor.data = tensor.data.clone()


def rates() -> list[float]:
    """Return a learning rate for each member."""
    return [0.1 / (1 + member) for member in range(MEMBERS)]


def optimizer(name: str, stacks: list[Parameter], master_weights: bool = False) -> hf.optim.FusedOptimizer:
    """Return the optimizer of this name, with a learning rate per member."""
    kind: Callable[..., hf.optim.FusedOptimizer] = getattr(hf.optim, name)
    return kind(stacks, lr=rates(), master_weights=master_weights)


def losses_of(output: Tensor, target: Tensor) -> Tensor:
    """Return the loss of one member."""
    return torch.nn.functional.cross_entropy(output, target)
