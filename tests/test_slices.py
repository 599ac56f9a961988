"""Some members of an array: a live view of their rows, and no more than theirs when it is saved."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.membership import membership
from tests.alone import assert_alone, close, normal


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


def saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def test_a_member_is_saved_by_itself() -> None:
    models = [nn.Linear(64, 64).to(torch.bfloat16) for _ in range(8)]
    array = hf.fuse(models)
    member, part = array[3], array[2:5]
    one = 2 * 64 * 65
    assert one < saved(member.state_dict()) < 2 * one
    assert one < saved(member) < 2 * one
    assert len(pickle.dumps(member)) < 2 * one
    assert 3 * one < saved(part.state_dict()) < 4 * one
    with torch.no_grad():
        member.weight.fill_(3)
        member.state_dict()["bias"].fill_(4)
    assert (array.get_parameter("weight")[3] == 3).all()
    assert (array.get_parameter("bias")[3] == 4).all()


def two_bases(order: str) -> list[nn.Module]:
    bases = {name: base() for name in "AB"}
    return [Adapted(bases[name]) for name in order]


@pytest.mark.parametrize("order", ["AAB", "ABA", "ABB", "AABB"])
def test_a_frozen_tensor_that_some_members_share(order: str) -> None:
    array = assert_alone(two_bases(order), normal(6, 4), normal(3, 4))
    weight = array.get_parameter("base.0.weight")
    assert weight.shape[0] == len(order)
    assert not weight.requires_grad
    waiting = iter(two_bases(order))
    built = hf.build(lambda: next(waiting), seeds=list(range(len(order))))
    models, x = built.unfuse(), normal(6, 4)
    close(built(x), [model(x) for model in models], "built")
    same = [[torch.equal(m.base[0].weight, n.base[0].weight) for m in models] for n in models]
    assert same == [[a == b for a in order] for b in order]


@pytest.mark.parametrize("order", ["AAB", "ABA", "ABB"])
def test_a_trained_tensor_that_some_members_share_is_refused(order: str) -> None:
    models = two_bases(order)
    for model in models:
        model.base.requires_grad_(True)
    words = r"base.0.weight is one object in some models but not in all|base.0.bias is one object in some"
    with pytest.raises(hf.FusionError, match=words):
        hf.fuse(models)
    waiting = iter(models)
    with pytest.raises(hf.FusionError, match=words):
        hf.build(lambda: next(waiting), seeds=[0, 1, 2])


def test_trained_tensors_in_the_same_memory_are_refused() -> None:
    a, b = nn.Bilinear(4, 4, 4), nn.Bilinear(4, 4, 4)
    b.weight.data = a.weight.data
    with pytest.raises(hf.FusionError, match="weight of model 0 and weight of model 1 share memory"):
        hf.fuse([a, b])
    first, second = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    second[1].weight = first[0].weight
    with pytest.raises(hf.FusionError, match=r"1.weight is one object in some models"):
        hf.fuse([first, second])
