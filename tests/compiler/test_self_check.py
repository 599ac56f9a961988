"""The self-check catches a wrong rule and names the node, stays silent on right ones, and leaves no trace."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler import compiled_program as compiling
from hfusion.compiler import verify
from hfusion.compiler.verify import MIN_COMPARED, relative_difference
from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, Site, Value
from tests.forwards.table import branch, buffer, module
from tests.zoo import MODELS, Model

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
        (
            wrong_values,
            r"output 0 of model 0 differs .*; the first node that differs is tanh = aten.tanh.default",
        ),
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


def counted(self: Any, x: Tensor) -> Tensor:
    scaled = x / (self.count + 1)
    self.count += 1
    return scaled


BRANCHING, COUNTING = module(lambda self, x: branch(x)), module(counted, count=buffer(0.0, 1))
AROUND = [BRANCHING, lambda: nn.Dropout(0.5), COUNTING, lambda: nn.BatchNorm1d(4).double()]


@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize(("rule", "message"), [(wrong_values, "differs is tanh"), (wrong_gradient, "a gradient does")])
def test_only_the_wrong_node_is_named(
    around: Callable[[], nn.Module], rule: Callable[..., Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiling, "RULES", {**compiling.RULES, aten.tanh.default: rule})
    models = [nn.Sequential(nn.Linear(4, 4), around(), nn.Tanh(), around(), nn.Linear(4, 4)).double() for _ in "ab"]
    with pytest.raises(hf.FusionError, match=f"self-check: .*{message}"):
        hf.fuse(models)(torch.randn(3, 4, dtype=torch.float64))


@pytest.mark.parametrize("model", MODELS, ids=str)
def test_no_false_alarm_in_float32(model: Model) -> None:
    x = model.draw(4)
    array = hf.fuse([model.make().float() for _ in range(3)])
    array(x.float() if x.is_floating_point() else x)
    assert "self-check not run" not in str(array.report())


def test_the_check_leaves_no_trace() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)) for _ in range(2)]
    x, arrays = torch.randn(5, 4), [hf.fuse(models), hf.fuse(models, verify=False)]
    outputs, states = [], []
    for array in arrays:
        torch.manual_seed(3)
        outputs.append(array(x))
        states.append(torch.get_rng_state())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(states[0], states[1])
    assert all(p.grad is None for p in arrays[0].parameters())
    for (name, value), expected in zip(arrays[0].named_buffers(), arrays[1].buffers(), strict=True):
        assert torch.equal(value, expected), name


@pytest.mark.parametrize(
    "make",
    [
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        lambda: nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4)),
        lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.2, batch_first=True),
    ],
)
def test_random_draws_are_replayed(make: Callable[[], nn.Module]) -> None:
    array = hf.fuse([make() for _ in range(3)])
    array(torch.randn(5, 4))
    assert "self-check passed: outputs and gradients of 3 members" in str(array.report())


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


@pytest.mark.parametrize("stacked", [False, True])
def test_the_check_computes_the_gradients_that_the_caller_does(stacked: bool) -> None:
    """Without that of its input, torch 2.13 ends the process in this norm's backward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.GroupNorm(4, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.contiguous(memory_format=torch.channels_last)).sin()

    x = torch.rand(2, 4, 6, 6, dtype=torch.float64, requires_grad=True)
    hf.fuse([Net() for _ in range(2)])(hf.stacked([x, x]) if stacked else x).sum().backward()
    assert x.grad is not None


def test_a_value_that_is_no_number_differs_from_one() -> None:
    numbers, none = torch.tensor([1.0, 2.0]), torch.tensor([1.0, math.nan])
    assert relative_difference(none, numbers) == math.inf
    assert relative_difference(numbers, none) == math.inf
    assert relative_difference(none, none) == 0.0


MEMBERS = 40


class Sloped(nn.Module):
    def __init__(self, slope: float, scale: float, act: type[nn.Module] = nn.Tanh) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)
        self.slope, self.scale, self.act = slope, scale, act()

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.leaky_relu(self.first(x), self.slope)
        y: Tensor = self.second(self.act(hidden)) * self.scale
        return y


CASES: dict[str, tuple[Callable[[int], nn.Module], set[int]]] = {
    "equal": (lambda b: Sloped(0.1, 2.0), {0, MEMBERS - 1}),
    # The greatest slope and the least, the scale nearest to zero.
    "numbers": (lambda b: Sloped((b * 7 + 3) % MEMBERS / 100, (b * 3 + 4) % MEMBERS - 19.5), {11, 28, 12, 25, 5}),
    "few values": (lambda b: Sloped([0.1, 0.2, 0.3][b >= 13 and b % 13 % 2 + 1], 2.0), {0, 13, 14}),
}


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    members: list[int] = []
    outcome = verify._member_outcome

    def noting(subject: Any, member: int, *more: Any) -> Any:
        members.append(member)
        return outcome(subject, member, *more)

    monkeypatch.setattr(verify, "_member_outcome", noting)
    return members


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_member_is_compared(case: str, compared: list[int]) -> None:
    make, expected = CASES[case]
    models, x = [make(b).double() for b in range(MEMBERS)], torch.randn(5, 3, dtype=torch.float64)
    fused = hf.fuse(models)
    outputs = fused(x)
    outputs.sum().backward()
    assert expected <= set(compared)
    assert MIN_COMPARED <= len(compared) <= MIN_COMPARED + 8
    assert f"gradients of {len(compared)} of {MEMBERS} members" in str(fused.report())
    for member, model in enumerate(models):
        torch.testing.assert_close(outputs[member], model(x), rtol=1e-9, atol=1e-11)
