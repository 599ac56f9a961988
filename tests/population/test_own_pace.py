"""Members that step by themselves, with updates of their own numbers of calls: each equals that model alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

DOUBLE = torch.float64


def normed(p: float = 0.0) -> nn.Module:
    """No bias before the statistics, whose gradient is noise that Adam makes large."""
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(p), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


class Branching(nn.Module):
    """A layer that only some members use, by a number of their own."""

    def __init__(self, uses: bool) -> None:
        super().__init__()
        self.uses, self.first, self.extra = uses, nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) * (1.0 if self.uses else 2.0)


def assert_close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


class Alone:
    """Members of a population, each trained alone with torch."""

    def __init__(self, models: Sequence[nn.Module], make: Callable[[int, Any], Any], accumulate: Sequence[int]) -> None:
        self.models = copy.deepcopy(list(models))
        self.optimizers = [make(row, list(model.parameters())) for row, model in enumerate(self.models)]
        self.accumulate, self.calls = accumulate, [0] * len(self.models)

    def step(self, row: int, x: Tensor, y: Tensor, clip: float = math.inf) -> Tensor:
        if self.calls[row] == 0:
            self.optimizers[row].zero_grad()
        loss = F.cross_entropy(self.models[row](x), y)
        (loss / self.accumulate[row]).backward()
        self.calls[row] += 1
        if self.calls[row] == self.accumulate[row]:
            nn.utils.clip_grad_norm_(self.models[row].parameters(), clip)
            self.optimizers[row].step()
            self.calls[row] = 0
        return loss.detach()

    def check(self, pop: hf.Population) -> None:
        for row, model in enumerate(self.models):
            member = pop.models[row]
            assert member is not None
            for actual, expected in zip(member.state_dict().values(), model.state_dict().values(), strict=True):
                assert_close(actual, expected)


def batches(count: int, size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(count, size, 4, dtype=DOUBLE), torch.randint(3, (count, size))


OPTIMIZERS: dict[str, tuple[str, Callable[[int], dict[str, Any]]]] = {
    "rates": ("AdamW", lambda row: {"lr": 0.01 * (row + 1)}),
    "some with momentum": ("SGD", lambda row: {"lr": 0.1, "momentum": 0.9 * (row % 2)}),
    "betas": ("Adam", lambda row: {"lr": 0.01, "betas": (0.8, 0.9 + 0.01 * row)}),
    "product": ("NAdam", lambda row: {"lr": 0.01, "momentum_decay": 0.01}),
}


def of_all(kind: str, values: Sequence[dict[str, Any]], params: Any) -> Any:
    options: dict[str, Any] = {}
    for key in values[0]:
        column = [value[key] for value in values]
        options[key] = tuple(map(list, zip(*column, strict=True))) if isinstance(column[0], tuple) else column
    return getattr(hf.optim, kind)(params, **options)


def test_an_overflow_among_some_rows_lowers_the_scale_of_its_member() -> None:
    models = [nn.Linear(4, 3).double() for _ in range(3)]
    for model in models:
        # A loss of 0, whose scaled gradients are as large as the inputs.
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    pop = hf.Population(
        models,
        optimizer=lambda p: hf.optim.SGD(p, lr=1e-40),
        loss=lambda output, target: output.mean() * target,
        scaler=hf.optim.GradScaler(init_scale=2.0**100),
        compile=False,
    )
    xs = torch.stack([torch.full((5, 4), value, dtype=DOUBLE) for value in (1e300, 1.0)])
    pop.step(hf.stacked(xs), torch.ones((), dtype=DOUBLE), rows=[2, 0])
    assert pop.scaler is not None
    assert pop.scaler.get_scale().tolist() == [2.0**100, 2.0**100, 2.0**99]
    assert pop.ages.tolist() == [1, 0, 0]


def test_the_others_keep_every_bit() -> None:
    """Weights, statistics, moments, counts, scales, hyper-parameters and the keys of their random numbers."""
    torch.manual_seed(0)
    pop = hf.Population(
        [normed(0.1 * row) for row in range(4)],
        optimizer=lambda p: hf.optim.Adam(p, lr=0.01),
        loss=F.cross_entropy,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        scaler=hf.optim.GradScaler(init_scale=8.0, growth_interval=2),
        compile=False,
    )

    def of(row: int) -> list[Tensor]:
        state = [value[row] for entry in pop.optimizer.state.values() for value in entry.values()]
        assert pop.scaler is not None
        others = [*pop.fused.state_dict().values(), pop.hparams["lr"], pop.ages, pop._roll.keys]
        return [v.clone() for v in (*state, *(t[row] for t in (*others, *pop.scaler.state_dict().values())))]

    pop.step(*(hf.stacked(part) for part in batches(4)))
    before = [of(row) for row in range(4)]
    assert pop.scheduler is not None
    for _ in range(3):
        losses = pop.step(*(hf.stacked(part) for part in batches(2)), rows=[3, 1])
        pop.scheduler.step(rows=[3, 1])
        assert losses.isnan().tolist() == [True, False, True, False]
    for row in (0, 2):
        assert all(torch.equal(actual, expected) for actual, expected in zip(of(row), before[row], strict=True))
    assert (pop.ages.tolist(), pop.scheduler.last_epochs.tolist(), pop.steps) == ([1, 4, 1, 4], [0, 3, 0, 3], 4)
    assert pop.scaler is not None
    assert pop.scaler.get_scale().tolist() == [8.0, 32.0, 8.0, 32.0]
    pop.copy(3, 0)
    assert pop.ages.tolist() == [4, 4, 1, 4]


@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 1]], ids=str)
def test_a_loss_that_is_not_finite_spoils_its_update_whatever_call_it_was(rows: list[int]) -> None:
    """Also where its gradients are finite."""
    pop = hf.Population(
        [nn.Linear(4, 1).double() for _ in range(3)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=lambda output, target: F.mse_loss(output, target[:-1]) + target[-1].sum(),
        on_nonfinite="freeze",
        accumulate=2,
        compile=False,
    )
    weight = pop.fused.get_parameter("weight")
    x, before, target = torch.randn(5, 4, dtype=DOUBLE), weight.detach().clone(), torch.zeros(3, 6, 1, dtype=DOUBLE)
    bad = target.clone()
    bad[1, -1] = math.nan
    for targets in (bad, target):
        pop.step(x, hf.stacked(targets[rows]), rows=rows)
    assert pop.frozen == [1]
    changed = (weight.detach() != before).flatten(1).any(1).tolist()
    assert changed == [row in rows and row != 1 for row in range(3)]


@pytest.mark.parametrize("compiled", [False, True])
def test_a_trained_base_is_trained_by_those_that_step(compiled: bool) -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 4).double()
    models = [nn.Sequential(base, nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(3)]
    alone = [copy.deepcopy(model) for model in models]
    for model in alone:
        model[0] = alone[0][0]
    opts = [torch.optim.Adam(model[2].parameters(), lr=0.1) for model in alone]
    common = torch.optim.Adam(alone[0][0].parameters(), lr=0.1)
    options: dict[str, Any] = {"optimizer": lambda p: hf.optim.Adam(p, lr=0.1), "loss": F.cross_entropy}
    pop = hf.Population(models, **options, compile=compiled)
    for rows in ([0, 2], [1], [2, 1, 0], [2, 0]):
        xs, ys = batches(len(rows))
        pop.step(hf.stacked(xs), hf.stacked(ys), rows=rows)
        for opt in (*opts, common):
            opt.zero_grad()
        for row, x, y in zip(rows, xs, ys, strict=True):
            F.cross_entropy(alone[row](x), y).backward()
            opts[row].step()
        common.step()
    for row, model in enumerate(alone):
        member = pop.models[row]
        assert member is not None
        assert_close(list(member.parameters()), list(model.parameters()))
    with pytest.raises(ValueError, match="make an update together"):
        hf.Population(models, **options, accumulate=[1, 2, 1])
    with pytest.raises(ValueError, match="make its updates together"):
        hf.Population(models, **options, accumulate=2).step(*batches(1), rows=[1])


REFUSED: dict[str, tuple[Callable[[hf.Population], object], type[Exception], str]] = {
    "no rows": (lambda pop: pop.step(*batches(1), rows=[]), ValueError, "is empty"),
    "twice": (lambda pop: pop.step(*batches(1), rows=[1, 1]), ValueError, "row 1 comes 2 times"),
    "free": (lambda pop: pop.step(*batches(1), rows=[3]), ValueError, "row 3 is free"),
    "no row": (lambda pop: pop.step(*batches(1), rows=[9]), ValueError, "is no row of an array of 4"),
    "mask": (lambda pop: pop.step(*batches(1), rows=torch.tensor([True, False])), ValueError, "is no row"),  # type: ignore[arg-type]
    "all entries": (
        lambda pop: pop.step(*(hf.stacked(part) for part in batches(4)), rows=[0, 1]),
        ValueError,
        r"holds 4 entries, and rows=\[0, 1\] names 2 members: give one entry for each",
    ),
    "no calls": (lambda pop: pop.start(3, normed(), accumulate=0), ValueError, "accumulate=0: at least one call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_rows_are_refused(name: str) -> None:
    pop = hf.Population(
        [normed() for _ in range(4)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=F.cross_entropy,
        compile=False,
    )
    pop.stop(3)
    act, error, words = REFUSED[name]
    before = copy.deepcopy(pop.fused.state_dict())
    with pytest.raises(error, match=words):
        act(pop)
    assert all(torch.equal(before[name], tensor) for name, tensor in pop.fused.state_dict().items())
