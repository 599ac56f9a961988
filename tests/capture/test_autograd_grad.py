"""Derivatives that forward takes by torch.autograd.grad: captured where they can be, equal to alone everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone

DOUBLE = torch.float64


def mlp(activation: Callable[[], nn.Module] = nn.Tanh, norm: bool = False) -> nn.Sequential:
    layers = [nn.Linear(2, 6), *([nn.LayerNorm(6)] if norm else []), activation(), nn.Linear(6, 6), activation()]
    return nn.Sequential(*layers, nn.Linear(6, 1))


class Derived(nn.Module):
    def __init__(self, forward: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        self.derived, self.net, self.scale = forward, mlp(**options), nn.Parameter(torch.rand(()))
        self.double()

    def forward(self, x: Tensor) -> Any:
        with torch.enable_grad():
            return self.derived(self, x.detach().requires_grad_())


def residual(self: Any, x: Tensor) -> Tensor:
    u = self.net(x)
    (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), x, create_graph=True)
    return first[:, 1] - self.scale * second[:, 0]


def several_inputs(self: Any, x: Tensor) -> Tensor:
    position, time = x[:, :1], x[:, 1:]
    u = self.net(torch.cat([position, time], 1))
    along, later = torch.autograd.grad(u, [position, time], torch.ones_like(u), create_graph=True)
    return later + u * along


def forces(self: Any, x: Tensor) -> Any:
    energy = self.net(x).square().sum()
    return energy, -torch.autograd.grad(energy, x, create_graph=self.training)[0]


def pair_forces(self: Any, x: Tensor) -> Tensor:
    distances = ((x[:, None] - x[None]).square().sum(-1) + 0.1).sqrt()
    energy = (self.scale / distances).sum() + self.net(x).sum()
    return -torch.autograd.grad(energy, x, create_graph=True)[0]


def penalty(self: Any, x: Tensor) -> Tensor:
    y = self.net(x)
    (gradient,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True, retain_graph=True)
    return y + self.scale * (gradient.norm(dim=1, keepdim=True) - 1).square()


def constant_gradient(self: Any, x: Tensor) -> Tensor:
    y = self.net(x)
    return y * torch.autograd.grad(y.sum(), x, retain_graph=True)[0]


def of_parameters(self: Any, x: Tensor) -> Tensor:
    weights = list(self.net.parameters())
    loss = self.net(x).square().mean()
    gradients = torch.autograd.grad(loss, weights, create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]) * self.scale


def unused(self: Any, x: Tensor) -> Tensor:
    other = x * 2
    x_grad, missing = torch.autograd.grad(self.net(x).sum(), [x, other], create_graph=True, allow_unused=True)
    assert missing is None
    return x_grad


def partly_without(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        weight = self.net(x).sigmoid()
    return torch.autograd.grad((weight * self.net(x) * x.detach()).sum(), x, create_graph=True)[0]


def both_used(self: Any, x: Tensor) -> Tensor:
    (first,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
    (again,) = torch.autograd.grad(self.net(first).sum(), first, create_graph=True)
    return first + again


CAPTURED: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: Derived(residual),
    "residual, silu": lambda: Derived(residual, activation=nn.SiLU),
    "residual, softplus": lambda: Derived(residual, activation=nn.Softplus),
    "residual, gelu": lambda: Derived(residual, activation=nn.GELU),
    "several inputs": lambda: Derived(several_inputs),
    "forces": lambda: Derived(forces),
    "forces, relu": lambda: Derived(forces, activation=nn.ReLU),
    "forces, layer norm": lambda: Derived(forces, norm=True),
    "pair forces": lambda: Derived(pair_forces),
    "penalty": lambda: Derived(penalty),
    "constant gradient": lambda: Derived(constant_gradient),
    "of parameters": lambda: Derived(of_parameters),
    "unused": lambda: Derived(unused),
    "partly without gradients": lambda: Derived(partly_without),
    "of a derivative": lambda: Derived(both_used),
}


def by_cdist(self: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad(torch.cdist(x, x + 1).sum() + self.net(x).sum(), x, create_graph=True)[0]


def drawn(self: Any, x: Tensor) -> Tensor:
    return torch.autograd.grad((F.dropout(x, 1.0) * self.net(x)).sum(), x, create_graph=True)[0]


def written(self: Any, x: Tensor) -> Tensor:
    y = self.net(x) * 1
    y[0].mul_(2)
    return torch.autograd.grad(y.sum(), x, create_graph=True)[0]


def by_edges(self: Any, x: Tensor) -> Tensor:
    from torch.autograd.graph import get_gradient_edge

    return torch.autograd.grad(self.net(x).sum(), [get_gradient_edge(x)], create_graph=True)[0]


BY_MEMBER: dict[str, tuple[Callable[..., Tensor], str]] = {
    "cdist": (by_cdist, "of which torch has no derivative"),
    "drawn": (drawn, "draws random numbers"),
    "written": (written, "writes in place"),
    "edges": (by_edges, "torch.autograd.grad for what is no tensor"),
}


def inputs(count: int = 5) -> Tensor:
    return torch.rand(count, 2, dtype=DOUBLE)


@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("case", CAPTURED)
def test_derivatives_are_captured(case: str, members: int) -> None:
    torch.manual_seed(1)
    models = [CAPTURED[case]() for _ in range(members)]
    fused = assert_alone(models, inputs())
    assert "loop over members" not in str(fused.report())


def test_other_batches_and_modes() -> None:
    torch.manual_seed(2)
    fused = hf.fuse(models := [Derived(forces) for _ in range(2)])
    for training in (True, False):
        fused.train(training)
        for model in models:
            model.train(training)
        for count in (3, 5, 1):
            x = inputs(count)
            with torch.no_grad():
                for row, model in enumerate(models):
                    for actual, expected in zip(fused(x), model(x), strict=True):
                        torch.testing.assert_close(actual[row], expected)


@pytest.mark.parametrize("case", BY_MEMBER)
def test_loops_over_members_report_their_reason(case: str) -> None:
    torch.manual_seed(1)
    forward, why = BY_MEMBER[case]
    fused = assert_alone([Derived(forward) for _ in range(2)], inputs(), grads=case != "cdist")
    assert why in str(fused.report())


def test_a_compiled_step_of_a_residual() -> None:
    torch.manual_seed(3)
    fused = hf.fuse(models := [Derived(residual) for _ in range(3)])
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    x, target = inputs(), torch.zeros(5, dtype=DOUBLE)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for _ in range(4):
        losses = step(x, target)
        for row, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[row], loss.detach())
    assert "one program" in str(step.report())


def test_torch_still_asks_the_engine_that_is_replaced() -> None:
    """Undocumented: what `torch.autograd.grad` calls, and with which arguments."""
    source = inspect.getsource(torch.autograd.grad)
    assert "_engine_run_backward(" in source
    assert "accumulate_grad=False" in source
