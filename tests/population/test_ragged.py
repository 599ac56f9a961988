"""Populations whose members have batches of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

SIZES = [3, 5, 64]


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


def normed() -> nn.Module:
    # With a bias before the norm, whose gradient is rounding alone, Adam would make a step of it.
    return nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3))


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulate": {"accumulate": 2},
    "clip": {"clip_norm": 0.1},
    "ignore": {"on_nonfinite": "ignore"},
}


def alone(model: nn.Module, batches: list[tuple[Tensor, Tensor]], accumulate: int = 1, clip_norm: Any = None) -> None:
    opt = torch.optim.Adam(model.parameters(), lr=0.01)
    for k, (x, t) in enumerate(batches):
        (F.cross_entropy(model(x), t) / accumulate).backward()
        if (k + 1) % accumulate == 0:
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
            opt.step()
            opt.zero_grad()


@pytest.mark.parametrize("make", [plain, normed])
@pytest.mark.parametrize("name", OPTIONS)
def test_twenty_steps_equal_members_alone(make: Callable[[], nn.Module], name: str) -> None:
    models = [make() for _ in SIZES]
    options = OPTIONS[name]
    pop = hf.Population(models, optimizer=partial(hf.optim.Adam, lr=0.01), loss=F.cross_entropy, **options)
    batches = [[(torch.randn(n, 4), torch.randint(3, (n,))) for _ in range(20)] for n in SIZES]
    for minibatch in zip(*batches, strict=True):
        xs, ts = zip(*minibatch, strict=True)
        pop.step(hf.stacked(xs), hf.stacked(ts))
    for b, model in enumerate(models):
        alone(model, batches[b], **{k: v for k, v in options.items() if k != "on_nonfinite"})
        for key, tensor in model.state_dict().items():
            torch.testing.assert_close(pop.models[b].state_dict()[key], tensor, rtol=1e-9, atol=1e-10)  # type: ignore[union-attr]


class Accuracy:
    def reset(self) -> None:
        self.right, self.count = 0, 0

    def update(self, output: Tensor, target: Tensor) -> None:
        self.right += int((output.argmax(1) == target).sum())
        self.count += len(target)

    def compute(self) -> float:
        return self.right / self.count


@pytest.mark.parametrize("metric", [F.cross_entropy, Accuracy()])
def test_evaluation(metric: Any) -> None:
    models = [normed().eval() for _ in SIZES]
    pop = hf.Population(models, optimizer=partial(hf.optim.SGD, lr=0.1), loss=F.cross_entropy)
    batches = [
        [(torch.randn(n, 4), torch.randint(3, (n,))) for n in sizes] for sizes in ([3, 5, 64], [7, 7, 7], [2, 1, 9])
    ]
    loader = [(hf.stacked([x for x, _ in batch]), hf.stacked([t for _, t in batch])) for batch in batches]
    scores = pop.evaluate(metric, loader)
    for b, model in enumerate(models):
        x, t = (torch.cat([batch[b][k] for batch in batches]) for k in range(2))
        if isinstance(metric, Accuracy):
            metric.reset()
            metric.update(model(x), t)
            expected = metric.compute()
        else:
            expected = float(metric(model(x), t).detach())
        assert float(list(scores.values())[b] if isinstance(scores, dict) else scores[b]) == pytest.approx(
            expected, rel=1e-9
        )


class Act(nn.Module):
    """Models of one shape whose forwards differ."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(4, 3), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = getattr(torch, self.act)(self.linear(x))
        return out


ACTS = ["tanh", "tanh", "relu", "tanh", "sigmoid", "relu", "tanh"]


def test_an_array_names_the_members_that_differ() -> None:
    fused = hf.fuse([Act(act) for act in ACTS])
    batches = [torch.randn(3 if row in (0, 1) else 5, 4) for row in range(len(ACTS))]
    with pytest.raises(hf.ForwardsDiffer, match="act is 'relu' in model 2 and 'tanh' in model 3;") as raised:
        fused(hf.stacked(batches))
    assert raised.value.groups == ((2, 5), (3, 6), (4,))
    assert "Fuse models 2, 5 and models 3, 6 and model 4 by themselves" in str(raised.value)
