"""Programs: written and read again, checked against the members, and refused where members differ."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from hfusion.compiler import compiled_program as compiling
from hfusion.core.errors import ForwardsDiffer
from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, Site, Value
from tests.alone import normal
from tests.forwards.table import linear, module
from tests.zoo import MODELS, Model


# Models of one structure whose attribute decides what forward does, or with which numbers.
class Chosen(nn.Module):
    """Its attribute ``choice`` decides what forward does."""

    def __init__(self, choice: Any, forward: Callable[[Chosen, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.last = (
            nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 6), nn.Linear(6, 2),
        )  # fmt: skip
        self.choice, self.code = choice, forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.code(self, x))


def steps(model: Chosen, x: Tensor) -> Tensor:
    for _ in range(model.choice):
        x = model.first(x).tanh()
    return x


def threshold(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return h.relu() if model.choice > 0.5 else h.tanh()


def only_in_evaluation(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return h if model.training else getattr(h, model.choice)()


def on_values(model: Chosen, x: Tensor) -> Tensor:
    h = model.first(x)
    return -h if model.choice and h.sum() > 0 else h.tanh()


# How forward hangs on a choice, the choices, and into how many groups they fall.
CHOICES: dict[str, tuple[Callable[[Chosen, Tensor], Tensor], list[Any], int]] = {
    "activation by name": (lambda model, x: getattr(torch, model.choice)(model.first(x)), ["relu", "tanh", "relu"], 2),
    "number of steps": (steps, [1, 2, 3, 2], 3),
    "a number that decides": (threshold, [0.1, 0.9, 0.2], 2),
    "only in evaluation": (only_in_evaluation, ["relu", "tanh"], 2),
    "a branch on values": (on_values, [True, False], 1),
    "a number": (lambda model, x: model.first(x) * model.choice, [0.5, 0.7, 0.0], 1),
    "dropout": (lambda model, x: F.dropout(model.first(x), model.choice, model.training), [0.0, 0.3, 1.0], 1),
}


# Models of one structure that do different things are refused with what differs, and fused group by group.
X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

NAMED = {
    "activation by name": "choice is 'relu' in model 0 and 'tanh' in model 1; step 10 is aten.relu.default in model 0",
    "number of steps": "choice is 1 in model 0 and 2 in model 1; the models' graphs have different numbers of nodes",
    "a number that decides": "choice is 0.1 in model 0 and 0.9 in model 1; step",
    "only in evaluation": "choice is 'relu' in model 0 and 'tanh' in model 1; step",
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_differs_is_named_and_its_groups_can_be_fused(name: str) -> None:
    forward, choices, count = CHOICES[name]
    models: list[nn.Module] = [Chosen(choice, forward) for choice in [*choices, choices[0]]]
    if name == "only in evaluation":
        models = [model.eval() for model in models]
    groups: tuple[tuple[int, ...], ...] = (tuple(range(len(models))),)
    if count > 1:
        with pytest.raises(ForwardsDiffer, match=NAMED[name]) as raised:
            hf.fuse(models)(X)
        groups = raised.value.groups
        first = ", ".join(map(str, groups[0]))
        assert f"Fuse models {first} and model" in str(raised.value)
    assert len(groups) == count
    assert sorted(row for group in groups for row in group) == list(range(len(models)))
    for group in groups:
        members = [models[row] for row in group]
        torch.manual_seed(1)
        outputs = hf.fuse(members)(X)
        if name != "dropout":
            torch.testing.assert_close(outputs, torch.stack([model(X) for model in members]), rtol=1e-9, atol=1e-12)


# Every random operator of torch: members draw for themselves, and the self-check replays them or says why not.
Forward = Callable[[Any, Tensor], Tensor]


def filled(name: str, *args: Any) -> Forward:
    return lambda self, h: h * getattr(torch.empty_like(h), name)(*args)


def images(function: Callable[..., Tensor], dims: int, inplace: bool) -> Forward:
    return lambda self, h: function((h * 2).view(-1, 2, *(1,) * (dims - 1), 2), 0.4, True, inplace)


def written_slice(self: Any, h: Tensor) -> Tensor:
    noise = h * 2
    noise[:, 1:3].uniform_(1, 2)
    return noise


def stages(self: Any, h: Tensor) -> Tensor:
    h = checkpoint(lambda z: F.dropout(self.fc(F.dropout(z, 0.3)).tanh(), 0.2), F.dropout(h, 0.2), use_reentrant=False)
    return h * torch.rand_like(h)


CHECKED: dict[str, Forward] = {
    "rrelu": lambda self, h: F.rrelu(h, training=True),
    "dropout": lambda self, h: F.dropout(h, 0.4),
    "dropout_ of a value used before": lambda self, h: h.exp() + F.dropout(h * 2, 0.4, True, True),
    "alpha_dropout": lambda self, h: F.alpha_dropout(h, 0.4, True),
    "feature_alpha_dropout": lambda self, h: F.feature_alpha_dropout(h.view(-1, 2, 2), 0.4, True),
    **{
        f"dropout{dims}d{'_' * inplace}": images(function, dims, inplace)
        for dims, function in ((1, F.dropout1d), (2, F.dropout2d), (3, F.dropout3d))
        for inplace in (False, True)
    },
    "native_dropout": lambda self, h: torch.native_dropout(h, 0.4, True)[0],
    "bernoulli": lambda self, h: h * torch.bernoulli(h.sigmoid()),
    "bernoulli_ of numbers": filled("bernoulli_", 0.3),
    "uniform_": filled("uniform_", 0.0, 2.0),
    "uniform_ of a slice": written_slice,
    "exponential_": filled("exponential_", 2.0),
    "random_": filled("random_", 5),
    "multinomial": lambda self, h: h.gather(1, torch.multinomial(h.softmax(-1), 2)),
    "randperm": lambda self, h: h[:, torch.randperm(4)],
    "randint_like": lambda self, h: h * torch.randint_like(h, 1, 50),
    "randn": lambda self, h: h * torch.randn(4, dtype=h.dtype),
    "normal of tensors": lambda self, h: h * torch.normal(h, h.detach().abs()),
    "normal of numbers": lambda self, h: h * torch.normal(1.0, 2.0, (4,)),
    "poisson": lambda self, h: h * torch.poisson(h.exp() * 9),
    "fractional_max_pool2d": lambda self, h: F.fractional_max_pool2d(
        (h[:, None, :, None] * torch.arange(60)).repeat(1, 1, 15, 1), 2, output_size=(9, 9)
    ),
    "gumbel_softmax": lambda self, h: F.gumbel_softmax(h),
    "attention": lambda self, h: F.scaled_dot_product_attention(*[h.view(-1, 2, 2)] * 3, dropout_p=0.3),
    "a checkpoint": lambda self, h: checkpoint(lambda z: self.fc(F.dropout(z)).tanh(), h, use_reentrant=False),
    "a checkpoint between draws": stages,
    "rand with out": lambda self, h: h * torch.rand(4, out=torch.empty(4, dtype=h.dtype)),
}


def drawing(forwards: dict[str, Forward]) -> tuple[hf.FusedModule, dict[str, Tensor]]:
    """An array of three equal members, and what it gives for a tensor that stays as it is."""
    combined = lambda self, x: {name: forward(self, self.fc(x)) for name, forward in forwards.items()}  # noqa: E731
    model = module(combined, fc=linear)()
    array, x = hf.fuse([copy.deepcopy(model) for _ in range(3)]), normal(16, 4)
    before = x.clone()
    outputs = array(x)
    assert torch.equal(x, before)
    sum(y.sum() for y in outputs.values()).backward()
    return array, outputs


def test_members_draw_for_themselves_and_are_checked() -> None:
    array, outputs = drawing(CHECKED)
    assert "self-check passed" in str(array.report())
    for name, y in outputs.items():
        assert not torch.equal(y[0], y[1]), name
        assert not torch.equal(y[0], y[2]), name


def seeded(self: Any, h: Tensor) -> Tensor:
    torch.manual_seed(0)
    return h * torch.rand_like(h)


def forked(self: Any, h: Tensor) -> Tensor:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        h = h * torch.rand_like(h)
    return F.dropout(h)


@pytest.mark.parametrize("forward", [seeded, forked])
def test_a_forward_that_seeds_runs_member_by_member(forward: Forward) -> None:
    array, outputs = drawing({"output": forward})
    assert "forward does what a graph would lose" in str(array.report())
    if forward is seeded:
        assert torch.equal(outputs["output"][0], outputs["output"][1])


# The self-check catches a wrong rule and names the node, stays silent on right ones, and leaves no trace.
aten = torch.ops.aten


def wrong_values(site: Site, self: Value) -> Call:
    return site.call(torch.sigmoid, (self.to(Layout.STACKED),), Layout.STACKED, "planted")


def wrong_gradient(site: Site, self: Value) -> Call:
    return site.call(lambda x: x.tanh().detach() + 0 * x, (self.to(Layout.STACKED),), Layout.STACKED, "planted")


def wrong_member(site: Site, self: Value) -> Call:
    def swapped(x: Tensor) -> Tensor:
        return torch.cat([x[:1], x[1:2] * 0.99, x[2:]]).tanh()

    return site.call(swapped, (self.to(Layout.STACKED),), Layout.STACKED, "planted")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (wrong_values, r"output 0 of model 0 differs .*; the first node that differs is tanh = aten.tanh.default"),
        (wrong_gradient, r"gradient of .* of model 0 differs .*a gradient does"),
        (wrong_member, r"of model 1 differs .*; the first node that differs is tanh"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_wrong_rule_is_caught(
    rule: Callable[..., Any], message: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "RULES", {**compiling.RULES, aten.tanh.default: rule})
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(dtype) for _ in range(3)]
    with pytest.raises(hf.FusionError, match=f"self-check: .*{message}"):
        hf.fuse(models)(torch.randn(3, 4, dtype=dtype))
    unchecked = hf.fuse(models, verify=False)
    unchecked(torch.randn(3, 4, dtype=dtype))
    assert "self-check not run" in str(unchecked.report())


# Reads a number where no search follows it.
Hidden = module(lambda self, x: self.layer(x) * sys.modules["hidden"].factor, layer=lambda: nn.Linear(4, 1))


@pytest.mark.parametrize("compiled", [None, False, True])
def test_a_value_that_no_guard_follows_is_found_at_every_third_call(
    compiled: bool | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: a call of the array in eval mode; else steps."""
    monkeypatch.setattr("hfusion.array.module.RECHECKED", 3)
    monkeypatch.setattr("hfusion.step.train_step.RECHECKED", 3)
    hidden: Any = ModuleType("hidden")
    monkeypatch.setitem(sys.modules, "hidden", hidden)
    hidden.factor = 1.0
    array, x = hf.fuse([Hidden() for _ in range(2)]).train(compiled is not None), normal(3, 4)
    step = hf.train_step(array, F.mse_loss, hf.optim.SGD(array.parameters(), lr=0.0), compile=compiled)
    call = partial(array, x) if compiled is None else partial(step, x, normal(3, 1))
    call()
    hidden.factor = 2.0
    call()
    with pytest.raises(hf.FusionError, match="self-check: output 0 of model 0 differs"):
        call()


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_false_alarm_in_float32(model: Model) -> None:
    x = model.draw(4)
    array = hf.fuse([model.make().float() for _ in range(3)])
    array(x.float() if x.is_floating_point() else x)
    assert "self-check not run" not in str(array.report())


def test_under_autocast_rounding_is_that_of_the_cast() -> None:
    """A GRU is computed in other steps than the members', and each of them rounds to bfloat16."""
    models = [nn.GRU(4, 6, batch_first=True) for _ in range(3)]
    x = torch.randn(5, 7, 4)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            models[0](x)
        except RuntimeError as error:
            pytest.skip(f"torch computes no such GRU on this processor: {error}")
        array = hf.fuse(models)
        array(x)
    assert "self-check passed" in str(array.report())
