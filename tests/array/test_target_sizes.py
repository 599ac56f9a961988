"""Targets and inputs of which any size may differ between members: losses, updates and metrics of each as alone."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

CLASSES = (3, 5, 3, 7)
X = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def own_mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().sum(1).mean()


def one_hot() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [F.one_hot(torch.randint(c, (6,), generator=draw), c).double() for c in CLASSES]


def values() -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(6, c, dtype=torch.float64, generator=draw) for c in CLASSES]


CASES: dict[str, tuple[Callable[..., Tensor], Callable[[], list[Tensor]]]] = {
    "one-hot targets": (F.cross_entropy, one_hot),
    "regression targets": (F.mse_loss, values),
    "own reduction": (own_mean, values),
}


def heads() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, c)).double() for c in CLASSES]


def sgd(params: list[nn.Parameter]) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=[0.1, 0.2, 0.3, 0.4], momentum=0.9)


def alone(loss: Callable[..., Tensor], targets: list[Tensor], steps: int) -> tuple[list[nn.Module], Tensor]:
    models, losses = heads(), []
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=0.1 * (1 + row), momentum=0.9) for row, model in enumerate(models)
    ]
    for _ in range(steps):
        member_losses = []
        for model, optimizer, target in zip(models, optimizers, targets, strict=True):
            optimizer.zero_grad()
            member_loss = loss(model(X), target)
            member_loss.backward()
            optimizer.step()
            member_losses.append(member_loss.detach())
        losses.append(torch.stack(member_losses))
    return models, torch.stack(losses)


def by_population(loss: Callable[..., Tensor], targets: list[Tensor], compile: bool) -> tuple[list[nn.Module], Tensor]:
    pop = hf.Population(heads(), optimizer=sgd, loss=loss, compile=compile)
    losses = torch.stack([pop.step(X, hf.stacked(targets)).detach() for _ in range(3)])
    return [pop.models[row] for row in range(len(CLASSES))], losses


def by_train(loss: Callable[..., Tensor], targets: list[Tensor], compile: bool) -> tuple[list[nn.Module], Tensor]:
    task = hf.Task(heads(), loss, sgd, [(X, hf.stacked(targets))] * 3, compile=compile)
    result = hf.train([task])["task"]
    return list(result.models), result.losses


TRAINED = {"Population": by_population, "train": by_train}


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("how", TRAINED)
@pytest.mark.parametrize("name", CASES)
def test_each_trains_as_alone(name: str, how: str, compile: bool) -> None:
    loss, make = CASES[name]
    targets = make()
    models, expected = alone(loss, targets, 3)
    trained, losses = TRAINED[how](loss, targets, compile)
    torch.testing.assert_close(losses, expected, rtol=1e-9, atol=1e-12)
    for member, model in zip(trained, models, strict=True):
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(member.state_dict()[name], tensor, rtol=1e-9, atol=1e-12)


def test_inputs_may_differ_in_any_size() -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).double() for _ in range(3)]
    fused = hf.fuse(copy.deepcopy(models))
    xs = [torch.randn(n, length, 4, dtype=torch.float64) for n, length in ((2, 3), (2, 5), (4, 3))]
    for _ in range(2):
        y = fused(hf.stacked(xs))
        for row, model in enumerate(models):
            torch.testing.assert_close(y[row], model(xs[row]), rtol=1e-9, atol=1e-12)
