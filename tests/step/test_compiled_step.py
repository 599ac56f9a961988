"""Steps that are compiled member by member, against the eager loop of hfusion."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.step import compile_limits
from tests.step.test_step_graph import arrays, loss_of
from tests.step.test_train_step import Pair, batch, needs_compiler, pair
from tests.zoo import Model, normal


class Sloped(nn.Module):
    """An activation whose slope is one of two, so that it runs member by member; buffers, and a base that all share."""

    shared = nn.Linear(4, 4).double()
    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Sloped.instances += 1
        self.base, self.norm, self.head = Sloped.shared, nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.slope = (0.1, 0.3)[Sloped.instances % 2]

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.base(x)), self.slope)
        return self.head(F.leaky_relu(F.leaky_relu(h, self.slope), self.slope))


class Recurrent(nn.Module):
    """A recurrent layer, each of whose calls is many operators."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.RNN(4, 3, num_layers=2, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


@needs_compiler
def test_member_by_member() -> None:
    """Loops over many members: one program per kind of member."""
    model = Model("sloped", Sloped, normal(4))
    fused, reference = arrays(model, 12)
    # One rate: the base is trained, and the same for all.
    opt, other = (hf.optim.Adam(array.parameters(), lr=0.01, eps=1e-4) for array in (fused, reference))
    comparison = Pair(hf.train_step(fused, loss_of, opt, compile=True), fused, reference, hf.per_model(loss_of), other)
    for step, size in enumerate([4, 4, 3, 3, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    rows = comparison.step.report().rows
    assert "2 programs of" in rows[0].how
    assert "called once per member" in rows[0].how
    assert comparison.step.compilations == 2


@needs_compiler
def test_member_by_member_where_the_whole_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few calls, as of a recurrent layer, may be many operators."""
    monkeypatch.setattr(compile_limits, "MAX_OPERATORS", 130)
    model = Model("sloped", Sloped, normal(4))
    fused, _ = arrays(model, 6)
    step = hf.train_step(fused, loss_of, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    for _ in range(2):
        step(*batch(model, 4))
    assert "called once per member" in step.report().rows[0].how


@needs_compiler
@pytest.mark.parametrize("parts", [1, 2])
def test_blocks_of_one_where_more_members_are_too_large(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, parts: int
) -> None:
    # What is refused here is not to be found by others.
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_limits, "MAX_OPERATORS", 300)
    model = Model("recurrent", Recurrent, normal(2, 4))
    comparison = pair(model, compile=True, count=4, parts=parts)
    for step in range(3):
        comparison.advance(*batch(model, 4), f"after step {step}")
    assert "called once per member" in comparison.step.report().rows[0].how
