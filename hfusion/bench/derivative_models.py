"""Models whose forward takes derivatives, each in two forms: by `torch.autograd.grad`, and by torch.func."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, vmap


def _mlp(features: int, hidden: int) -> nn.Sequential:
    layers = [nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)]
    return nn.Sequential(*layers)


class Pinn(nn.Module):
    """Points (x, t) [N, 2] -> residual [N, 1] of Burgers' equation, u_t + u u_x - 0.01 u_xx.

    After Raissi et al., "Physics-informed neural networks" (2019).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = _mlp(2, hidden)

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        u = self.net(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]  # type: ignore[no-any-return]


class FunctionalPinn(Pinn):
    """The same, a point at a time under vmap."""

    def forward(self, points: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.net(point).squeeze(-1)  # type: ignore[no-any-return]

        def slope(point: Tensor) -> tuple[Tensor, Tensor]:
            first, value = grad_and_value(u)(point)
            return first[0], first[1] + value * first[0]

        def residual(point: Tensor) -> Tensor:
            second, rest = grad(slope, has_aux=True)(point)
            return rest - 0.01 * second[0]  # type: ignore[no-any-return]

        return vmap(residual)(points)[:, None]


class Forces(nn.Module):
    """Positions [N, atoms, 3] -> forces [N, atoms, 3]: minus the gradient of an energy of all pairs' distances."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = _mlp(1, hidden)

    def energy(self, positions: Tensor) -> Tensor:
        """Positions [..., atoms, 3] -> energies [...]."""
        between = positions.unsqueeze(-2) - positions.unsqueeze(-3)
        # An atom's distance to itself has a gradient, too.
        squares = between.square().sum(-1, keepdim=True) + 1e-2
        return self.net(squares.rsqrt()).sum((-1, -2, -3))  # type: ignore[no-any-return]

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)
        return -gradient


class FunctionalForces(Forces):
    """The same by torch.func."""

    def forward(self, positions: Tensor) -> Tensor:
        return -grad(lambda moved: self.energy(moved).sum())(positions)  # type: ignore[no-any-return]


class Curvature(nn.Module):
    """Inputs [N, features] -> Hessians [N, features, features] of a scalar function."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.features, self.net = features, _mlp(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        rows = [torch.autograd.grad(gradient[:, row].sum(), x, create_graph=True)[0] for row in range(self.features)]
        return torch.stack(rows, 1)


class FunctionalCurvature(Curvature):
    """The same by `torch.func.hessian`."""

    def forward(self, x: Tensor) -> Tensor:
        def value(sample: Tensor) -> Tensor:
            return self.net(sample).squeeze(-1)  # type: ignore[no-any-return]

        return vmap(hessian(value))(x)  # type: ignore[no-any-return]
