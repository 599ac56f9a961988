"""Slices of an array: some members, around the memory of their rows."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.membership import membership
from tests.alone import close, normal


class Adapted(nn.Module):
    """An adapter on a frozen base with a buffer."""

    def __init__(self, base: nn.Module, slope: float = 0.1) -> None:
        super().__init__()
        self.base, self.adapter, self.act = base, nn.Linear(4, 3).double(), nn.LeakyReLU(slope)
        self.norm = nn.BatchNorm1d(4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.adapter(self.norm(self.act(self.base(x))))


def base() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double().requires_grad_(False).eval()


def adapted(members: int = 5) -> list[nn.Module]:
    one = base()
    return [Adapted(one, 0.1 if b % 2 else 0.3) for b in range(members)]


@pytest.mark.parametrize("rows", [slice(1, 4), slice(3, None), slice(-2, -1), slice(None)], ids=str)
def test_a_slice_trains_its_members_in_place(rows: slice) -> None:
    models = adapted()
    array, x, y = hf.fuse(models), normal(6, 4), normal(6, 3)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    part, chosen = array[rows], range(5)[rows]
    assert type(part) is hf.FusedModule
    assert len(part) == len(chosen)
    opt = hf.optim.Adam(part.parameters(), lr=[0.1 * (b + 1) for b in chosen])
    step = hf.train_step(part, nn.functional.mse_loss, opt, compile=False)
    own = [models[b] for b in chosen]
    opts = [torch.optim.Adam(m.parameters(), lr=0.1 * (b + 1)) for b, m in zip(chosen, own, strict=True)]
    for _ in range(3):
        losses = step(x, y)
        for b, (model, opt_of_one) in enumerate(zip(own, opts, strict=True)):
            opt_of_one.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            opt_of_one.step()
            close(losses[b], [loss], "loss")
    for name, tensor in array.state_dict().items():
        stacked = name not in array._array.comparison.shared
        for b in range(5):
            row = tensor[b] if stacked else tensor
            alone = models[b].state_dict()[name] if b in chosen or not stacked else before[name][b]
            torch.testing.assert_close(row, alone, rtol=1e-9, atol=1e-11)
    assert array.get_parameter("adapter.weight").grad is None


def test_what_a_slice_knows() -> None:
    models = adapted()
    array = hf.fuse(models)
    array.get_submodule("norm").eval()
    part = array[2:4]
    found = membership(part.get_parameter("adapter.weight"))
    assert found is not None
    assert (found.members, found.stacked) == (2, True)
    assert part.origin(models[3].adapter.weight) == (1, "adapter.weight")
    assert part.origin(models[1].adapter.weight) is None
    assert not part.get_submodule("norm").training
    assert part[1].act.negative_slope == models[3].act.negative_slope
    assert part[0:1][0].act.negative_slope == models[2].act.negative_slope
    assert part.get_parameter("base.0.weight").data_ptr() == array.get_parameter("base.0.weight").data_ptr()
    with torch.no_grad():
        part.get_parameter("adapter.bias")[1].fill_(5)
    assert (array[3].adapter.bias == 5).all()
    for made in (copy.deepcopy(part), pickle.loads(pickle.dumps(part))):
        assert torch.equal(made.eval()(torch.ones(2, 4).double()), array[2:4].eval()(torch.ones(2, 4).double()))


def test_what_takes_no_members_is_refused() -> None:
    array = hf.fuse(adapted())
    with pytest.raises(IndexError, match="takes none of the 5 members"):
        array[3:3]
    for step in (-1, 2):
        with pytest.raises(ValueError, match=f"step {step}: .* must be 1"):
            array[::step]
    odd: Any = [0, 2]
    with pytest.raises(TypeError, match="integer"):
        array[odd]


def test_a_slice_of_members_that_differ_is_refused() -> None:
    array = hf.fuse(adapted())
    array[3].eval()
    with pytest.raises(hf.FusionError, match="a slice needs members of equal modes"):
        array[2:]
