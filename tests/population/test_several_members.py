"""What is made of several members: averages, ensembles, selections; and functions that run for each."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hfusion as hf
from tests.acts.zoo import ZOO
from tests.array.test_member_functions import Tensors, loop, model, project, unit_norm
from tests.population.test_groups import adamw
from tests.population.test_groups import model as unlike_model
from tests.step.test_train_step import needs_compiler

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


def close(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name in actual:
        torch.testing.assert_close(
            actual[name], expected[name], rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_mean_of_members(kind: str, weighted: bool) -> None:
    pop = population(kind)
    before = states(pop)
    weights = [3.0, 1.0, 0.5] if weighted else None
    expected = mean([before[row] for row in (0, 1, 3)], weights or [1.0] * 3)
    model = pop.average(weights=weights)
    assert isinstance(model, nn.Module)
    close(model.state_dict(), expected)
    for row in (0, 1, 3):
        close(pop.fused[row].state_dict(), before[row])
    swapped = pop.average([3, 0], [2.0, 6.0])
    assert isinstance(swapped, nn.Module)
    close(swapped.state_dict(), mean([before[3], before[0]], [2.0, 6.0]))


def test_integers_are_those_of_the_last_as_of_averaged_models() -> None:
    pop = population("batch norm", 2)
    pop.fused[0].get_buffer("1.num_batches_tracked").fill_(17)
    torch_average = AveragedModel(pop.fused[1])
    torch_average.update_parameters(pop.fused[1])
    torch_average.update_parameters(pop.fused[0])
    averaged = pop.average([1, 0])
    assert isinstance(averaged, nn.Module)
    for (name, actual), expected in zip(averaged.named_parameters(), torch_average.module.parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=name)
    assert (
        averaged.get_buffer("1.num_batches_tracked") == torch_average.module.get_buffer("1.num_batches_tracked") == 17
    )


# Functions of one member in a population: active members are written; stopped, frozen or overflowing ones are not.
RATES = [0.01, 0.02, 0.03, 0.04]


def each_batch(seed: int) -> Tensor:
    return torch.randn(7, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def each_population(**options: Any) -> tuple[hf.Population, list[nn.Module]]:
    models = [model(seed) for seed in range(4)]
    pop = hf.Population(
        models,
        optimizer=lambda params: hf.optim.Adam(params, lr=RATES),
        loss=F.mse_loss,
        compile=False,
        **options,
    )
    return pop, copy.deepcopy(models)


def equal(pop: hf.Population, models: list[nn.Module], rows: list[int]) -> None:
    for row in rows:
        actual, expected = pop.fused[row].state_dict(), models[row].state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-12)


def state(pop: hf.Population, row: int) -> Tensors:
    return {name: value.clone() for name, value in pop.fused[row].state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_of_a_step_equal_the_loop(accumulate: int) -> None:
    """Gradients are projected before they are clipped, and decoders are normed after the step."""
    pop, models = each_population(accumulate=accumulate, clip_norm=0.05)
    pop.register_gradient_hook(project)
    pop.optimizer.register_step_post_hook(hf.each(unit_norm).step_hook(pop))
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(models, RATES, strict=True)]
    for update in range(4):
        for member, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(accumulate):
                x = each_batch(10 * update + part)
                (F.mse_loss(member(x), x) / accumulate).backward()
            loop(project, [member])
            nn.utils.clip_grad_norm_(member.parameters(), 0.05)
            optimizer.step()
            loop(unit_norm, [member])
        for part in range(accumulate):
            x = each_batch(10 * update + part)
            pop.step(x, x)
        if update == 1:
            pop.stop(2)
    equal(pop, models, [0, 1, 3])


def test_a_member_that_overflows_under_a_scaler_is_left_alone() -> None:
    pop, _ = each_population(scaler=hf.optim.GradScaler(init_scale=[1.0, 1e308, 1.0, 1.0]))
    pop.register_gradient_hook(project)
    pop.optimizer.register_step_post_hook(hf.each(unit_norm).step_hook(pop))
    before = [state(pop, row) for row in range(4)]
    pop.step(each_batch(0) * 1e3, each_batch(1))
    after = [state(pop, row) for row in range(4)]
    unchanged = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(before, after, strict=True)]
    assert unchanged == [False, True, False, False]


# An ensemble gives the moments of its members' outputs, also exported; selection equals that of a plain loop.
BATCHES = [(torch.randn(6, 4, dtype=DOUBLE), torch.tensor([0, 1, 2, 0, 1, 2]))]


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


def ensemble_close(actual: Any, expected: Any) -> None:
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
    ensemble_close(ensemble(x), expected)
    program = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)})
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    served = torch.export.load(file).module()
    for samples in (2, 5, 9):
        x = torch.randn(samples, 4, dtype=DOUBLE)
        ensemble_close(served(x), ensemble(x))
    twin = hf.Ensemble(hf.fuse([net() for _ in models]), WEIGHTS[name], softmax=softmax).eval()
    twin.load_state_dict(ensemble.state_dict())
    ensemble_close(twin(x), ensemble(x))


@needs_compiler
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_package_serves_any_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    ensemble = hf.Ensemble(hf.fuse([net() for _ in range(3)]), [1, 2, 1], softmax=-1).eval()
    x = torch.randn(5, 4, dtype=DOUBLE)
    program = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)})
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "ensemble.pt2"))
    served = torch._inductor.aoti_load_package(package)
    for samples in (2, 9):
        x = torch.randn(samples, 4, dtype=DOUBLE)
        ensemble_close(tuple(served(x)), ensemble(x))


WRONG: dict[str, tuple[Callable[[hf.FusedModule], object], str]] = {
    "count": (lambda fused: hf.Ensemble(fused, [1.0]), r"weights \[1.0\] of 3 members"),
    "negative": (lambda fused: hf.Ensemble(fused, [1, -1, 1]), "at least 0"),
    "none": (lambda fused: hf.Ensemble(fused, [0, 0, 0]), "a sum above 0"),
    "nan": (lambda fused: hf.Ensemble(fused, [1, float("nan"), 1]), "at least 0"),
    "size": (lambda fused: hf.select(fused, BATCHES, 0), "size=0: at least one member"),
    "empty": (lambda fused: hf.select(fused, [], 1), "the loader gave no batch"),
    "mode": (lambda fused: hf.select(fused, BATCHES, 1, mode="max"), "without a score"),
    "targets": (
        lambda fused: hf.select(fused, [(BATCHES[0][0], hf.stacked(torch.zeros(3, 6)))], 1),
        "each member its own target",
    ),
    "shapes": (lambda fused: hf.select(fused, [(BATCHES[0][0], torch.zeros(6))], 1), r"\[6, 3\] for targets \[6\]"),
    "score": (
        lambda fused: hf.select(fused, BATCHES, 1, lambda p, y: p),
        "the score must give a number for .* got tensor of torch.float64",
    ),
    "no score": (lambda fused: hf.select(fused, BATCHES, 1, lambda p, y: float("nan")), "there is no member to choose"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str) -> None:
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        call(hf.fuse([net() for _ in range(3)]))


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
    ensemble_close(chosen.weights, torch.tensor([order.count(k) / len(order) for k in range(8)], dtype=DOUBLE))
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
    ensemble_close(ensemble(x), moments([member(x).softmax(-1) for member in alone], PARTS[name]))
    if name in ("all", "some"):
        program = torch.export.export(ensemble, (x,), dynamic_shapes={"args": ({0: torch.export.Dim("batch")},)})
        ensemble_close(program.module()(x[:5]), ensemble(x[:5]))
    if name == "all":
        xs = torch.randn(9, 4, 5, dtype=DOUBLE)
        outputs = [member(row).softmax(-1) for member, row in zip(alone, xs, strict=True)]
        ensemble_close(ensemble(hf.stacked(xs)), moments(outputs, None))
        with pytest.raises(ValueError, match="a stacked argument has 8 entries"):
            ensemble(hf.stacked(xs[:8]))
