"""What is made of several members: averages, ensembles, selections; and functions that run for each."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.acts.zoo import ZOO
from tests.population.test_groups import adamw
from tests.population.test_groups import model as unlike_model

# The average of members is that of their state dicts, and federated averaging is that of a loop over clients.
DOUBLE = torch.float64
MODELS = ("batch norm", "tied", "convolution", "gru", "frozen base")


def population(kind: str, count: int = 4, **options: Any) -> hf.Population:
    torch.manual_seed(5)
    pop = hf.Population(
        [ZOO[kind].model(0) for _ in range(count)],
        optimizer=lambda params: hf.optim.SGD(params, lr=[0.1 * (k + 1) for k in range(count)], momentum=0.9),
        loss=F.cross_entropy,
        compile=False,
        **options,
    )
    for step in range(3):
        if step == 2 and count > 2:
            pop.stop(2)
        pop.step(*batch(step))
    return pop


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, dtype=DOUBLE, generator=generator), torch.randint(3, (8,), generator=generator)


def states(pop: hf.Population) -> list[dict[str, Tensor]]:
    return [copy.deepcopy(pop.fused[row].state_dict()) for row in range(len(pop))]


def mean(parts: list[dict[str, Tensor]], weights: list[float]) -> dict[str, Tensor]:
    """By the definition; of integers those of the last."""
    total, result = sum(weights), dict(parts[-1])
    for name, value in result.items():
        if value.is_floating_point():
            terms = [weight / total * part[name] for weight, part in zip(weights, parts, strict=True)]
            result[name] = torch.stack(terms).sum(0)
    return result


def test_the_mean_of_equal_values_is_that_to_the_bit() -> None:
    base = nn.Linear(5, 64).double().requires_grad_(False)
    pop = hf.Population(
        [nn.Sequential(copy.deepcopy(base), nn.GELU(), nn.Linear(64, 3).double()) for _ in range(3)],
        optimizer=lambda params: hf.optim.SGD(params, lr=0.1),
        loss=F.cross_entropy,
        compile=False,
    )
    mean = pop.average(weights=[1.0, 2.0, 10.0])
    assert isinstance(mean, nn.Module)
    assert torch.equal(mean.state_dict()["0.weight"], base.weight)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_members(kind: str, weighted: bool) -> None:
    pop = population(kind)
    before = states(pop)
    weights = [3.0, 1.0, 0.5] if weighted else None
    expected = mean([before[row] for row in (0, 1, 3)], weights or [1.0] * 3)
    model = pop.average(weights=weights)
    assert isinstance(model, nn.Module)
    close(dict(model.state_dict()), expected)
    for row in (0, 1, 3):
        close(dict(pop.fused[row].state_dict()), before[row])
    swapped = pop.average([3, 0], [2.0, 6.0])
    assert isinstance(swapped, nn.Module)
    close(dict(swapped.state_dict()), mean([before[3], before[0]], [2.0, 6.0]))


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Dropout(), nn.ReLU(), nn.Linear(6, 3)).double()


WEIGHTS: dict[str, list[float] | None] = {"equal": None, "counts": [2, 1, 0, 3], "one": [0, 0, 5.0, 0]}


def moments(values: list[Tensor], weights: list[float] | None) -> tuple[Tensor, Tensor]:
    """By the definition, member after member."""
    shares = [1.0] * len(values) if weights is None else weights
    mean, square = torch.zeros_like(values[0]), torch.zeros_like(values[0])
    for share, value in zip(shares, values, strict=True):
        mean += share * value / sum(shares)
    for share, value in zip(shares, values, strict=True):
        square += share * (value - mean) ** 2 / sum(shares)
    return mean, square.sqrt()


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("softmax", [None, -1, 1])
@pytest.mark.parametrize("name", WEIGHTS)
def test_moments_are_those_of_the_members(name: str, softmax: int | None) -> None:
    torch.manual_seed(0)
    models = [net().eval() for _ in range(4)]
    ensemble = hf.Ensemble(hf.fuse(models), WEIGHTS[name], softmax=softmax).eval()
    x = torch.randn(5, 4, dtype=DOUBLE)
    outputs = [model(x) if softmax is None else model(x).softmax(softmax) for model in models]
    expected = moments(outputs, WEIGHTS[name])
    close(ensemble(x), expected)
    program = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    served = torch.export.load(file).module()
    for samples in (2, 5, 9):
        x = torch.randn(samples, 4, dtype=DOUBLE)
        close(served(x), ensemble(x))
    twin = hf.Ensemble(hf.fuse([net() for _ in models]), WEIGHTS[name], softmax=softmax).eval()
    twin.load_state_dict(ensemble.state_dict())
    close(twin(x), ensemble(x))


def greedy(outputs: list[Tensor], size: int, loss: Callable[[Tensor], float]) -> tuple[list[int], list[float]]:
    """Caruana's procedure by its text: add whom the mean is best with, and keep the best of the nested ensembles."""
    order: list[int] = []
    losses: list[float] = []
    for _ in range(size):
        tried = [loss(torch.stack([outputs[k] for k in [*order, new]]).mean(0)) for new in range(len(outputs))]
        best = min(range(len(tried)), key=lambda k: (tried[k] != tried[k], tried[k]))
        order.append(best)
        losses.append(tried[best])
    count = losses.index(min(losses)) + 1
    return order[:count], losses[:count]


@pytest.mark.parametrize("case", ["classes", "numbers", "accuracy"])
@pytest.mark.parametrize("size", [1, 12])
def test_selection_is_that_of_the_plain_loop(case: str, size: int) -> None:
    torch.manual_seed(3)
    models = [nn.Linear(4, 3).double() for _ in range(8)]
    with torch.no_grad():
        models[5].weight[0, 0] = float("nan")
    x = torch.randn(40, 4, dtype=DOUBLE)
    y = torch.randint(3, (40,)) if case != "numbers" else torch.randn(40, 3, dtype=DOUBLE)
    with torch.no_grad():
        outputs = [model(x) if case == "numbers" else model(x).softmax(1) for model in models]

    def accuracy(p: Tensor, y: Tensor) -> float:
        return float((p.argmax(1) == y).double().mean()) if p.isfinite().all() else float("nan")

    options: dict[str, Any] = {"score": accuracy, "mode": "max", "softmax": -1} if case == "accuracy" else {}
    losses: dict[str, Callable[[Tensor], float]] = {
        "classes": lambda p: float(F.nll_loss(p.log(), y)),
        "numbers": lambda p: float(F.mse_loss(p, y)),
        "accuracy": lambda p: -accuracy(p, y),
    }
    order, expected = greedy(outputs, size, losses[case])
    loader = [(x[:15], y[:15]), (x[15:], y[15:])]
    chosen = hf.select(hf.fuse(models), loader, size, **options)
    assert chosen.order == tuple(order)
    sign = -1 if case == "accuracy" else 1
    assert [sign * score for score in chosen.scores] == pytest.approx(expected, rel=1e-12)
    assert sum(chosen.counts.values()) == len(order)
    assert 5 not in chosen.rows
    close(chosen.weights, torch.tensor([order.count(k) / len(order) for k in range(8)], dtype=DOUBLE))
    with torch.no_grad():
        mean, _ = hf.Ensemble(models, chosen.weights, softmax=None if case == "numbers" else -1)(x)
    assert losses[case](mean) == pytest.approx(expected[-1], rel=1e-9)
    assert sign * chosen.score == pytest.approx(expected[-1], rel=1e-12)


KINDS = ["narrow", "wide", "narrow", "linear", "normed", "tanh", "relu", "tanh", "normed"]
PARTS: dict[str, list[float] | None] = {
    "all": None,
    "weighted": [1, 2, 3, 4, 5, 6, 7, 8, 9],
    "some": [0, 2, 1, 0, 0, 3, 0, 0, 1],
    "one plain": [0, 1, 0, 0, 0, 0, 0, 0, 0],
    "one array": [1, 0, 2, 0, 0, 0, 0, 0, 0],
}


def mixed(kinds: list[str]) -> hf.Population:
    torch.manual_seed(0)
    models = [unlike_model(kind) for kind in kinds]
    return hf.Population(models, optimizer=adamw(0.01), loss=F.cross_entropy, compile=False)


@pytest.mark.parametrize("name", PARTS)
def test_groups_of_a_population_are_one_ensemble(name: str) -> None:
    pop = mixed(KINDS)
    x, y = torch.randn(12, 5, dtype=DOUBLE), torch.randint(3, (12,))
    pop.step(x, y)
    alone = [copy.deepcopy(member).eval() for member in pop.models if member is not None]
    ensemble = hf.Ensemble(pop, PARTS[name], softmax=-1).eval()
    close(ensemble(x), moments([member(x).softmax(-1) for member in alone], PARTS[name]))
    if name in ("all", "some"):
        program = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)})
        close(program.module()(x[:5]), ensemble(x[:5]))
    if name == "all":
        xs = torch.randn(9, 4, 5, dtype=DOUBLE)
        outputs = [member(row).softmax(-1) for member, row in zip(alone, xs, strict=True)]
        close(ensemble(hf.stacked(xs)), moments(outputs, None))
        with pytest.raises(ValueError, match="a stacked argument has 8 entries"):
            ensemble(hf.stacked(xs[:8]))
