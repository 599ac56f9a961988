"""A fused module is an ordinary module: views, copies, conversions, modes, hooks, names."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from hfusion.core.membership import membership
from tests.alone import close, normal


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()


def fused(members: int = 3) -> hf.FusedModule:
    return hf.fuse([mlp() for _ in range(members)])


def test_members_are_live_views_both_ways() -> None:
    array = fused()
    member = array[1]
    assert type(member) is nn.Sequential
    member[0].weight.data.fill_(7)
    assert (array.get_parameter("0.weight")[1] == 7).all()
    array.get_parameter("0.weight").data[1].fill_(3)
    assert (member[0].weight == 3).all()
    assert torch.equal(array[-2][0].weight, member[0].weight)
    assert len(array) == len(list(array)) == 3
    with pytest.raises(IndexError, match="member 3 of an array of 3"):
        array[3]


def test_unfuse_gives_independent_models() -> None:
    array = fused()
    x = normal(5, 4)
    expected = array(x)
    models = array.unfuse()
    close(expected, [model.eval()(x) if not array.training else model(x) for model in models], "unfused")
    models[0][0].weight.data.zero_()
    assert array.get_parameter("0.weight")[0].any()


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
    parameter_membership = membership(other.get_parameter("0.weight"))
    assert parameter_membership is not None
    assert (parameter_membership.name, parameter_membership.members, parameter_membership.stacked) == (
        "0.weight",
        3,
        True,
    )
    other.get_parameter("0.weight").data.zero_()
    assert array.get_parameter("0.weight").any()


class Tokens(nn.Module):
    """Takes integers, so that only its own tensors tell the dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.out = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.table(ids)
        return self.out(h * torch.full((4,), 0.3, dtype=h.dtype))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_conversion_after_a_call(dtype: torch.dtype) -> None:
    models, ids = [Tokens() for _ in range(2)], torch.randint(7, (5,))
    array = hf.fuse(models)
    array(ids)
    actual, expected = array.to(dtype)(ids), torch.stack([model.to(dtype)(ids) for model in models])
    assert actual.dtype is expected.dtype is dtype
    bound = 1e-12 if dtype is torch.float64 else 2e-2
    assert torch.allclose(actual, expected, rtol=bound, atol=bound)


def test_modes_of_the_whole_and_of_a_part() -> None:
    models = [mlp() for _ in range(2)]
    array, x = hf.fuse(models), normal(5, 4)
    for change in (
        lambda m: m.train(),
        lambda m: m.get_submodule("1").eval(),
        lambda m: m.eval(),
        lambda m: m.get_submodule("1").train(),
    ):
        for module in (array, *models):
            change(module)
        close(array(x), [model(x) for model in models], "output")
        close(array.get_buffer("1.running_mean"), [model[1].running_mean for model in models], "statistics")


def test_freezing_after_fusing() -> None:
    array, x = fused(), normal(5, 4)
    array(x)
    array.get_parameter("0.weight").requires_grad_(False)
    array(x).sin().sum().backward()
    assert array.get_parameter("0.weight").grad is None
    assert array.get_parameter("0.bias").grad is not None
    assert not array[0][0].weight.requires_grad
    assert not array.unfuse()[0][0].weight.requires_grad


def test_nan_stays_with_its_member() -> None:
    models = [mlp().float() for _ in range(3)]
    sick = copy.deepcopy(models)
    sick[1][0].weight.data.fill_(float("nan"))
    x = torch.randn(6, 4)
    arrays = [hf.fuse(models), hf.fuse(sick)]
    outputs = [array(x) for array in arrays]
    for output in outputs:
        output.sin().sum().backward()
    for b in (0, 2):
        assert torch.equal(outputs[0][b], outputs[1][b])
        for a, c in zip(*(array.parameters() for array in arrays), strict=True):
            assert torch.equal(a.grad[b], c.grad[b])


def test_hooks() -> None:
    array, calls = fused(), []
    array.register_forward_pre_hook(lambda *args: calls.append("pre"))
    array.register_forward_hook(lambda *args: calls.append("forward"))
    array.register_full_backward_hook(lambda *args: calls.append("backward"))
    array(normal(5, 4).requires_grad_()).sum().backward()
    assert calls == ["pre", "forward", "backward"]
    part = array.get_submodule("0")
    for name in (
        "forward_hook",
        "forward_pre_hook",
        "full_backward_hook",
        "full_backward_pre_hook",
        "backward_hook",
    ):
        with pytest.raises(hf.FusionError, match="hooks on the Linear inside a fused module never run"):
            getattr(part, f"register_{name}")(lambda *args: None)
    with pytest.raises(hf.FusionError, match="cannot be called by itself"):
        part(normal(5, 4))


def test_settings_that_would_do_nothing_are_refused() -> None:
    array = hf.fuse([nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(2)])
    with pytest.raises(hf.FusionError, match=r"setting p on a fused Dropout .* unfuse"):
        array.get_submodule("1").p = 0.0
    with pytest.raises(hf.FusionError, match="setting 0 on a fused Sequential"):
        setattr(array, "0", nn.Linear(4, 4))
    array.note = "free"


def test_a_parameter_that_takes_the_place_of_another_is_trained() -> None:
    members = [mlp() for _ in range(3)]
    array, x = hf.fuse(members), normal(5, 4)
    array(x)
    array.get_submodule("0").bias = nn.Parameter(normal(3, 4))
    for row, member in enumerate(members):
        member[0].bias = nn.Parameter(array.get_submodule("0").bias[row].detach().clone())
        torch.optim.SGD(member.parameters(), lr=0.1).zero_grad()
        member(x).square().sum().backward()
        torch.optim.SGD(member.parameters(), lr=0.1).step()
    optimizer = hf.optim.SGD(array.parameters(), lr=0.1)
    array(x).square().sum().backward()
    optimizer.step()
    for name, stack in array.named_parameters():
        torch.testing.assert_close(stack, torch.stack([member.get_parameter(name) for member in members]))


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
    array = assert_collides([Named().double() for _ in range(2)])
    assert "report.weight" in array.state_dict()


def assert_collides(models: list[Any]) -> hf.FusedModule:
    x = normal(3, 4)
    array = hf.fuse(models)
    close(array(x), [model(x) for model in models], "output")
    close(copy.deepcopy(array)(x), [model(x) for model in array.unfuse()], "output")
    return array


def test_draws_inside_a_checkpoint_are_made_again_in_backward() -> None:
    array, x = (
        hf.fuse([nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 3)).double() for _ in range(2)]),
        normal(7, 4),
    )
    outcomes = []
    for call in (lambda: checkpoint(array, x, use_reentrant=False), lambda: array(x)):
        torch.manual_seed(1)
        array.zero_grad()
        y = call()
        y.sin().sum().backward()
        outcomes.append([y, *(p.grad for p in array.parameters())])
    for a, b in zip(*outcomes, strict=True):
        assert torch.equal(a, b)
