"""``hf.train_step(..., memory=)``: blocks of members, against the members alone in float64."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.step.memory_budget import block_bytes, state_bytes
from tests.zoo import MODELS, normal

EPS = 1e-4
ZOO = {model.name: model for model in MODELS}


def budget(fused: hf.FusedModule, opt: Any, x: Any, size: int, samples: int, *, is_compiled: bool = False) -> int:
    """The least memory in which ``size`` members fit."""
    program = fused.compiled(Arguments.of((x,), {})).program
    return state_bytes(fused, opt) + block_bytes(program, size, samples, is_compiled=is_compiled)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@dataclass(frozen=True)
class Case:
    """Five members in blocks of ``size``: 2 leaves a smaller last block."""

    name: str
    make: Any
    draw: Any
    size: int
    optimizer: str = "Adam"
    clip: bool = False
    stacked: bool = False
    compile: bool = False

    def __str__(self) -> str:
        words = [self.name, str(self.size), self.optimizer]
        return "-".join(words + [name for name in ("clip", "stacked", "compile") if getattr(self, name)])


CASES = [
    Case("cnn", small, normal(2, 6, 6), 2),
    Case("cnn", small, normal(2, 6, 6), 3, "SGD", clip=True),
    Case("cnn", small, normal(2, 6, 6), 1, "RMSprop", stacked=True),
    Case("tied", Tied, normal(4), 2, "AdamW", clip=True, stacked=True),
    Case("tied", Tied, normal(4), 3, "SGD"),
    *(Case(name, ZOO[name].make, ZOO[name].draw, 2, clip=True) for name in ("convnet", "attention") if name in ZOO),
    Case("cnn", small, normal(2, 6, 6), 2, clip=True, compile=True),
    Case("tied", Tied, normal(4), 3, "SGD", stacked=True, compile=True),
]


def loss_of(output: Any, target: Tensor) -> Tensor:
    return (output.sin() * target.reshape(-1, *[1] * (output.dim() - 1))).mean()


def clip(fused: hf.FusedModule) -> None:
    hf.optim.clip_grad_norm_(fused.parameters(), 0.05)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_train_as_the_members_alone(case: Case) -> None:
    torch.manual_seed(0)
    models = [case.make().double() for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    options = {} if case.optimizer == "SGD" else {"eps": EPS}
    rates = [0.02 * (b + 1) for b in range(5)]
    opt = getattr(hf.optim, case.optimizer)(fused.parameters(), lr=rates, **options)
    kind = getattr(torch.optim, case.optimizer)
    opts = [kind(model.parameters(), lr=lr, **options) for model, lr in zip(alone, rates, strict=True)]
    if case.clip:
        opt.register_step_pre_hook(lambda *_: clip(fused))

    def draw(size: int) -> list[Tensor]:
        return [case.draw(size) for _ in range(5)] if case.stacked else [case.draw(size)] * 5

    def inputs(xs: list[Tensor]) -> Any:
        return hf.stacked(torch.stack(xs)) if case.stacked else xs[0]

    memory = budget(fused, opt, inputs(draw(6)), case.size, 6, is_compiled=case.compile)
    step = hf.train_step(fused, loss_of, opt, compile=case.compile, memory=memory, parts=1)
    for size in (6, 6, 5, 6):
        xs, target = draw(size), torch.rand(size, dtype=torch.float64)
        losses = step(inputs(xs), target)
        expected = []
        for model, other, x in zip(alone, opts, xs, strict=True):
            other.zero_grad()
            loss = loss_of(model(x), target)
            loss.backward()
            if case.clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            other.step()
            expected.append(loss.detach())
        torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-9, atol=1e-11)
    for name, stack in fused.state_dict().items():
        reference = torch.stack([model.state_dict()[name] for model in alone])
        torch.testing.assert_close(stack, reference, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")
    for name, param in fused.named_parameters():
        reference = torch.stack([dict(model.named_parameters())[name].grad for model in alone])
        torch.testing.assert_close(param.grad, reference, rtol=1e-9, atol=1e-11)
    assert f"{case.size} of 5 at a time, at an estimated peak of" in str(step.report())
    assert ("program" in str(step.report())) == case.compile


def dropout(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 2)).double()


def test_what_members_draw_depends_on_no_block() -> None:
    """Also for members with different dropout rates."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    losses = []
    for size in (1, 2, 3, 5):
        torch.manual_seed(0)
        fused = hf.fuse([dropout(0.2 + 0.1 * (b % 3)) for b in range(5)])
        opt = hf.optim.SGD(fused.parameters(), lr=0.1)
        step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, size, 6))
        torch.manual_seed(1)
        losses.append(torch.stack([step(x, y) for _ in range(3)]))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=0)


def test_a_shared_parameter_gets_the_sum_over_blocks() -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 4).double()
    models = [nn.Sequential(base, nn.Tanh(), nn.Linear(4, 2).double()) for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, 2, 6))
    losses = step(x, y)
    expected = torch.stack([F.mse_loss(model(x), y) for model in alone])
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-9, atol=0)
    shared = dict(fused.named_parameters())["0.weight"]
    torch.testing.assert_close(shared.grad, alone[0][0].weight.grad, rtol=1e-9, atol=1e-12)


def test_too_little_memory_names_the_numbers() -> None:
    fused = hf.fuse([nn.Linear(4, 2) for _ in range(3)])
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=64)
    # Of 10 weights in each of 3 members, and as many gradients.
    with pytest.raises(hf.PlanError, match=r"3 members of Linear takes .*: 240B for .* memory=64B is less"):
        step(torch.randn(6, 4), torch.randn(6, 2))


def test_hooks_are_refused_where_members_are_computed_in_blocks() -> None:
    fused = hf.fuse([nn.Linear(4, 2) for _ in range(3)])
    opt, x = hf.optim.SGD(fused.parameters(), lr=0.1), torch.randn(6, 4)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, 1, 6))
    fused.register_forward_hook(lambda *_: None)
    with pytest.raises(hf.FusionError, match=r"memory= lets a step compute 1 of 3 members at a time.* has a hook"):
        step(x, torch.randn(6, 2))
