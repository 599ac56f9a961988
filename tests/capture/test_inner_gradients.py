"""Gradients that forward takes itself, where it runs member by member: with and without torch.no_grad around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, net, normal


def looped(x: Tensor) -> Tensor:
    return x if x.sum() < 1e9 else -x


def adapted(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        loss = self.fc(looped(x)).square().mean()
        (gradient,) = torch.autograd.grad(loss, self.fc.weight, create_graph=self.training)
    return F.linear(x, self.fc.weight - 0.1 * gradient)


def adapted_in_steps(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        values = list(self.fc.parameters())
        for _ in range(2):
            gradients = torch.autograd.grad(F.linear(looped(x), *values).square().mean(), values, create_graph=True)
            values = [value - 0.1 * gradient for value, gradient in zip(values, gradients, strict=True)]
    return F.linear(x, *values)


def adapted_copy(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        weight = self.fc.weight.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad((looped(x) @ weight).square().mean(), weight)
    return x @ (weight - 0.1 * gradient)


def forces(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(self.fc(looped(x)).square().sum(), x, create_graph=self.training)
    return gradient * 2


class Inside(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.inner, self.out = net(forward)(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(self.out(x)))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("forward", [adapted, adapted_in_steps, adapted_copy, forces])
def test_a_forward_that_takes_gradients(forward: Callable[..., Any], training: bool) -> None:
    models = [net(forward)().train(training) for _ in range(2)]
    x = normal(3, 4).requires_grad_()
    assert_alone(models, x)
    with torch.no_grad():
        assert_alone(models, x, grads=False)


@pytest.mark.parametrize("forward", [adapted, adapted_in_steps])
def test_a_part_that_takes_gradients(forward: Callable[..., Any]) -> None:
    models = [Inside(forward) for _ in range(2)]
    assert_alone(models, normal(3, 4))
    with torch.no_grad():
        assert_alone(models, normal(3, 4), grads=False)


def accumulating(self: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        self.fc(looped(x)).square().mean().backward()
    return self.fc(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("gradients", [True, False])
def test_backward_in_forward_is_refused(gradients: bool) -> None:
    fused = hf.fuse([net(accumulating)() for _ in range(2)])
    with torch.set_grad_enabled(gradients), pytest.raises(hf.FusionError, match=r"leaves a gradient in fc.weight.grad"):
        fused(normal(3, 4))
