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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from hfusion.core.membership import membership
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
    models, x = with_base(frozen=False), normal(5, 4)
    array = hf.fuse(models)
    array(x).sin().sum().backward()
    for model in models:
        model(x).sin().sum().backward()
    torch.testing.assert_close(array.get_parameter("0.0.weight").grad, models[0][0][0].weight.grad)


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


def test_build_shares_a_base_of_the_closure() -> None:
    base = nn.Linear(4, 4).requires_grad_(False)
    array = hf.build(lambda: nn.Sequential(base, nn.Linear(4, 2)), seeds=[0, 1, 2])
    assert array.get_parameter("0.weight").data_ptr() == base.weight.data_ptr()
    assert array.get_parameter("1.weight").shape == (3, 2, 4)


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "layer norm": lambda: nn.LayerNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4, eps=1e-2),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.0),
    "bilinear-like": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 1), nn.Flatten()),
    "group norm": lambda: nn.GroupNorm(2, 4, eps=1e-2),
    "embedding of signs": lambda: nn.Threshold(0.1, 0.2),
}


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_random_sequences(names: list[str], members: int, own: bool) -> None:
    torch.manual_seed(len(names))
    models = [nn.Sequential(nn.Linear(4, 4), *(LAYERS[name]() for name in names)).double() for _ in range(members)]
    assert_alone(models, *(hf.stacked(normal(members, n, 4)) if own else normal(n, 4) for n in (5, 3)))


@pytest.mark.parametrize("p", [(0.1, 0.5, 0.9), (0.0, 0.5, 1.0)])
def test_dropout_rates_are_the_members_own(p: tuple[float, ...]) -> None:
    y = hf.fuse([nn.Dropout(rate) for rate in p])(torch.ones(20000))
    for row, rate in zip(y, p, strict=True):
        assert abs(float((row == 0).float().mean()) - rate) < 0.02
        assert rate == 1 or torch.allclose(row[row != 0], torch.tensor(1 / (1 - rate)))
    assert not torch.equal(y[0] == 0, y[1] == 0)


def test_models_stay_as_they_are() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    before = copy.deepcopy([model.state_dict() for model in models])
    hf.fuse(models)(torch.randn(5, 4)).sum().backward()
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())


# A fused module is an ordinary module: views, copies, conversions, modes, hooks, names.
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


def test_gradients_through_a_method() -> None:
    members, x = agents(), torch.randn(3, 5, 4, dtype=torch.float64)
    array = hf.fuse(members)
    array.call("get_value", hf.stacked(x)).sin().sum().backward()
    for member, row in zip(members, x, strict=True):
        member.get_value(row).sin().sum().backward()
    for key, stack in array.named_parameters():
        torch.testing.assert_close(stack.grad, torch.stack([member.get_parameter(key).grad for member in members]))


def test_unknown_and_unsupported_methods_raise() -> None:
    array = hf.fuse(agents())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        array.nothing  # noqa: B018
    with pytest.raises(hf.FusionError, match=r"Agent has no method to of its own that computes; it has _again, act"):
        array.call("to", torch.ones(2, 4))


def test_a_class_without_forward() -> None:
    members, x = [Encoder() for _ in range(2)], torch.ones(2, 4)
    array = hf.fuse(members)
    with pytest.raises(hf.FusionError, match=r"Encoder defines no forward.*fused\.method"):
        array(x)
    assert_as_alone(array, members, lambda m: m.encode(x))


# Arrays inside models that are fused again.
class Doubling(nn.Linear):
    def twice(self, x: Tensor) -> Tensor:
        return self(x) * 2


class Branch(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


class Ensemble(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.members, self.head = hf.fuse([make() for _ in range(3)]), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members(x).mean(0))


class Stacked(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members(hf.stacked(x.expand(3, *x.shape))).mean(0))


class OfMethod(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.members.twice(x).mean(0))


class Deciding(Ensemble):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "ensemble": lambda: Ensemble(dense),
    "array of arrays": lambda: hf.fuse([dense() for _ in range(2)]),
    "stacked input": lambda: Stacked(dense),
    "method": lambda: OfMethod(lambda: Doubling(4, 4)),
    "looped member": lambda: Ensemble(lambda: Branch(4, 4)),
    "looped model": lambda: Deciding(dense),
    "running statistics": lambda: Ensemble(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_arrays_train_as_alone(name: str) -> None:
    torch.manual_seed(0)
    models, x = [MODELS[name]().double() for _ in range(2)], torch.randn(5, 4, dtype=torch.float64)
    array = hf.fuse(models)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in (array, *models)]
    for _ in range(2):
        outputs, *rows = [module(x) for module in (array, *models)]
        torch.testing.assert_close(outputs, torch.stack(rows), rtol=1e-9, atol=1e-12)
        for optimizer, output in zip(optimizers, (outputs, *rows), strict=True):
            optimizer.zero_grad()
            output.sin().sum().backward()
            optimizer.step()
    for module in (array, *models):
        module.eval()
    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(array(x), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.stack([m(x) for m in array.unfuse()]), expected, rtol=1e-9, atol=1e-12)
    for key, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([m.state_dict()[key] for m in models]), rtol=1e-9, atol=1e-12)


def test_options_of_members_of_members_are_honoured() -> None:
    models = [Ensemble(lambda slope=slope: nn.LeakyReLU(slope)) for slope in (0.1, 0.5)]
    array, x = hf.fuse(models), torch.randn(3, 4)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))


# Batches of no samples.
NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "samples": (lambda: nn.BatchNorm1d(3), (0, 3)),
    "positions": (lambda: nn.BatchNorm1d(3), (2, 3, 0)),
    "images": (lambda: nn.BatchNorm2d(3, affine=False), (0, 3, 4, 4)),
    "before a layer": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 2)), (0, 3)),
    "without statistics": (lambda: nn.BatchNorm1d(3, track_running_stats=False), (0, 3)),
}


@pytest.mark.parametrize("name", NORMS)
def test_batches_of_no_samples_leave_statistics_alone(name: str) -> None:
    make, shape = NORMS[name]
    members = [make() for _ in range(2)]
    array, x = hf.fuse(members), torch.ones(shape)
    torch.testing.assert_close(array(x), torch.stack([member(x) for member in members]))
    for key, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([member.state_dict()[key] for member in members]))


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
