"""Classes that copy themselves: arrays, populations and tasks train them as alone, whatever their copies lose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hfusion as hf
from tests.alone import normal


class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.norm, self.scales = nn.Linear(4, 3), nn.BatchNorm1d(3), {"out": scale}
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x)) * self.scale * self.scales["out"]
        return y


class LoadsState(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied


class ReturnsItself(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        return self


class SharesParameters(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc = self.fc
        return copied


class CopiesOneLayer(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm)
        return copied


class LosesNumbers(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm, memo)
        return copied


class LosesState(Net):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "scale": 1.0}


class Reduced(Net):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced, (type(self), {name: tensor.clone() for name, tensor in self.state_dict().items()})


def _reduced(kind: type[Net], state: dict[str, Tensor]) -> Net:
    copied = kind()
    copied.load_state_dict(state)
    return copied


class Outer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.head = LoadsState(scale), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


def generated(scale: float) -> nn.Module:
    """Return a module whose class has been generated for it, with the forward of a graph."""
    module = Net(scale)
    graph = fx.Graph()
    graph.output(graph.call_module("norm", (graph.call_module("fc", (graph.placeholder("x"),)),)))
    traced = fx.GraphModule(module, graph)
    traced.note = "lost by its own copying"
    return nn.Sequential(traced, nn.Linear(3, 3))


KINDS = (
    generated,
    LoadsState,
    ReturnsItself,
    SharesParameters,
    CopiesOneLayer,
    LosesNumbers,
    LosesState,
    Reduced,
    Outer,
)
RATE = 0.1


def models(kind: Callable[[float], nn.Module], members: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(2.0).double() for _ in range(members)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return normal(6, 4), normal(6, 3)


def sgd(parameters: Any) -> Any:
    return hf.optim.SGD(parameters, lr=RATE)


def of_array(members: list[nn.Module]) -> hf.FusedModule:
    fused = hf.fuse(members)
    step = hf.train_step(fused, F.mse_loss, sgd(fused.parameters()))
    for _ in range(2):
        step(*batch())
    return fused


def of_population(members: list[nn.Module]) -> hf.Population:
    pop = hf.Population(members, optimizer=sgd, loss=F.mse_loss)
    for _ in range(2):
        pop.step(*batch())
    return pop


def of_plain_members(members: list[nn.Module]) -> list[nn.Module]:
    """Train in a population with a model of another kind, so that a single one is a plain member."""
    pop = of_population([*members, nn.Linear(4, 3).double()])
    return [pop.stop(row) for row in range(len(members))]


def appended(members: list[nn.Module]) -> list[nn.Module]:
    fused = of_array(members)
    fused.append([fused.unfuse()[0]])
    fused.keep(list(range(len(members))))
    return fused.unfuse()


def of_task(members: list[nn.Module]) -> list[nn.Module]:
    report = hf.train([hf.Task(members, F.mse_loss, sgd, [batch()] * 2, name="task")])
    return list(report["task"].models)


WAYS: dict[str, Callable[[list[nn.Module]], list[nn.Module]]] = {
    "unfuse": lambda members: of_array(members).unfuse(),
    "members": lambda members: list(of_array(members)),
    "deepcopy": lambda members: copy.deepcopy(of_array(members)).unfuse(),
    "append": appended,
    "hf.train": of_task,
    "stop": lambda members: of_population(members).stop(list(range(len(members)))),
    "plain": of_plain_members,
}


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_as_alone(kind: Callable[[float], nn.Module], way: str, members: int) -> None:
    alone = models(kind, members)
    for model in alone:
        opt = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(2):
            opt.zero_grad()
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            opt.step()
    trained = WAYS[way](models(kind, members))
    for model, expected in zip(trained, alone, strict=True):
        for (name, tensor), (_, value) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
            torch.testing.assert_close(tensor, value, rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(model.eval()(batch()[0]), expected.eval()(batch()[0]), rtol=1e-9, atol=1e-12)
