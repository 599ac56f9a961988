"""Arrays inside models that are fused again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf


class Doubling(nn.Linear):
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


class Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


class Ensemble(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members, self.head = hf.fuse([make() for _ in range(3)]), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members(x).mean(0))


class Stacked(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members(hf.stacked(x.expand(3, *x.shape))).mean(0))


class OfMethod(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members.twice(x).mean(0))


class Deciding(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ensemble": lambda: Ensemble(dense),
    "array of arrays": lambda: hf.fuse([dense() for _ in range(2)]),
    "stacked input": lambda: Stacked(dense),
    "method": lambda: OfMethod(lambda: Doubling(4, 4)),
    "looped member": lambda: Ensemble(lambda: Branch(4, 4)),
    "looped model": lambda: Deciding(dense),
    "running statistics": lambda: Ensemble(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_arrays_train_as_alone(name: str) -> None:
    torch.manual_seed(0)
    models, x = [MODELS[name]().double() for _ in range(2)], torch.randn(5, 4, dtype=torch.float64)
    array = hf.fuse(models)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in (array, *models)]
    for _ in range(2):
        outputs, *rows = [module(x) for module in (array, *models)]
        torch.testing.assert_close(outputs, torch.stack(rows), rtol=1e-9, atol=1e-12)
        for optimizer, output in zip(optimizers, (outputs, *rows), strict=True):
            optimizer.zero_grad()
            output.sin().sum().backward()
            optimizer.step()
    for module in (array, *models):
        module.eval()
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(array(x), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.stack([m(x) for m in array.unfuse()]), expected, rtol=1e-9, atol=1e-12)
    for key, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([m.state_dict()[key] for m in models]), rtol=1e-9, atol=1e-12)


def test_options_of_members_of_members_are_honoured() -> None:
    models = [Ensemble(lambda slope=slope: nn.LeakyReLU(slope)) for slope in (0.1, 0.5)]
    array, x = hf.fuse(models), torch.randn(3, 4)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
