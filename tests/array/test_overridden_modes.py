"""The members' own train and eval decide, as they do for a member alone."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import close, normal

Make = Callable[[], nn.Module]
Change = Callable[[Any], object]


class Backbone(nn.Module):
    """Its statistics are frozen, also in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(self.fc(x)).tanh())

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.bn.eval()
        return self


class Teacher(nn.Module):
    """A student beside a teacher that is never in train mode; eval is its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def eval(self) -> Teacher:
        self.student.eval()
        self.training = False
        return self


class Merging(nn.Linear):
    """Low-rank adapters that are added to the weight in eval mode, as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).data
            self.merged = not mode
        return self


class Scaled(nn.Module):
    """Sets an attribute, a buffer and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = 1.0
        self.register_buffer("switches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).sin() * self.scale)

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.scale = 2.0 if mode else 0.5
        self.switches += 1
        self.body.requires_grad_(mode)
        return self


class Differing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.number, self.scale = nn.Linear(4, 4), 0.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale

    def train(self, mode: bool = True) -> Differing:
        super().train(mode)
        self.scale = 1 + self.number * mode
        return self


def frozen(self: Any, mode: bool = True) -> Any:
    nn.Module.train(self, mode)
    self[1].eval()
    return self


def on_the_instance() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.train = types.MethodType(frozen, model)  # type: ignore[method-assign]
    return model


MAKES: dict[str, Make] = {
    "a frozen backbone": Backbone,
    "with a part in eval": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), Backbone()),
    "a teacher": Teacher,
    "adapters that merge": lambda: nn.Sequential(Merging(), nn.Tanh(), Merging()),
    "attributes, buffers and what is trained": Scaled,
    "on the instance": on_the_instance,
}
CHANGES: Sequence[Change] = (
    lambda m: m.train(),
    lambda m: m.eval(),
    lambda m: m.train(),
    lambda m: [child.eval() for child in m.children()],
    lambda m: [child.train() for child in m.children()],
    lambda m: m.train(False),
)


def compare(array: hf.FusedModule, alone: Sequence[nn.Module], x: Tensor) -> None:
    """Flags, outputs, gradients, parameters, buffers, and what is trained."""
    array.zero_grad()
    y = array(x)
    rows = []
    for b, model in enumerate(alone):
        model.zero_grad()
        rows.append(model(x))
        rows[-1].sin().sum().backward()
        for path, module in model.named_modules():
            assert array.get_submodule(path).training == module.training, path
            assert array[b].get_submodule(path).training == module.training, path
    close(y, rows, "output")
    y.sin().sum().backward()
    for name, parameter in array.named_parameters():
        expected = [model.get_parameter(name) for model in alone]
        close(parameter, expected, name)
        assert parameter.requires_grad == expected[0].requires_grad, name
        assert (parameter.grad is None) == (expected[0].grad is None), name
        if parameter.grad is not None:
            close(parameter.grad, [p.grad for p in expected], f"gradient of {name}")  # type: ignore[misc]
    for name, buffer in array.named_buffers():
        close(buffer, [model.get_buffer(name) for model in alone], name)


@pytest.mark.parametrize("name", MAKES)
def test_modes_are_as_alone(name: str) -> None:
    models = [MAKES[name]().double() for _ in range(2)]
    alone, array, x = copy.deepcopy(models), hf.fuse(models), normal(6, 4)
    for model, other in zip(models, alone, strict=True):
        if "train" in vars(model):
            other.train = types.MethodType(frozen, other)  # type: ignore[method-assign]
    compare(array, alone, x)
    for change in CHANGES:
        for module in (array, *alone):
            change(module)
        compare(array, alone, x)
    assert len(array.report().parts) <= 6


class Growing(nn.Linear):
    def train(self, mode: bool = True) -> Growing:
        self.weight = nn.Parameter(torch.ones(2, 2))
        return super().train(mode)


class SharedWrite(nn.Linear):
    def train(self, mode: bool = True) -> SharedWrite:
        self.weight.data *= 2
        return super().train(mode)


def sharing(kind: type[nn.Linear]) -> list[nn.Module]:
    models = [kind(4, 4).requires_grad_(False) for _ in range(2)]
    models[1].weight = models[0].weight
    return list(models)


def untrained(mode: bool = True) -> None:
    """Does nothing."""


def by_a_function() -> nn.Module:
    model = nn.Linear(4, 4)
    model.train = untrained  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([Growing(4, 4), Growing(4, 4)], "member 0 of a fused Growing does not fit its array: weight has shape"),
        (sharing(SharedWrite), "model 0 writes into weight, which all members share"),
        ([by_a_function(), by_a_function()], "train of Linear was set to .* Define it in the class"),
    ],
)
def test_unsupported_mode_changes_are_refused_and_undone(models: list[nn.Module], words: str) -> None:
    array = hf.fuse(models)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    flags = [module.training for module in array.modules()]
    with pytest.raises(hf.FusionError, match=words):
        array.train()
    assert flags == [module.training for module in array.modules()]
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_evaluating_leaves_the_array_as_it_was() -> None:
    array = hf.fuse([Differing(), Differing()])
    array.train()
    array.get_submodule("fc").eval()
    with array.evaluating():
        assert not array.training
        assert array[1].scale == 1
    assert array.training
    assert not array.get_submodule("fc").training
    plain = hf.fuse([nn.Sequential(nn.Linear(3, 2), nn.Dropout()) for _ in range(2)])
    plain[1].eval()
    with plain.evaluating():
        assert not any(member.training for member in plain)
    assert [member.training for member in plain] == [True, False]
    merging = hf.fuse([Merging(), Merging()])
    before = merging.weight.clone()
    with pytest.raises(hf.FusionError, match="own eval of Merging changes parameters or buffers"), merging.evaluating():
        pass
    assert torch.equal(merging.weight, before)
    assert merging.training
