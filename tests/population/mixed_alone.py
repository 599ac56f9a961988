"""Populations of unlike models beside torch runs of each member."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

BOUND = 1e-12


class Act(nn.Module):
    """Models of one shape whose forwards differ."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(5, 6), nn.Linear(6, 3), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(getattr(torch, self.act)(self.first(x)))
        return out


def adamw(lrs: Any) -> Any:
    return lambda params: hf.optim.AdamW(params, lr=lrs)


def mlp(hidden: int, *, norm: bool = False) -> nn.Module:
    norms = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(5, hidden, bias=not norm), *norms, nn.Tanh(), nn.Linear(hidden, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "narrow": lambda: mlp(4),
    "wide": lambda: mlp(9),
    "normed": lambda: mlp(6, norm=True),
    "linear": lambda: nn.Linear(5, 3),
    "tanh": lambda: Act("tanh"),
    "relu": lambda: Act("relu"),
    "sigmoid": lambda: Act("sigmoid"),
}


def model(kind: str) -> nn.Module:
    return MODELS[kind]().double()


@dataclass
class Alone:
    """A member trained alone with torch, with its own rate, limits and schedule."""

    model: nn.Module
    lr: float = 0.01
    norm: float | None = None
    value: float | None = None
    make: Callable[[Any], Any] | None = None
    scaled: bool = False
    accumulate: int = 1
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW

    def __post_init__(self) -> None:
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = self.optimizer(self.trained, lr=self.lr)  # type: ignore[call-arg]
        self.scheduler = None if self.make is None else self.make(self.opt)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if self.scaled else None
        self.calls = self.age = 0

    def step(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        if self.calls % self.accumulate == 0:
            self.opt.zero_grad()
        loss = F.cross_entropy(self.model(x), y, reduction="mean" if weights is None else "none")
        if weights is not None:
            loss = (loss * weights).sum() / weights.sum()
        scaled = loss / self.accumulate
        (scaled if self.scaler is None else self.scaler.scale(scaled)).backward()
        self.calls += 1
        if self.calls % self.accumulate == 0:
            if self.scaler is not None:
                self.scaler.unscale_(self.opt)
            if self.value is not None:
                nn.utils.clip_grad_value_(self.trained, self.value)
            if self.norm is not None:
                nn.utils.clip_grad_norm_(self.trained, self.norm)
            if self.scaler is None:
                self.opt.step()
            else:
                self.scaler.step(self.opt)
                self.scaler.update()
            self.age += 1
        return loss.detach()

    def twin(self) -> Alone:
        twin = copy.copy(self)
        twin.model = copy.deepcopy(self.model)
        twin.__post_init__()
        twin.calls, twin.age = self.calls, self.age
        for param, twin_param in zip(self.trained, twin.trained, strict=True):
            twin_param.grad = None if param.grad is None else param.grad.clone()
        twin.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
        if twin.scheduler is not None and self.scheduler is not None:
            twin.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
        if twin.scaler is not None and self.scaler is not None and self.age:
            twin.scaler.load_state_dict(self.scaler.state_dict())
        return twin


def batch(rows: int, *, stacked: bool = False) -> tuple[Any, Any, list[tuple[Tensor, Tensor]]]:
    """A minibatch of all, or of each: as a population takes it, and row by row."""
    if not stacked:
        x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
        return x, y, [(x, y)] * rows
    xs, ys = torch.randn(rows, 6, 5, dtype=torch.float64), torch.randint(3, (rows, 6))
    return hf.stacked(xs), hf.stacked(ys), list(zip(xs, ys, strict=True))


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.detach(), expected.detach(), rtol=BOUND, atol=BOUND, equal_nan=True)


def check_member(pop: hf.Population, row: int, alone: Alone) -> None:
    """Weights, buffers, rate and age of a member are those of torch."""
    member = pop.models[row]
    assert member is not None
    for actual, expected in zip(member.state_dict().values(), alone.model.state_dict().values(), strict=True):
        close(actual, expected)
    close(pop.hparams["lr"][row], torch.tensor(alone.opt.param_groups[0]["lr"], dtype=torch.float64))
    assert pop.ages[row] == alone.age


def run(
    pop: hf.Population,
    members: list[Alone | None],
    steps: int,
    stacked: bool = False,
    rows: list[int] | None = None,
    weights: Tensor | None = None,
) -> None:
    """Step a population beside its members, None in free rows, and compare all after the last step."""
    stepping = list(range(len(pop))) if rows is None else rows
    for _ in range(steps):
        x, y, batches = batch(len(stepping), stacked=stacked)
        ages = pop.ages
        losses = pop.step(x, y, rows=rows, weights=weights)
        assert losses.shape == (len(pop),)
        for row, member in enumerate(members):
            if member is None or row not in stepping:
                assert losses[row].isnan()
            else:
                close(losses[row], member.step(*batches[stepping.index(row)], weights))
        if pop.scheduler is not None:
            updated: list[int] = (pop.ages > ages).nonzero().reshape(-1).tolist()
            pop.scheduler.step(rows=updated)
            for row in updated:
                member = members[row]
                if member is not None and member.scheduler is not None:
                    member.scheduler.step()
    for row, member in enumerate(members):
        if member is not None:
            check_member(pop, row, member)
