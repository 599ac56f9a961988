"""Models of one structure whose attribute decides what forward does, or with which numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Chosen(nn.Module):
    """Its attribute ``choice`` decides what forward does."""

    def __init__(self, choice: Any, forward: Callable[[Chosen, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2),
        )  # fmt: skip
        self.choice, self.code = choice, forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self, x))


def steps(model: Chosen, x: Tensor) -> Tensor:
    for _ in range(model.choice):
        x = model.first(x).tanh()
    return x


def placed_norm(model: Chosen, x: Tensor) -> Tensor:
    return x + model.first(model.norm(x)) if model.choice else model.norm(x + model.first(x))


def threshold(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return h.relu() if model.choice > 0.5 else h.tanh()


def only_in_evaluation(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return h if model.training else getattr(h, model.choice)()


def on_values(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return -h if model.choice and h.sum() > 0 else h.tanh()


def order(model: Chosen, x: Tensor) -> Tensor:
    h = model.second(x) - model.first(x)
    return h if model.choice else -(model.first(x) * h)


# How forward hangs on a choice, the choices, and into how many groups they fall.
CHOICES: dict[str, tuple[Callable[[Chosen, Tensor], Tensor], list[Any], int]] = {
    "activation by name": (lambda model, x: getattr(torch, model.choice)(model.first(x)), ["relu", "tanh", "relu"], 2),
    "number of steps": (steps, [1, 2, 3, 2], 3),
    "place of the norm": (placed_norm, [True, False], 2),
    "a number that decides": (threshold, [0.1, 0.9, 0.2], 2),
    "only in evaluation": (only_in_evaluation, ["relu", "tanh"], 2),
    "a branch on values": (on_values, [True, False], 1),
    "order": (order, [True, False], 2),
    "which layer": (lambda model, x: getattr(model, model.choice)(x), ["first", "second"], 2),
    "a container": (
        lambda model, x: model.first(x).relu() if "a" in model.choice["on"] else model.first(x),
        [{"on": ["a"]}, {"on": ["b"]}],
        2,
    ),
    "a number": (lambda model, x: model.first(x) * model.choice, [0.5, 0.7, 0.0], 1),
    "dropout": (lambda model, x: F.dropout(model.first(x), model.choice, model.training), [0.0, 0.3, 1.0], 1),
    "a dim": (lambda model, x: model.first(x).softmax(model.choice), [0, 1], 1),
}
