"""Members that step by themselves, by their own loaders, with weights of samples, and within a memory."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.population import training_group
from hfusion.step.memory_budget import block_bytes, state_bytes
from hfusion.step.train_step import TrainStep
from tests.alone import Member, Own, compare_tensors
from tests.forwards.table import module

# Members that step by themselves, with updates of their own numbers of calls: each equals that model alone.
DOUBLE = torch.float64


def normed(p: float = 0.0) -> nn.Module:
    """No bias before the statistics, whose gradient is noise that Adam makes large."""
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(p), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def eager(
    models: list[nn.Module], lr: Any = 0.1, loss: Any = F.cross_entropy, *, kind: Any = hf.optim.SGD, **options: Any
) -> hf.Population:
    return hf.Population(models, optimizer=partial(kind, lr=lr), loss=loss, compile=False, **options)


def batches(count: int, size: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(count, size, 4, dtype=DOUBLE), torch.randint(3, (count, size))


@pytest.fixture(params=["together", "copied"])
def _ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some rows are computed with all others, or as a small array, as those of large models are."""
    if request.param == "copied":
        monkeypatch.setattr(training_group, "_LIGHT", 0)
        monkeypatch.setattr(TrainStep, "lets_rest", lambda *_: False)


@pytest.mark.usefixtures("_ways")
def test_an_overflow_among_some_rows_lowers_the_scale_of_its_member() -> None:
    models = [nn.Linear(4, 3).double() for _ in range(3)]
    for model in models:
        # A loss of 0, whose scaled gradients are as large as the inputs.
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
    scaler = hf.optim.GradScaler(init_scale=2.0**100)
    pop = eager([*models], 1e-40, lambda output, target: output.mean() * target, scaler=scaler)
    xs = torch.stack([torch.full((5, 4), value, dtype=DOUBLE) for value in (1e300, 1.0)])
    pop.step(hf.stacked(xs), torch.ones((), dtype=DOUBLE), rows=[2, 0])
    assert pop.scaler is not None
    assert pop.scaler.get_scale().tolist() == [2.0**100, 2.0**100, 2.0**99]
    assert pop.ages.tolist() == [1, 0, 0]


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("on_nonfinite", ["freeze", "ignore"])
@pytest.mark.parametrize("scaled", [True, False])
def test_the_others_keep_every_bit(scaled: bool, on_nonfinite: Any) -> None:
    """Weights, statistics, moments, counts, scales, hyper-parameters and the keys of their random numbers."""
    torch.manual_seed(0)
    pop = eager(
        [normed(0.1 * row) for row in range(4)],
        0.01,
        kind=hf.optim.Adam,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5),
        scaler=hf.optim.GradScaler(init_scale=8.0, growth_interval=2) if scaled else None,
        on_nonfinite=on_nonfinite,
    )

    def of(row: int) -> list[Tensor]:
        state = [value[row] for entry in pop.optimizer.state.values() for value in entry.values()]
        scales = [] if pop.scaler is None else pop.scaler.state_dict().values()
        others = [*pop.fused.state_dict().values(), pop.hparams["lr"], pop.ages, pop.array.table["key"], *scales]
        return [v.clone() for v in (*state, *(t[row] for t in others))]

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
    assert pop.scaler is None or pop.scaler.get_scale().tolist() == [8.0, 32.0, 8.0, 32.0]
    assert all(param.grad is None for param in pop.fused.parameters())
    pop.copy(3, 0)
    assert pop.ages.tolist() == [4, 4, 1, 4]


class Checked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert self.weight.isfinite().all()
        return super().forward(x)


class Counting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


@pytest.mark.parametrize("rows", [[0, 2, 3], [3]], ids=str)
@pytest.mark.parametrize("kind", [nn.Linear, Checked, Counting])
def test_code_of_members_that_rest_does_not_run(kind: Any, rows: list[int]) -> None:
    """Neither forward or a loss that keeps state nor a check of their values."""
    seen: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(len(seen))
        assert output.isfinite().all()
        return F.cross_entropy(output, target)

    pop = eager([kind(4, 3).double() for _ in range(4)], loss=loss)
    with torch.no_grad():
        pop.fused.get_parameter("weight")[1] = math.nan
    for _ in range(2):
        seen.clear()
        losses = pop.step(*(hf.stacked(part) for part in batches(len(rows))), rows=rows)
        assert losses.isnan().tolist() == [row not in rows for row in range(4)]
        assert len(seen) == len(rows)
    if kind is Counting:
        assert [getattr(model, "calls", 0) for model in pop.models] == [2 * (row in rows) for row in range(4)]


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("rows", [[0, 1, 2], [2, 1]], ids=str)
def test_a_loss_that_is_not_finite_spoils_its_update_whatever_call_it_was(rows: list[int]) -> None:
    """Also where its gradients are finite."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target[:-1]) + target[-1].sum()

    pop = eager([nn.Linear(4, 1).double() for _ in range(3)], loss=loss, on_nonfinite="freeze", accumulate=2)
    weight = pop.fused.get_parameter("weight")
    x, before, target = torch.randn(5, 4, dtype=DOUBLE), weight.detach().clone(), torch.zeros(3, 6, 1, dtype=DOUBLE)
    bad = target.clone()
    bad[1, -1] = math.nan
    for targets in (bad, target):
        pop.step(x, hf.stacked(targets[rows]), rows=rows)
    assert pop.frozen == [1]
    changed = (weight.detach() != before).flatten(1).any(1).tolist()
    assert changed == [row in rows and row != 1 for row in range(3)]


@pytest.mark.usefixtures("_ways")
def test_limits_stay_with_their_members() -> None:
    """Gradients are larger than any limit, so that an update at rate 1 is as large as the member's own."""
    limits = [1e-3, 1e-2, 1e-1]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return 1e3 * (output - target).abs().sum()

    pop = eager([nn.Linear(4, 3).double() for _ in limits], 1.0, loss, clip_norm=limits)

    def updates(**options: Any) -> list[float]:
        before = [param.detach().clone() for param in pop.fused.parameters()]
        pop.step(torch.ones(5, 4, dtype=DOUBLE), torch.full((5, 3), 9.0, dtype=DOUBLE), **options)
        changes = [param.detach() - old for param, old in zip(pop.fused.parameters(), before, strict=True)]
        return torch.cat([change.flatten(1) for change in changes], 1).norm(dim=1).tolist()

    assert updates() == pytest.approx(limits)
    assert updates(rows=[2]) == pytest.approx([0.0, 0.0, limits[2]])
    pop.stop(0)
    pop.compact()
    assert updates() == pytest.approx(limits[1:])


def test_members_age_by_their_own_updates_and_a_bad_one_keeps_its_statistics() -> None:
    pop = eager([normed() for _ in range(3)], accumulate=[1, 2, 3], on_nonfinite="freeze")
    xs, targets = batches(3)
    for _ in range(4):
        pop.step(hf.stacked(xs), hf.stacked(targets))
    assert pop.ages.tolist() == [4, 2, 1]
    means = pop.fused.get_buffer("1.running_mean")
    before = means.clone()
    bad = xs.clone()
    bad[0] = math.nan
    pop.step(hf.stacked(bad), hf.stacked(targets))
    assert pop.frozen == [0]
    assert torch.equal(means[0], before[0])
    assert not torch.equal(means[1], before[1])


@pytest.mark.parametrize("loss", [F.mse_loss, F.l1_loss])
def test_a_removed_sample_spoils_nothing(loss: Any) -> None:
    """Also of a loss with weights of elements, of which it takes the mean."""
    torch.manual_seed(0)
    elements, models = torch.rand(4, 3, dtype=DOUBLE), [nn.Linear(4, 3).double() for _ in range(2)]
    pop = eager([*models], loss=partial(loss, weight=elements))
    x, y = torch.randn(4, 4, dtype=DOUBLE), torch.randn(4, 3, dtype=DOUBLE)
    y[1] = torch.nan
    losses = pop.step(x, y, weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    alone = [loss(model(x[[0, 2, 3]]), y[[0, 2, 3]], weight=elements[[0, 2, 3]]) for model in models]
    torch.testing.assert_close(losses, torch.stack(alone).detach())
    assert not pop.frozen


# Loaders of own lengths and epochs: each member trains as if alone, and small last batches are one step.
KINDS = {
    "samples apart": lambda: [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(5)],
    "BatchNorm": lambda: [
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(5)
    ],
    "groups": lambda: [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)) for width in (5, 6, 5, 6, 7)],
}


@pytest.mark.usefixtures("_ways")
@pytest.mark.parametrize("kind", KINDS)
def test_members_with_loaders_of_their_own_equal_members_alone(kind: str) -> None:
    torch.manual_seed(0)
    models = [model.double() for model in KINDS[kind]()]
    alone = copy.deepcopy(models)
    data = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in (11, 8, 3, 10, 6)]
    loaders = [list(zip(x.split(4), y.split(4), strict=True)) for x, y in data]
    epochs = [2, 1, 3, 2, 2]
    pop = eager(models, 0.01, kind=hf.optim.AdamW)
    calls = 0
    for calls, (inputs, target, rows) in enumerate(hf.zip_loaders(loaders, epochs=epochs), 1):  # noqa: B007
        pop.step(inputs, target, rows=rows)
    # Three for each epoch of the longest loader, and one for the third epoch of the smallest one.
    assert calls == 7
    for row, (model, loader) in enumerate(zip(alone, loaders, strict=True)):
        Member(model, torch.optim.AdamW, F.cross_entropy, Own(0.01)).epoch(loader * epochs[row])
        member = pop.models[row]
        assert member is not None
        torch.testing.assert_close(member.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-11)
    assert pop.ages.tolist() == [6, 2, 3, 6, 4]


# ``hf.Population(..., memory=)``: groups and updates of several calls, against the members alone in float64.
RATES = [0.02 * (b + 1) for b in range(5)]
CLIP = 0.05


def net(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2)).double()


def population(models: list[nn.Module], memory: Any, **options: Any) -> hf.Population:
    def optimizer(params: Any) -> Any:
        return hf.optim.Adam(params, lr=RATES[: len(models)], eps=1e-4)

    return hf.Population(
        models, optimizer=optimizer, loss=F.mse_loss, clip_norm=CLIP, compile=False, memory=memory, **options
    )


def memory_for(models: list[nn.Module], x: Tensor, size: int, sums: int) -> int:
    """The least memory for ``size`` members at a time; ``sums``: stacks of gradients of earlier calls."""
    fused = hf.fuse(copy.deepcopy(models))
    opt = hf.optim.Adam(fused.parameters(), lr=0.1)
    program = fused.compiled(Arguments.of((x,), {})).program
    summed = sums * sum(p.nbytes for p in fused.parameters())
    return state_bytes(fused, opt) + summed + block_bytes(program, size, len(x))


@pytest.mark.parametrize("accumulate", [1, 2, [1, 2, 1, 3, 2]], ids=str)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_members_train_as_alone(size: int, accumulate: Any) -> None:
    torch.manual_seed(0)
    models = [net() for _ in range(5)]
    alone = copy.deepcopy(models)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    pop = population(models, memory_for(models, x, size, 0 if accumulate == 1 else 1), accumulate=accumulate)
    calls = [accumulate] * 5 if isinstance(accumulate, int) else accumulate
    owns = [Own(lr, accumulate=count, norm=CLIP) for lr, count in zip(RATES, calls, strict=True)]
    make = partial(torch.optim.Adam, eps=1e-4)
    members = [Member(model, make, F.mse_loss, own) for model, own in zip(alone, owns, strict=True)]
    for step in range(6):
        losses = pop.step(x + step, y)
        expected = torch.stack([member.call(x + step, y)[0] for member in members])
        torch.testing.assert_close(losses, expected, rtol=1e-9, atol=0)
    compare_tensors(pop.fused, alone, "after the steps")
    assert f"{size} of 5 at a time" in str(pop.array._step.report())


def careful(self: Any, x: Tensor) -> Tensor:
    """A probability ``[N, 1]`` of inputs ``[N, 4]`` by a layer whose values it checks."""
    h = self.layer(x)
    assert h.isfinite().all()
    return h.sigmoid()


Careful = module(careful, layer=lambda: nn.Linear(4, 1))


@pytest.mark.parametrize("chosen", [True, False])
@pytest.mark.parametrize("left", [1, 3])
def test_members_that_left_with_bad_values_fail_no_check(left: int, chosen: bool) -> None:
    """The free rows, which are computed as well, are less or more than half of all."""
    models = [Careful() for _ in range(5)]
    alone = copy.deepcopy(models[left:])
    pop = eager([*models], [0.1] * 5, F.binary_cross_entropy, kind=hf.optim.Adam)
    for row in range(left):
        with torch.no_grad():
            pop.fused.layer.weight[row] = math.nan
        pop.hparams["lr"][row] = 1e300
        pop.stop(row)
    rows = list(range(left, 5))
    members = [Member(model, torch.optim.Adam, F.binary_cross_entropy, Own(0.1)) for model in alone]
    for _ in range(3):
        x, y = torch.randn(6, 4, dtype=DOUBLE), torch.rand(6, 1, dtype=DOUBLE)
        losses = pop.step(x, y, rows=rows if chosen else None)
        expected = torch.stack([member.call(x, y)[0] for member in members])
        torch.testing.assert_close(losses[left:], expected, rtol=1e-9, atol=0)
        assert losses[:left].isnan().all()
    for row, model in zip(rows, alone, strict=True):
        torch.testing.assert_close(pop.models[row].layer.weight, model.layer.weight, rtol=1e-9, atol=0)
