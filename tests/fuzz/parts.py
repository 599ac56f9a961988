"""Modules that random programs use by name: state in Python attributes, properties, optimizers."""

from __future__ import annotations

import enum
from typing import Any

import torch
from torch import Tensor, nn


class Color(enum.Enum):
    """A result of forward that is no number."""

    RED = 1
    BLUE = 2


def weight(value: Any) -> float:
    """Return a number for results that are no tensors, which depends on their types and nesting."""
    if isinstance(value, dict | list | tuple):
        parts = [*value.values()] if isinstance(value, dict) else [*value]
        return 1.0 + 0.5 * sum(weight(part) for part in parts) / max(1, len(parts))
    number = value if isinstance(value, int | float) and abs(value) < 100 else len(str(value))
    return 1.0 + abs(number) / 10 + len(type(value).__name__) / 100


class Cell(nn.Module):
    """Adds its previous result, which it keeps in an attribute; a condition on values keeps it out of graphs."""

    def __init__(self, attached: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.attached = attached
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x if x.sum() > -1e9 else -x)
        y = y if self.state is None else y + self.state
        self.state = y.mean(0) if self.attached else y.mean(0).detach()
        return y


class Spiking(nn.Module):
    """A membrane potential per feature, reset by its parent, and set where it fires."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(6) + 0.5)
        self.potential: Tensor | float = 0.0

    def reset(self) -> None:
        self.potential = 0.0

    def forward(self, x: Tensor) -> Tensor:
        potential = self.potential + x * self.scale
        if bool((potential.detach() > 1.0).any()):
            potential = potential - (potential.detach() > 1.0).to(x.dtype)
        self.potential = potential.mean(0).detach()
        return potential


class Appending(nn.Module):
    """Appends its input to a list that the caller made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:
        cache.append(self.linear(x) if x.mean() > -1e9 else x)
        return torch.stack(cache).mean(0)


class _Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6))

    def points(self) -> Tensor:
        return self.weight


class Properties(_Points):
    """A property that overrides a method of the base class, and one with a setter."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self._gain = gain

    @property
    def points(self) -> Tensor:  # type: ignore[override]
        return self.weight.tanh()

    @property
    def gain(self) -> float:
        return self._gain

    @gain.setter
    def gain(self, value: float) -> None:
        self._gain = value

    def forward(self, x: Tensor) -> Tensor:
        return x * self.points * self.gain if x.sum() > -1e9 else x


class Learner(nn.Module):
    """Holds the optimizer of its parameters, and a dict of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(6) + 0.5)
        self.bias = nn.Parameter(torch.randn(6))
        self.by_name: dict[str, Any] = {"gain": self.gain, "bias": self.bias}
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.by_name["gain"] + self.by_name["bias"]
        return y if y.sum() > -1e9 else -y
