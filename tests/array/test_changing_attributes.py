"""Attributes of members that a training loop sets at every step: annealed numbers, flags, texts, lists."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf

STEPS = 12


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: float) -> Tensor:
        ctx.alpha = alpha
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return -ctx.alpha * grads[0], None


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))
        self.alpha, self.power, self.tag, self.weights = 1.0, 1, "plain", [1.0, 2.0]
        self.flag: Any = False
        self.head[0].scale = 1.0  # type: ignore[assignment]
        self.epoch = 0

    def reverse(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.reverse(self.body(x))
        x = torch.softmax(x * self.weights[0] / self.alpha, -1) ** self.power
        x = self.head(x) * self.head[0].scale
        if self.flag is None:
            return x.abs()
        return -x if self.flag else x + len(self.tag)


class Reversing(Model):
    def reverse(self, x: Tensor) -> Tensor:
        return Reversal.apply(x, self.alpha)  # type: ignore[no-any-return, no-untyped-call]


class Plain(nn.Linear):
    """A model whose only attribute is not read by forward."""

    epoch: int

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


# What is set on member ``b`` of three before step ``t``.
CHANGES: Mapping[str, Callable[[Any, int, int], object]] = {
    "number": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8),
    "reversal": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8),
    "number of each": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8 + b),
    "number of one": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8) if b == 1 else None,
    "int": lambda m, b, t: setattr(m, "power", 1 + t),
    "flag": lambda m, b, t: setattr(m, "flag", [False, True, None][t % 3]),
    "text": lambda m, b, t: setattr(m, "tag", "x" * t),
    "list": lambda m, b, t: m.weights.__setitem__(0, 1.0 + t / 8),
    "new list": lambda m, b, t: setattr(m, "weights", [1.0 + t / 8]),
    "submodule": lambda m, b, t: setattr(m.head[0], "scale", 1.0 + t / 8),
    "curriculum": lambda m, b, t: setattr(m, "alpha", 1.0 + t // 4),
    "two": lambda m, b, t: (setattr(m, "alpha", 1.0 + t / 8), setattr(m, "power", 1 + t % 3)),
    "unread": lambda m, b, t: setattr(m, "epoch", t),
}


def members(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [{"unread": Plain, "reversal": Reversing}.get(kind, Model)().double() for _ in range(3)]


@pytest.mark.filterwarnings("ignore:train_step of:UserWarning")
@pytest.mark.parametrize("compiled_step", [False, True])
@pytest.mark.parametrize("kind", CHANGES)
def test_attributes_set_at_every_step(kind: str, compiled_step: bool) -> None:
    models, fused = members(kind), hf.fuse(members(kind))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    target = torch.zeros(5, 2, dtype=torch.float64)
    optimizer = hf.optim.Adam(fused.parameters(), lr=1e-2)
    own = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
    step = hf.train_step(fused, nn.functional.mse_loss, optimizer, compile=False if not compiled_step else None)
    for t, x in enumerate(batches):
        for b, member in enumerate(fused):
            CHANGES[kind](member, b, t)
        losses = step(x, target)
        for b, (model, optim) in enumerate(zip(models, own, strict=True)):
            CHANGES[kind](model, b, t)
            optim.zero_grad()
            loss = nn.functional.mse_loss(model(x), target)
            loss.backward()
            optim.step()
            torch.testing.assert_close(losses[b], loss, rtol=1e-9, atol=1e-12)
    for model, member in zip(models, fused.unfuse(), strict=True):
        torch.testing.assert_close(member.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-12)
        assert {k: v for k, v in vars(member).items() if k in ("alpha", "tag", "epoch", "weights", "flag")} == {
            k: v for k, v in vars(model).items() if k in ("alpha", "tag", "epoch", "weights", "flag")
        }
    report = fused.report()
    assert len(report.parts) <= (1 if kind == "unread" else 4)
    assert ("changes often" in str(report)) == (kind not in ("unread", "flag", "curriculum"))
