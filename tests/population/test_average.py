"""The average of members is that of their state dicts, and federated averaging is that of a loop over clients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import hfusion as hf
from tests.acts.zoo import ZOO

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


@pytest.mark.parametrize("into", ["all", 1, [3, 0]])
@pytest.mark.parametrize("optimizer", ["keep", "reset"])
def test_it_is_written_into_rows(into: Any, optimizer: Any) -> None:
    pop = population("batch norm")
    before = states(pop)
    moments = {name: value.clone() for name, value in momentum(pop).items()}
    assert pop.average([0, 1], [1, 3], into=into, optimizer=optimizer) is None
    expected = mean(before[:2], [1, 3])
    rows = [0, 1, 3] if into == "all" else [into] if isinstance(into, int) else into
    for row in (0, 1, 3):
        close(pop.fused[row].state_dict(), expected if row in rows else before[row])
        for name, value in momentum(pop).items():
            fresh = optimizer == "reset" and row in rows
            assert torch.equal(value[row], torch.zeros_like(value[row]) if fresh else moments[name][row])
    torch.testing.assert_close(pop.hparams["lr"], torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=DOUBLE))
    pop.step(*batch(9))


def momentum(pop: hf.Population) -> dict[str, Tensor]:
    return {name: pop.optimizer.state[p]["momentum_buffer"] for name, p in pop.fused.named_parameters()}


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


def test_a_member_of_weight_zero_has_no_effect_on_the_average() -> None:
    pop = population("batch norm", 2)
    before = states(pop)
    with torch.no_grad():
        pop.fused.get_parameter("0.weight")[1] = torch.nan
    pop.average(weights=[1, 0], into="all")
    close(pop.fused[1].state_dict(), {**before[0]})


def test_halves_are_averaged_in_float32() -> None:
    pop = hf.Population(
        [nn.Linear(1, 1, bias=False) for _ in range(300)],
        optimizer=lambda params: hf.optim.SGD(params, lr=0.1),
        loss=F.mse_loss,
        compile=False,
    )
    pop.fused.bfloat16()
    with torch.no_grad():
        pop.fused.get_parameter("weight")[:, 0, 0] = torch.arange(1.0, 301)
    values = torch.arange(1.0, 301).bfloat16().float()
    model = pop.average()
    assert isinstance(model, nn.Module)
    assert model.get_parameter("weight").item() == values.mean().bfloat16().item()


WRONG: dict[str, tuple[Callable[[hf.Population], object], str]] = {
    "free": (lambda pop: pop.average([0, 2]), "row 2 is free"),
    "into a free row": (lambda pop: pop.average(into=2), "row 2 is free"),
    "twice": (lambda pop: pop.average([0, 0]), "row 0 comes 2 times"),
    "count": (lambda pop: pop.average([0, 1], [1.0]), r"weights \[1.0\] for the average of rows \[0, 1\]"),
    "negative": (lambda pop: pop.average([0, 1], [1.0, -1.0]), "at least 0"),
    "zero": (lambda pop: pop.average([0, 1], [0, 0]), "a sum above 0"),
    "none": (lambda pop: pop.average([]), "average of no rows"),
    "word": (lambda pop: pop.average(into="every"), "'every' is no row|'e' is no row"),  # type: ignore[arg-type]
    "optimizer": (lambda pop: pop.average(into="all", optimizer="drop"), "optimizer='drop'"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_change_nothing(name: str) -> None:
    pop = population("batch norm")
    before = states(pop)
    call, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        call(pop)
    for row in (0, 1, 3):
        close(pop.fused[row].state_dict(), before[row])


def test_between_updates_only() -> None:
    pop = population("batch norm", 2, accumulate=2)
    with pytest.raises(ValueError, match="1 of 2 steps of an update of row 0 are made"):
        pop.average(into="all")
