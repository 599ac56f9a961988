"""The average of members is that of their state dicts, and federated averaging is that of a loop over clients."""

from __future__ import annotations

import copy
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
