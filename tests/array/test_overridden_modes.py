"""The members' own train and eval decide, as they do for a member alone."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import hfusion as hf
from tests.alone import Member, Own, compare_call, normal

Make = Callable[[], nn.Module]
Change = Callable[[Any], object]


class Backbone(nn.Module):
    """Its statistics are frozen, also in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.bn, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.bn(self.fc(x)).tanh())

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode)
        self.bn.eval()
        return self


class Teacher(nn.Module):
    """A student beside a teacher that is never in train mode; eval is its own, too."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.student(x) - self.teacher(x)

    def train(self, mode: bool = True) -> Teacher:
        super().train(mode)
        self.teacher.eval()
        return self

    def eval(self) -> Teacher:
        self.student.eval()
        self.training = False
        return self


class Merging(nn.Linear):
    """Low-rank adapters that are added to the weight in eval mode, as loralib does."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.down, self.up = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(4, 2))
        self.weight.requires_grad_(False)
        self.merged = False

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if self.merged else y + x @ self.down.T @ self.up.T

    def train(self, mode: bool = True) -> Merging:
        super().train(mode)
        if mode == self.merged:
            self.weight.data += (-1 if mode else 1) * (self.up @ self.down).data
            self.merged = not mode
        return self


class Scaled(nn.Module):
    """Sets an attribute, a buffer and what is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.scale = 1.0
        self.register_buffer("switches", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).sin() * self.scale)

    def train(self, mode: bool = True) -> Scaled:
        super().train(mode)
        self.scale = 2.0 if mode else 0.5
        self.switches += 1
        self.body.requires_grad_(mode)
        return self


class Differing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.number, self.scale = nn.Linear(4, 4), 0.0, 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale

    def train(self, mode: bool = True) -> Differing:
        super().train(mode)
        self.scale = 1 + self.number * mode
        return self


def frozen(self: Any, mode: bool = True) -> Any:
    nn.Module.train(self, mode)
    self[1].eval()
    return self


def on_the_instance() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model.train = types.MethodType(frozen, model)  # type: ignore[method-assign]
    return model


MAKES: dict[str, Make] = {
    "a frozen backbone": Backbone,
    "with a part in eval": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval(), Backbone()),
    "a teacher": Teacher,
    "adapters that merge": lambda: nn.Sequential(Merging(), nn.Tanh(), Merging()),
    "attributes, buffers and what is trained": Scaled,
    "on the instance": on_the_instance,
}
CHANGES: Sequence[Change] = (
    lambda m: m.train(),
    lambda m: m.eval(),
    lambda m: m.train(),
    lambda m: [child.eval() for child in m.children()],
    lambda m: [child.train() for child in m.children()],
    lambda m: m.train(False),
)


def compare(array: hf.FusedModule, alone: Sequence[nn.Module], x: Tensor) -> None:
    """Outputs, gradients, parameters, buffers, flags, and what is trained."""
    compare_call(array, alone, x)
    for b, model in enumerate(alone):
        for path, module in model.named_modules():
            assert array.get_submodule(path).training == module.training, path
            assert array[b].get_submodule(path).training == module.training, path
    for name, parameter in array.named_parameters():
        assert parameter.requires_grad == alone[0].get_parameter(name).requires_grad, name
        assert (parameter.grad is None) == (alone[0].get_parameter(name).grad is None), name


@pytest.mark.parametrize("name", MAKES)
def test_modes_are_as_alone(name: str) -> None:
    models = [MAKES[name]().double() for _ in range(2)]
    alone, array, x = copy.deepcopy(models), hf.fuse(models), normal(6, 4)
    for model, other in zip(models, alone, strict=True):
        if "train" in vars(model):
            other.train = types.MethodType(frozen, other)  # type: ignore[method-assign]
    compare(array, alone, x)
    for change in CHANGES:
        for module in (array, *alone):
            change(module)
        compare(array, alone, x)
    assert len(array.report().parts) <= 6


class Growing(nn.Linear):
    def train(self, mode: bool = True) -> Growing:
        self.weight = nn.Parameter(torch.ones(2, 2))
        return super().train(mode)


class SharedWrite(nn.Linear):
    def train(self, mode: bool = True) -> SharedWrite:
        self.weight.data *= 2
        return super().train(mode)


def sharing(kind: type[nn.Linear]) -> list[nn.Module]:
    models = [kind(4, 4).requires_grad_(False) for _ in range(2)]
    models[1].weight = models[0].weight
    return list(models)


def untrained(mode: bool = True) -> None:
    """Does nothing."""


def by_a_function() -> nn.Module:
    model = nn.Linear(4, 4)
    model.train = untrained  # type: ignore[method-assign, assignment]
    return model


@pytest.mark.parametrize(
    ("models", "words"),
    [
        ([Growing(4, 4), Growing(4, 4)], "member 0 of a fused Growing does not fit its array: weight has shape"),
        (sharing(SharedWrite), "model 0 writes into weight, which all members share"),
        ([by_a_function(), by_a_function()], "train of Linear was set to .* Define it in the class"),
    ],
)
def test_unsupported_mode_changes_are_refused_and_undone(models: list[nn.Module], words: str) -> None:
    array = hf.fuse(models)
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    flags = [module.training for module in array.modules()]
    with pytest.raises(hf.FusionError, match=words):
        array.train()
    assert flags == [module.training for module in array.modules()]
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_evaluating_leaves_the_array_as_it_was() -> None:
    array = hf.fuse([Differing(), Differing()])
    array.train()
    array.get_submodule("fc").eval()
    with array.evaluating():
        assert not array.training
        assert array[1].scale == 1
    assert array.training
    assert not array.get_submodule("fc").training
    plain = hf.fuse([nn.Sequential(nn.Linear(3, 2), nn.Dropout()) for _ in range(2)])
    plain[1].eval()
    with plain.evaluating():
        assert not any(member.training for member in plain)
    assert [member.training for member in plain] == [True, False]
    merging = hf.fuse([Merging(), Merging()])
    before = merging.weight.clone()
    with pytest.raises(hf.FusionError, match="own eval of Merging changes parameters or buffers"), merging.evaluating():
        pass
    assert torch.equal(merging.weight, before)
    assert merging.training


# Variables and attributes that forward reads and that change while an array lives.


class Asking(nn.Module):
    """Checks whether autocast is on, both outside and inside its own autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).float() * (3 if torch.is_autocast_enabled("cpu") else 7)
        with torch.autocast("cpu", enabled=False):
            return self.last(x) if torch.is_autocast_enabled("cpu") else self.last(x + 1)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_sees_the_current_autocast_state(order: tuple[bool, ...], compiled: bool) -> None:
    models = [Asking() for _ in range(2)]
    fused, x = hf.fuse(models), torch.randn(5, 3)
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.0)
    loss = lambda y, target: y.square().mean()  # noqa: E731
    step = hf.train_step(fused, loss, optimizer, compile=compiled)
    for enabled in order:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                alone = torch.stack([loss(model(x), None).detach() for model in models])
                torch.testing.assert_close(step(x, None), alone, rtol=1e-2, atol=1e-4)
    assert len(fused.report().parts) == 2


@contextmanager
def changed(set_: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


# A setting of torch that forward or a loss asks for, and a region in which it is another.
SETTINGS_OF_TORCH: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "threads": (
        lambda: torch.get_num_threads() > 2,
        lambda: changed(torch.set_num_threads, 3, torch.get_num_threads()),
    ),
    "determinism": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: changed(torch.use_deterministic_algorithms, True, False),
    ),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "gradients": (lambda: not torch.is_grad_enabled(), torch.no_grad),
    "default dtype": (
        lambda: torch.get_default_dtype() is torch.float64,
        lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "the dtype of a new tensor": (
        lambda: torch.ones(1).dtype is torch.float64,
        lambda: changed(torch.set_default_dtype, torch.float64, torch.float32),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.autocast("cpu", dtype=torch.bfloat16)),
    "the dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ),
    "by a text": (
        lambda: getattr(torch, "is_anomaly_enabled")(),  # noqa: B009
        torch.autograd.detect_anomaly,
    ),
    "a seed": (lambda: torch.initial_seed() == 7, lambda: changed(torch.manual_seed, 7, 8)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS_OF_TORCH)
@pytest.mark.parametrize("first", [False, True])
def test_settings_of_torch_count_as_they_are_at_each_call(name: str, first: bool) -> None:
    (ask, region), x = SETTINGS_OF_TORCH[name], normal(5, 3)

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (3 if ask() else 1)

    models = [Asking(3, 2).double() for _ in range(2)]
    fused, losses = hf.fuse(models), hf.per_model(lambda y: y.sum() * (3 if ask() else 1))
    for other in (first, not first, first):
        with region() if other else nullcontext():
            alone = torch.stack([model(x) for model in models])
            torch.testing.assert_close(fused(x), alone, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses(alone), alone.sum((1, 2)) * (3 if ask() else 1))


# Attributes of members that a training loop sets at every step: annealed numbers, flags, texts, lists.
STEPS = 12


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 2))
        self.alpha, self.power, self.tag, self.weights = 1.0, 1, "plain", [1.0, 2.0]
        self.flag: Any = False
        self.head[0].scale = 1.0  # type: ignore[assignment]
        self.epoch = 0

    def reverse(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.reverse(self.body(x))
        x = torch.softmax(x * self.weights[0] / self.alpha, -1) ** self.power
        x = self.head(x) * self.head[0].scale
        if self.flag is None:
            return x.abs()
        return -x if self.flag else x + len(self.tag)


class Plain(nn.Linear):
    """A model whose only attribute is not read by forward."""

    epoch: int

    def __init__(self) -> None:
        super().__init__(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


# What is set on member ``b`` of three before step ``t``.
STATE_CHANGES: Mapping[str, Callable[[Any, int, int], object]] = {
    "number": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8),
    "number of each": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8 + b),
    "number of one": lambda m, b, t: setattr(m, "alpha", 1.0 + t / 8) if b == 1 else None,
    "flag": lambda m, b, t: setattr(m, "flag", [False, True, None][t % 3]),
    "text": lambda m, b, t: setattr(m, "tag", "x" * t),
    "list": lambda m, b, t: m.weights.__setitem__(0, 1.0 + t / 8),
    "submodule": lambda m, b, t: setattr(m.head[0], "scale", 1.0 + t / 8),
    "curriculum": lambda m, b, t: setattr(m, "alpha", 1.0 + t // 4),
    "unread": lambda m, b, t: setattr(m, "epoch", t),
}


def members(kind: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [(Plain() if kind == "unread" else Model()).double() for _ in range(3)]


@pytest.mark.filterwarnings("ignore:train_step of:UserWarning")
@pytest.mark.parametrize("compiled_step", [False, True])
@pytest.mark.parametrize("kind", STATE_CHANGES)
def test_attributes_set_at_every_step(kind: str, compiled_step: bool) -> None:
    models, fused = members(kind), hf.fuse(members(kind))
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(5, 3, dtype=torch.float64, generator=generator) for _ in range(STEPS)]
    target = torch.zeros(5, 2, dtype=torch.float64)
    optimizer = hf.optim.Adam(fused.parameters(), lr=1e-2)
    own = [Member(model, torch.optim.Adam, nn.functional.mse_loss, Own(1e-2)) for model in models]
    step = hf.train_step(fused, nn.functional.mse_loss, optimizer, compile=False if not compiled_step else None)
    for t, x in enumerate(batches):
        for b, member in enumerate(fused):
            STATE_CHANGES[kind](member, b, t)
        losses = step(x, target)
        for b, member in enumerate(own):
            STATE_CHANGES[kind](member.model, b, t)
            torch.testing.assert_close(losses[b], member.call(x, target)[0], rtol=1e-9, atol=1e-12)
    for model, member in zip(models, fused.unfuse(), strict=True):
        torch.testing.assert_close(member.state_dict(), model.state_dict(), rtol=1e-9, atol=1e-12)
        assert {k: v for k, v in vars(member).items() if k in ("alpha", "tag", "epoch", "weights", "flag")} == {
            k: v for k, v in vars(model).items() if k in ("alpha", "tag", "epoch", "weights", "flag")
        }
    report = fused.report()
    assert len(report.parts) <= (1 if kind == "unread" else 4)
    if changes_often := kind not in ("unread", "flag", "curriculum"):
        with pytest.raises(hf.FusionError, match="needs members whose attributes keep their values"):
            fused[0:2]
    assert ("changes often" in str(report)) == changes_often


class Counting(nn.Module):
    """A layer with a parametrized weight, run as the members' own code since it counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = parametrizations.weight_norm(nn.Linear(3, 3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layer(x)
        return y


def test_members_have_their_own_weights_where_torch_caches_parametrizations() -> None:
    models, x = [], normal(5, 3)
    # torch takes the cached weights of a module for those of its deep copies.
    for _ in range(2):
        torch.manual_seed(0)
        models.append([Counting().double() for _ in range(3)])
    fused, alone = hf.fuse(models[0]), models[1]
    for _ in range(3):
        with parametrize.cached():
            y = fused(x) + fused(2 * x)
            expected = torch.stack([model(x) + model(2 * x) for model in alone])
        torch.testing.assert_close(y, expected)
