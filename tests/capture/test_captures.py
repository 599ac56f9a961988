"""Captures: how often forward runs, and members with containers of their own."""

from __future__ import annotations

import copy
import random
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.program import Capture
from tests.alone import assert_alone, normal
from tests.forwards.table import branch, exports, linear, module, square

# How often forward is traced and run: captures are found again, and few runs answer all questions of one.
SCALE = 2.0
SETTINGS: dict[str, Any] = {"power": 1}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Helper:
    shift = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x + self.shift


class Reading(nn.Module):
    """Reads an attribute, variables of its file through a function and a method, a class and an object."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.slope, self.table, self.helper = 0.1, [0.0, 1.0, 2.0], Helper()

    def power(self, x: Tensor) -> Tensor:
        return x ** SETTINGS["power"]

    def forward(self, x: Tensor) -> Tensor:
        h = scaled(self.power(self.linear(x.to(self.linear.weight)))) * self.factor + torch.tensor(self.table)
        return nn.functional.leaky_relu(self.helper.apply(self.drop(h)), self.slope)


class Other(Reading):
    def power(self, x: Tensor) -> Tensor:
        return -super().power(x)


def found(module: nn.Module, *args: Any, **options: Any) -> Capture:
    return capture(module, args or (torch.ones(4, 3),), {}, **options)


CHANGES: dict[str, Callable[[Reading], Any]] = {
    "attribute": lambda m: setattr(m, "slope", 0.2),
    "zero of another sign": lambda m: setattr(m, "slope", -0.1),
    "dtype": lambda m: m.double(),
    "mode": lambda m: m.eval(),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "table": lambda m: m.table.__setitem__(0, 1.0),
    "object": lambda m: setattr(m.helper, "shift", 4.0),
    "hook": lambda m: m.drop.register_forward_hook(lambda part, args, output: output * 3),
    "own method": lambda m: setattr(m, "power", lambda x: x * 5),
    "class": lambda m: setattr(m, "__class__", Other),
    "width": lambda m: setattr(m, "linear", nn.Linear(3, 3, bias=False)),
}
NAMED = [("SCALE", 3.0), ("scaled", lambda x: x), ("Reading.factor", 2.0), ("Helper.shift", 3.0)]


def test_a_capture_is_found_again_only_where_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    first_model = Reading()
    first = found(first_model).graph
    assert found(Reading()).graph is first
    for name, change in CHANGES.items():
        model = Reading()
        change(model)
        assert found(model).graph is not first, name
    for name, value in NAMED:
        with monkeypatch.context() as changed:
            changed.setattr(f"{__name__}.{name}", value)
            assert found(Reading()).graph is not first, name
    monkeypatch.setitem(SETTINGS, "power", 2)
    assert found(Reading()).graph is not first
    monkeypatch.setitem(SETTINGS, "power", 1)
    x = torch.ones(4, 3)
    graphs = [
        found(first_model, *args, **options).graph
        for args, options in [
            ([torch.ones(5, 3)], {}),
            ([torch.ones(4, 3, requires_grad=True)], {}),
            ([x], {"varying": False}),
            ([torch.ones(4, 2, 3)], {}),
            ([x], {"dims": [{1}]}),
            ([x.double()], {}),
        ]
    ]
    assert len({id(graph) for graph in [first, *graphs]}) == 7
    torch.set_default_dtype(torch.float64)
    assert found(first_model, x).graph is not first


KINDS = {
    "what has no content to compare": module(
        lambda self, x: self.fc(x) * copy.deepcopy(self.source).random(), fc=linear, source=lambda: random.Random(0)
    ),
    "a tensor that is freed with it": module(lambda self, x: self.fc(x) * self.held, fc=linear, held=torch.ones(4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_cannot_be_recognized_are_captured_each_time(kind: str) -> None:
    model = KINDS[kind]()
    assert found(model, normal(3, 4)).graph is not found(model, normal(3, 4)).graph


RUNS = {
    "layers": module(lambda self, x: self.fc(x).relu(), fc=linear),
    "branch": module(lambda self, x: branch(self.fc(x)), fc=linear),
    "branch inside": module(lambda self, x: self.inner(self.fc(x)), fc=linear, inner=module(lambda self, x: branch(x))),
    "result left": module(lambda self, x: (setattr(self, "last", self.fc(x).detach()), self.fc(x))[1], fc=linear),
    "norm and dropout": module(lambda self, x: self.m(x), m=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1))),
    "lstm": module(lambda self, x: self.m(x)[0], m=lambda: nn.LSTM(4, 4)),
}


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("kind", RUNS)
def test_forward_runs_few_times_before_the_first_output(kind: str, members: int) -> None:
    """Of these, one is the trace and one the check of the array, in which further members run once."""
    models = [RUNS[kind]() for _ in range(members)]
    code, count = type(models[0]).forward.__code__, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        # Seen from outside, as a counter in forward would be state.
        count += event == "call" and frame.f_code is code

    fused, x = hf.fuse(models), normal(5, 4)
    sys.setprofile(profile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
    finally:
        sys.setprofile(None)
    assert count <= 6 + members - 1


def test_depth_costs_no_exports() -> None:
    counts = []
    for depth in (2, 5):
        inner = lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), square()))  # noqa: E731
        deep = module(_added, rows=lambda depth=depth, inner=inner: nn.ModuleList(inner() for _ in range(depth)))
        with exports() as names:
            text = str(assert_alone([deep() for _ in range(2)], normal(3, 4)).report())
        assert all(f"loop over members, rows.{k}.1.1: " in text for k in range(depth))
        counts.append(len(names))
    assert counts[0] == counts[1]


def _added(self: Any, x: Tensor) -> Tensor:
    for row in self.rows:
        x = x + row(x)
    return x


# Members that give, and hand to one another, containers of their author's own.
@dataclass
class Plain:
    sample: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    sample: Tensor
    count: int = 3


@dataclass(slots=True)
class Slotted:
    sample: Tensor


@dataclass
class Mapped(OrderedDict[str, Any]):
    """As diffusers and transformers have them: an ordered dict of the fields that are not None, known to torch."""

    sample: Tensor | None = None
    extra: Any = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


pytree.register_pytree_node(
    Mapped,
    lambda mapped: (list(mapped.values()), list(mapped.keys())),
    lambda values, keys: Mapped(**dict(zip(keys, values, strict=True))),
)


class Named(NamedTuple):
    sample: Tensor
    inner: Any


@dataclass
class Counting:
    """Has more than its fields say."""

    sample: Tensor
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.norm = self.sample.norm()


class Around:
    def __init__(self, sample: Tensor) -> None:
        self.sample = sample


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Plain,
    "frozen": Frozen,
    "slots": Slotted,
    "mapping": lambda y: Mapped(sample=y, extra=(y * 2, None)),
    "dataclass in a dataclass": lambda y: Plain(y, {"more": Frozen(y * 2)}),
    "dataclass in a named tuple": lambda y: Named(y, Plain(y * 2, "text")),
}


class Net(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any], leaf: nn.Module | None = None) -> None:
        super().__init__()
        self.output, self.fc, self.leaf = output, nn.Linear(4, 3).double(), leaf

    def forward(self, x: Tensor) -> Any:
        y = self.output(self.fc(x))
        return y if self.leaf is None else self.leaf(y)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


def alone(models: list[nn.Module], x: Tensor, target: Tensor, steps: int) -> Tensor:
    losses = []
    for model in models:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            opt.zero_grad()
            value = loss(model(x), target)
            value.backward()
            opt.step()
        losses.append(value.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_losses_read_their_attributes(name: str, compile: bool) -> None:
    models: list[nn.Module] = [Net(OUTPUTS[name]) for _ in range(2)]
    x, target = normal(5, 4), normal(5, 3)
    fused = hf.fuse(models)
    copies = copy.deepcopy(models)
    assert type(fused(x)) is type(models[0](x))
    step = hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)
    for _ in range(3):
        losses = step(x, target)
    torch.testing.assert_close(losses, alone(copies, x, target, 3), rtol=1e-9, atol=0)
    assert compile == all(row.how != "eager" for row in step.report().rows)


@pytest.mark.parametrize("output", [Counting, Around])
def test_containers_with_more_than_their_fields_are_refused(output: Callable[[Tensor], Any]) -> None:
    with pytest.raises(hf.FusionError, match=f"returns (a )?{output.__name__}; let it return tensors only"):  # type: ignore[attr-defined]
        hf.fuse([Net(output), Net(output)])(normal(5, 4))
