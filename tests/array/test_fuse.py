"""An array is an ordinary module made of its members: memory, copies, modes, hooks, names, methods."""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.core.membership import Membership, membership
from tests.alone import assert_alone, close, normal


# fuse and build preserve memory, sharing, random state and the models themselves.
def test_fuse_takes_the_members_memory_once() -> None:
    models = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
    model_bytes = sum(t.nbytes for model in models for t in model.state_dict().values())
    array = hf.fuse(models)
    assert sum(t.nbytes for t in array.state_dict().values()) == model_bytes
    held = {id(t): t.nbytes for s in array._array.skeletons for t in s.state_dict().values() if not t.is_meta}
    assert not held


def with_base(frozen: bool, members: int = 3) -> list[nn.Module]:
    base = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().requires_grad_(not frozen)
    return [nn.Sequential(base, nn.Linear(4, 4).double()) for _ in range(members)]


def test_a_frozen_base_is_stored_once_and_not_copied() -> None:
    models, x = with_base(frozen=True), normal(5, 4)
    array = hf.fuse(models)
    assert array.get_parameter("0.0.weight").data_ptr() == models[0][0][0].weight.data_ptr()
    close(array(x), [model(x) for model in models], "output")
    again = array.unfuse()
    assert again[0][0][0].weight is again[2][0][0].weight
    assert again[0][0][0].weight.data_ptr() != models[0][0][0].weight.data_ptr()
    assert again[0][1].weight is not again[2][1].weight


def test_a_shared_base_that_trains_gets_the_sum_of_gradients() -> None:
    array = assert_alone(with_base(frozen=False), normal(5, 4))
    assert array.get_parameter("0.0.weight").shape == (4, 4)


def test_build_is_fuse_of_seeded_models() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Dropout(float(torch.rand(()))), nn.BatchNorm1d(3))

    torch.manual_seed(5)
    before, python = torch.get_rng_state(), random.getstate()
    built = hf.build(make, seeds=[0, 1, 7])
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == python
    models = []
    for seed in (0, 1, 7):
        torch.manual_seed(seed)
        models.append(make())
    fused = hf.fuse(models)
    for (name, actual), (other, expected) in zip(built.state_dict().items(), fused.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(actual, expected)
    assert [member[1].p for member in built] == [model[1].p for model in models]


# A fused module is an ordinary module: views, copies, conversions, modes, hooks, names.
def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def fused(members: int = 3) -> hf.FusedModule:
    return hf.fuse([mlp() for _ in range(members)])


def test_members_are_live_views() -> None:
    array = fused()
    assert array[-2] is array[1]
    array.get_parameter("0.weight").data[1].fill_(3)
    assert (array[1][0].weight == 3).all()
    assert len(array) == len(list(array)) == 3
    with pytest.raises(IndexError, match="member 3 of an array of 3"):
        array[3]


COPIES: dict[str, Callable[[hf.FusedModule], hf.FusedModule]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda array: pickle.loads(pickle.dumps(array)),
    "state_dict": lambda array: _loaded(array, assign=False),
    "assigned": lambda array: _loaded(array, assign=True),
}


def _loaded(array: hf.FusedModule, assign: bool) -> hf.FusedModule:
    other, file = fused(), io.BytesIO()
    other(normal(5, 4))
    torch.save(array.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file), assign=assign)
    return other


@pytest.mark.parametrize("name", COPIES)
def test_copies(name: str) -> None:
    array = fused()
    array(normal(5, 4))
    other = COPIES[name](array).eval()
    array.eval()
    x = normal(5, 4)
    assert torch.equal(other(x), array(x))
    assert membership(other.get_parameter("0.weight")) == Membership("0.weight", 3, stacked=True)
    other.get_parameter("0.weight").data.zero_()
    assert array.get_parameter("0.weight").any()


def test_hooks() -> None:
    array, calls = fused(), []
    array.register_forward_pre_hook(lambda *args: calls.append("pre"))
    array.register_forward_hook(lambda *args: calls.append("forward"))
    array.register_full_backward_hook(lambda *args: calls.append("backward"))
    array(normal(5, 4).requires_grad_()).sum().backward()
    assert calls == ["pre", "forward", "backward"]
    part = array.get_submodule("0")
    for name in ["forward_hook", "forward_pre_hook", "full_backward_hook", "full_backward_pre_hook", "backward_hook"]:
        with pytest.raises(hf.FusionError, match="hooks on the Linear inside a fused module never run"):
            getattr(part, f"register_{name}")(lambda *args: None)
    with pytest.raises(hf.FusionError, match="cannot be called by itself"):
        part(normal(5, 4))


class Named(nn.Module):
    """Submodules and tensors under the names that a fused module uses itself."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("report", "origin", "_array", "_compiler", "_branches", "_original", "_fixed"):
            setattr(self, name, nn.Linear(4, 4))
        self.unfuse = nn.Parameter(torch.randn(4))
        self.register_buffer("_bound", torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for module in self.children():
            x = module(x).tanh()
        return x * self.unfuse + self._bound


def test_names_that_collide() -> None:
    array = assert_alone([Named().double() for _ in range(2)], x := normal(3, 4))
    close(copy.deepcopy(array)(x), [model(x) for model in array.unfuse()], "output")
    assert "report.weight" in array.state_dict()


# Methods of the members other than forward, called of an array.
class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.body(x)).tanh()

    def get_value(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(self(x)) * scale

    def both(self, x: Tensor) -> dict[str, Tensor]:
        return {"features": self.forward(x), "value": self._again(x)}

    def _again(self, x: Tensor) -> Tensor:
        return self.get_value(x, scale=2.0)

    @torch.no_grad()
    def act(self, x: Tensor) -> Tensor:
        return self.forward(x).argmax(-1)

    calls = 0

    def count(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.body(x)

    def checked(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            raise ValueError("not a number")
        return self.body(x)

    def by_value(self, x: Tensor) -> Tensor:
        return self.get_value(x) if float(x.detach().sum()) > -1e9 else x


class Encoder(nn.Module):
    """Has no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 3)

    def encode(self, x: Tensor) -> Tensor:
        return self.body(x)


def agents(training: bool = True) -> list[nn.Module]:
    return [Agent().double().train(training) for _ in range(3)]


def assert_as_alone(array: Any, members: list[Any], call: Callable[[Any], Any]) -> None:
    rows = [pytree.tree_leaves(call(member)) for member in members]
    for actual, expected in zip(pytree.tree_leaves(call(array)), zip(*rows, strict=True), strict=True):
        torch.testing.assert_close(actual, torch.stack(expected), rtol=1e-9, atol=1e-12)


CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "by attribute": lambda m, x: m.get_value(x),
    "keyword": lambda m, x: m.get_value(x, scale=3.0),
    "nested": lambda m, x: m.both(x),
    "without gradients": lambda m, x: m.act(x),
    "looped": lambda m, x: m.by_value(x),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_method_of_an_array_is_that_of_the_members(name: str, training: bool) -> None:
    members, x = agents(training), torch.randn(5, 4, dtype=torch.float64)
    array = hf.fuse(members)
    for k in range(2):
        assert_as_alone(array, members, lambda m, x=x + k: CALLS[name](m, x))
        assert_as_alone(array, members, lambda m, x=x + k: m(x))
    for key, stack in array.named_buffers():
        torch.testing.assert_close(stack, torch.stack([member.get_buffer(key) for member in members]))
    assert array.training is training


def test_methods_are_captured_each_and_loop_where_they_keep_state() -> None:
    array = hf.fuse(agents())
    x = torch.ones(2, 4, dtype=torch.float64)
    array.get_value(x)
    assert [part.program.name for part in array.report().parts] == ["Agent.get_value"]
    array.count(x)
    assert [member.calls for member in array] == [1, 1, 1]
    assert "calls" in str(array.report())
    array.checked(x)
    with pytest.raises(ValueError, match="not a number"):
        array.checked(x * torch.nan)


def test_a_class_without_forward() -> None:
    members, x = [Encoder() for _ in range(2)], torch.ones(2, 4)
    array = hf.fuse(members)
    assert_as_alone(array, members, lambda m: m.encode(x))


@pytest.mark.parametrize("argument", [2 + 1j, torch.float32, torch.device("cpu"), torch.tanh, nn.Linear])
def test_arguments_that_torch_exports_not(argument: object) -> None:
    used = type("Used", (nn.Linear,), {"forward": lambda self, x, kind: nn.Linear.forward(self, x) * len(str(kind))})
    members, x = [used(4, 3) for _ in range(2)], torch.ones(2, 4)
    array = hf.fuse(members)
    assert_as_alone(array, members, lambda m: m(x, argument))
    assert "an argument is" in str(array.report())


# Tensors that some members share, and members that are saved by themselves.


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


def saved(value: Any) -> int:
    file = io.BytesIO()
    torch.save(value, file)
    return len(file.getvalue())


def test_a_member_is_saved_by_itself() -> None:
    models = [nn.Linear(64, 64).to(torch.bfloat16) for _ in range(8)]
    array = hf.fuse(models)
    member = array[3]
    one = 2 * 64 * 65
    assert one < saved(member.state_dict()) < 2 * one
    assert one < saved(member) < 2 * one
    assert len(pickle.dumps(member)) < 2 * one
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


@pytest.mark.parametrize("first", [False, True], ids=["own input", "shared input"])
def test_shared_statistics_in_training(first: bool) -> None:
    norm = nn.BatchNorm1d(4)
    models = [nn.Sequential(*([norm, nn.Linear(4, 4)][:: 1 if first else -1])) for _ in range(3)]
    with pytest.raises(hf.FusionError, match="give each model its own"):
        hf.fuse(models)(torch.randn(5, 4))
    norm.eval()
    assert hf.fuse(models)(torch.randn(5, 4)).shape == (3, 5, 4)
