"""Which models are taken for one shape, and which members share a capture."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.nn.utils.parametrizations as parametrizations
from torch import fx, nn

import hfusion as hf
from hfusion.capture.compare_models import compare
from tests.alone import assert_alone, net, normal


def with_state(forward: Callable[..., Any], states: list[Any]) -> list[nn.Module]:
    make = net(forward)
    models = []
    for state in states:
        models.append(make())
        models[-1].state = state
    return models


SCALARS: dict[str, tuple[Callable[..., Any], list[Any]]] = {
    "factor": (lambda self, x: self.fc(x) * self.state + self.state, [1.0, 2.0, 0.5]),
    "int": (lambda self, x: self.fc(x) * self.state, [1, 2, 3]),
    "power": (lambda self, x: self.fc(x) ** self.state, [1, 2, 3]),
    "size guard": (lambda self, x: self.fc(x) * (2.0 if x.shape[0] > self.state else -1.0), [3, 5, 3]),
    "tensor": (lambda self, x: self.fc(x) * self.state, [normal(4), normal(4), normal(1).expand(4)]),
    "list of tensors": (
        lambda self, x: self.fc(x) * self.state[0] + self.state[1],
        [[normal(4), 1.0] for _ in "abc"],
    ),
    "array": (lambda self, x: self.fc(x) * float(self.state.sum()), [np.ones(2), np.ones(2), np.zeros(2)]),
    "default in one": (lambda self, x: torch.add(self.fc(x), x, alpha=self.state), [1, 2, 1]),
    "default slope in one": (lambda self, x: F.leaky_relu(self.fc(x), self.state), [0.01, 0.2, 0.01]),
    "function": (lambda self, x: self.state(self.fc(x)), [torch.tanh, torch.tanh]),
    "mapping": (
        lambda self, x: self.fc(x) * self.state["a"]["b"],
        [{"a": {"b": k}} for k in (1.0, 2.0, 1.0)],
    ),
}


@pytest.mark.parametrize("name", SCALARS)
def test_attributes_that_differ_are_honoured(name: str) -> None:
    assert_alone(with_state(*SCALARS[name]), normal(8, 4), normal(4, 4), normal(2, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda k: nn.LayerNorm(4, eps=0.1 * k),
        lambda k: nn.BatchNorm1d(4, eps=0.1 * k, momentum=0.2 * k),
        lambda k: nn.LeakyReLU(0.1 * k),
        lambda k: nn.Sequential(nn.ELU(0.5 * k), nn.Hardtanh(-0.3 * k, 0.4 * k), nn.Softplus(0.7 * k)),
        lambda k: nn.GroupNorm(2, 4, eps=0.1 * k),
        lambda k: nn.Dropout(0.3 * k).eval(),
    ],
)
def test_scalars_of_torch_modules(make: Callable[[int], nn.Module]) -> None:
    models = [nn.Sequential(nn.Linear(4, 4), make(k)).double() for k in (1, 2, 3)]
    for model in models:
        model.train(model[1].training)
    assert_alone(models, normal(6, 4), normal(3, 4))


def test_variants() -> None:
    comparison = compare([nn.Dropout(p) for p in (0.1, 0.5, 0.1)])
    assert comparison.variants == (0, 1, 0)
    assert comparison.shared == frozenset()
    states = [np.ones(2), np.ones(2), np.zeros(2)]
    assert compare(with_state(lambda self, x: x, states)).variants == (0, 0, 1)


def test_a_tensor_of_the_first_and_the_last_model_is_not_that_of_all() -> None:
    models = [nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 3)).double() for _ in range(3)]
    models[2][0] = models[0][0]
    assert compare(models).shared == frozenset()
    assert_alone(models, normal(5, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.c = nn.Sequential(self.a, nn.BatchNorm1d(4))
        self.d = self.c
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.d(self.c(self.b(x))) * self.hidden


class Held(nn.Module):
    """References to registered modules, in whatever holds them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.again = nn.Sequential(self.fc)
        self.refs: Any = {
            "list": [self.fc],
            "method": self.fc.forward,
            "partial": functools.partial(self.fc),
            "me": self,
        }
        object.__setattr__(self, "hidden", self.fc)
        self.acts = {"tanh": nn.Tanh()}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.refs["list"][0](x) + self.refs["method"](x) + self.refs["partial"](x) + self.hidden(x)
        return self.acts["tanh"](self.refs["me"].again(x))


def traced() -> nn.Module:
    return nn.Sequential(fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), nn.Linear(4, 4))


MADE = iter(range(100))


def made_here() -> nn.Module:
    factor = float(next(MADE))

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.fc(x) * factor

    return Scaled()


STRUCTURES: dict[str, Callable[[], nn.Module]] = {
    "tied, used twice, non-persistent": Tied,
    "references": Held,
    "graph module": traced,
    "class of each instance": made_here,
    "weight_norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(4, 4)), nn.Linear(4, 4)),
    "cumulative BatchNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
    "no parameters": lambda: nn.Sequential(nn.ReLU(), nn.Flatten()),
    "identity": nn.Identity,
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures(name: str) -> None:
    models = [STRUCTURES[name]().double() for _ in range(3)]
    assert_alone(models, normal(4, 4), hf.stacked(normal(3, 5, 4)), normal(4, 4))


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.LSTM(4, 3, 2, bidirectional=True),
        lambda: nn.GRU(4, 3, 2, dropout=0.5).eval(),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.3).eval(),
    ],
)
def test_sequence_models(make: Callable[[], nn.Module]) -> None:
    assert_alone([make().double() for _ in range(2)], normal(5, 2, 4))


def other_code(power: int) -> nn.Module:
    class Raised(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x**power

    return fx.symbolic_trace(Raised())


def test_graph_modules_with_different_code_are_reported() -> None:
    with pytest.raises(hf.FusionError, match="Raised in model 0 and Raised, a class with other code, in model 1"):
        hf.fuse([other_code(2), other_code(3)])


def test_weak_references_are_reported() -> None:
    model = Tied()
    model.ref = weakref.ref(model.a)
    with pytest.raises(hf.FusionError, match="attribute ref is a weak reference to Linear"):
        hf.fuse([model])
