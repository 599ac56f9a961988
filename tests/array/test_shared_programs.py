"""Programs that arrays share: only where members read the same, and are called in the same way."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.array import shared_programs
from hfusion.array.module import FusedModule
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled

SCALE = 1.0


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "_programs", OrderedDict())


class Net(nn.Module):
    def __init__(self, width: int = 5, slope: float = 0.1, function: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, width), nn.Linear(width, 2)
        self.drop, self.slope, self.function = nn.Dropout(0.0), slope, function

    def forward(self, x: Tensor, twice: bool = False) -> Tensor:
        hidden = self.drop(F.leaky_relu(self.first(x), self.slope))
        y = self.last(self.function(hidden)) * SCALE
        return y * 2 if twice else y


class Outside(nn.Module):
    """Has an attribute (a generator) whose state is opaque, so that two such models cannot be compared."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unknown = nn.Linear(3, 2), torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


def array(make: Callable[[], nn.Module] = Net, members: int = 2) -> FusedModule:
    fused = hf.fuse([make() for _ in range(members)])
    fused.planned_for(torch.device("cpu"))
    shared_programs.share_programs(fused)
    return fused


def program(fused: FusedModule, *args: Any, **kwargs: Any) -> Compiled:
    arguments = Arguments.of(args or (torch.randn(4, 3),), kwargs)
    compiled = fused.compiled(arguments)
    shared_programs.check_once(fused, compiled, arguments)
    return compiled


def assert_right(fused: FusedModule) -> None:
    x = torch.randn(4, 3)
    expected = torch.stack([model(x) for model in fused.unfuse()])
    torch.testing.assert_close(fused(x), expected)


def test_arrays_of_models_that_read_the_same_share_one_program_and_its_check() -> None:
    first, second = array(), array()
    assert program(first) is program(second)
    assert first.report().parts[0].check == second.report().parts[0].check
    assert second.report().parts[0].check.startswith("self-check passed")
    assert_right(first)
    assert_right(second)


def frozen() -> nn.Module:
    model = Net()
    model.first.requires_grad_(False)
    return model


def marked() -> nn.Module:
    model = Net()
    model.first.weight.no_decay = True  # type: ignore[assignment]
    return model


OTHERS: dict[str, Callable[[], FusedModule]] = {
    "shape": lambda: array(lambda: Net(6)),
    "number": lambda: array(lambda: Net(slope=0.2)),
    "function": lambda: array(lambda: Net(function=torch.sigmoid)),
    "members": lambda: array(members=3),
    "frozen": lambda: array(frozen),
    "mark": lambda: array(marked),
    "dtype": lambda: array(lambda: Net().double()),
    "numbers that differ": lambda: array(iter([Net(slope=0.1), Net(slope=0.3)]).__next__),
    "mode": lambda: array().eval(),
}


@pytest.mark.parametrize("other", OTHERS)
def test_different_arrays_have_separate_programs(other: str) -> None:
    fused = OTHERS[other]()
    x = torch.randn(4, 3, dtype=fused.first.weight.dtype)
    assert program(array()) is not program(fused, x)
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in fused.unfuse()]))


def test_calls_that_differ_have_programs_of_their_own() -> None:
    fused = array()
    whole = program(fused)
    again = array()
    for args, kwargs in (((torch.randn(5, 3),), {}), ((torch.randn(4, 3),), {"twice": True})):
        assert program(again, *args, **kwargs) is not whole
    assert program(again, hf.stacked(torch.randn(2, 4, 3))) is not whole
    assert program(array()) is whole


def test_a_variable_that_has_changed_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    before = program(array())
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    fused = array()
    assert program(fused) is not before
    assert_right(fused)


def test_models_that_cannot_be_compared_are_captured_separately() -> None:
    assert program(array(Outside)) is not program(array(Outside))


def test_own_code_is_shared_by_none() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) if x.sum().item() > 0 else -self.layer(x)

    first, second = array(Branching), array(Branching)
    assert program(first) is not program(second)
    assert_right(second)


def test_only_the_latest_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_programs, "MAX_PROGRAMS", 2)
    first = program(array())
    for width in (6, 7):
        program(array(lambda width=width: Net(width)))
    assert len(shared_programs._programs) == 2
    assert program(array()) is not first
