"""Classes that copy themselves, attributes of parameters, losses that cannot train: arrays as alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import hfusion as hf
from hfusion.core.loss_checks import check_losses
from hfusion.core.parameter_attributes import DifferingMark
from tests.alone import normal
from tests.oracle import RELATIVE


# Classes that copy themselves, and attributes of parameters: arrays train them as alone.
# Classes that copy themselves: arrays, populations and tasks train them as alone, whatever their copies lose.
class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.norm, self.scales = nn.Linear(4, 3), nn.BatchNorm1d(3), {"out": scale}
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x)) * self.scale * self.scales["out"]
        return y


class LoadsState(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied


class ReturnsItself(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        return self


class SharesParameters(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc = self.fc
        return copied


class CopiesOneLayer(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm)
        return copied


class LosesNumbers(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm, memo)
        return copied


class LosesState(Net):
    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "scale": 1.0}


class Reduced(Net):
    def __reduce_ex__(self, protocol: Any) -> Any:
        return _reduced, (type(self), {name: tensor.clone() for name, tensor in self.state_dict().items()})


def _reduced(kind: type[Net], state: dict[str, Tensor]) -> Net:
    copied = kind()
    copied.load_state_dict(state)
    return copied


class Outer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.head = LoadsState(scale), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


def generated(scale: float) -> nn.Module:
    """Return a module whose class has been generated for it, with the forward of a graph."""
    module = Net(scale)
    graph = fx.Graph()
    graph.output(graph.call_module("norm", (graph.call_module("fc", (graph.placeholder("x"),)),)))
    traced = fx.GraphModule(module, graph)
    traced.note = "lost by its own copying"
    return nn.Sequential(traced, nn.Linear(3, 3))


KINDS = (
    generated,
    LoadsState,
    ReturnsItself,
    SharesParameters,
    CopiesOneLayer,
    LosesNumbers,
    LosesState,
    Reduced,
    Outer,
)
RATE = 0.1


def models(kind: Callable[[float], nn.Module], members: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [kind(2.0).double() for _ in range(members)]


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return normal(6, 4), normal(6, 3)


def sgd(parameters: Any) -> Any:
    return hf.optim.SGD(parameters, lr=RATE)


def of_array(members: list[nn.Module]) -> hf.FusedModule:
    fused = hf.fuse(members)
    step = hf.train_step(fused, F.mse_loss, sgd(fused.parameters()))
    for _ in range(2):
        step(*batch())
    return fused


def of_population(members: list[nn.Module]) -> hf.Population:
    pop = hf.Population(members, optimizer=sgd, loss=F.mse_loss)
    for _ in range(2):
        pop.step(*batch())
    return pop


def of_plain_members(members: list[nn.Module]) -> list[nn.Module]:
    """Train in a population with a model of another kind, so that a single one is a plain member."""
    pop = of_population([*members, nn.Linear(4, 3).double()])
    return [pop.stop(row) for row in range(len(members))]


def appended(members: list[nn.Module]) -> list[nn.Module]:
    fused = of_array(members)
    fused.append([fused.unfuse()[0]])
    fused.keep(list(range(len(members))))
    return fused.unfuse()


def of_task(members: list[nn.Module]) -> list[nn.Module]:
    report = hf.train([hf.Task(members, F.mse_loss, sgd, [batch()] * 2, name="task")])
    return list(report["task"].models)


WAYS: dict[str, Callable[[list[nn.Module]], list[nn.Module]]] = {
    "unfuse": lambda members: of_array(members).unfuse(),
    "members": lambda members: list(of_array(members)),
    "deepcopy": lambda members: copy.deepcopy(of_array(members)).unfuse(),
    "append": appended,
    "hf.train": of_task,
    "stop": lambda members: of_population(members).stop(list(range(len(members)))),
    "plain": of_plain_members,
}


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_as_alone(kind: Callable[[float], nn.Module], way: str, members: int) -> None:
    alone = models(kind, members)
    for model in alone:
        opt = torch.optim.SGD(model.parameters(), lr=RATE)
        for _ in range(2):
            opt.zero_grad()
            x, y = batch()
            F.mse_loss(model(x), y).backward()
            opt.step()
    trained = WAYS[way](models(kind, members))
    for model, expected in zip(trained, alone, strict=True):
        for (name, tensor), (_, value) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
            torch.testing.assert_close(tensor, value, rtol=1e-9, atol=1e-12, msg=name)
        torch.testing.assert_close(model.eval()(batch()[0]), expected.eval()(batch()[0]), rtol=1e-9, atol=1e-12)


# Attributes that users set on parameters stay: on stacks, on members, and on copies of them.
class Scale(nn.Parameter):
    """A kind of parameter that an optimizer has to distinguish from others."""


class InfShape:
    """Like the one of mup: equal by its attributes, and a separate object in every model."""

    def __init__(self, base: int) -> None:
        self.base = base


class Marked(nn.Module):
    """``gain`` is read by forward if ``reads``; ``addresses``: it also asks for the memory below a tensor."""

    def __init__(self, gain: float, reads: bool, addresses: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.scale = Scale(torch.rand(3).double())
        self.reads = reads
        self.addresses = addresses
        self.linear.weight.infshape = InfShape(4)  # type: ignore[assignment]
        self.linear.bias._optim = {"lr": 0.1, "weight_decay": 0.0}  # type: ignore[assignment]
        self.scale.no_decay = True  # type: ignore[attr-defined]
        self.scale.gain = gain  # type: ignore[attr-defined]
        self.scale.partner = self.linear.weight if not reads else None  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.addresses:
            x.detach().untyped_storage()
        return self.linear(x) * self.scale * (self.scale.gain if self.reads else 1.0)  # type: ignore[attr-defined]


def members(gains: Sequence[float], reads: bool, addresses: bool = False) -> list[Any]:
    return [Marked(gain, reads, addresses) for gain in gains]


@pytest.mark.parametrize(("reads", "addresses"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("gains", [(2.0, 2.0, 2.0), (2.0, 3.0, 2.0)], ids=["equal", "different"])
def test_an_array_of_marked_parameters_equals_its_members(gains: Sequence[float], reads: bool, addresses: bool) -> None:
    models = members(gains, reads, addresses)
    fused = hf.fuse(models)
    x, target = torch.randn(4, 3).double(), torch.randn(4, 3).double()
    step = hf.train_step(fused, F.mse_loss, hf.optim.Adam(fused.parameters(), lr=0.1), compile=False)
    alone = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    for _ in range(3):
        step(x, target)
        for model, optimizer in zip(models, alone, strict=True):
            optimizer.zero_grad()
            F.mse_loss(model(x), target).backward()
            optimizer.step()
    for view, whole, model in zip(fused, fused.unfuse(), models, strict=True):
        for member in (view, whole):
            torch.testing.assert_close(member(x), model(x), rtol=RELATIVE, atol=1e-12)
    assert torch.equal(fused.eval()(x)[1], fused[1](x))


@pytest.mark.parametrize("gains", [(2.0, 2.0), (2.0, 3.0)], ids=["equal", "different"])
def test_marks_and_classes_are_on_stacks_views_and_copies(gains: Sequence[float]) -> None:
    fused: Any = hf.fuse(members(gains, False))
    for array in (fused, fused[0:2], copy.deepcopy(fused), fused.to(torch.float32)):
        assert type(array.scale) is Scale
        assert array.scale.no_decay is True
        assert array.linear.bias._optim == {"lr": 0.1, "weight_decay": 0.0}
        assert array.linear.weight.infshape.base == 4
        for views in (list(array), array.unfuse()):
            assert [view.scale.gain for view in views] == list(gains)
            assert all(isinstance(view.scale, Scale) for view in views)
            assert all(view.scale.partner is view.linear.weight for view in views)
    # torch's pickle forgets classes of parameters.
    again: Any = pickle.loads(pickle.dumps(fused))
    assert [view.scale.gain for view in again] == list(gains)


USES: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "comparison": lambda mark: mark == 1.0,
    "number": float,
    "item": lambda mark: mark["lr"],
    "attribute": lambda mark: mark.base,
    "product": lambda mark: 2 * mark,
    "loop": list,
    "call": lambda mark: mark(),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_mark_on_which_members_differ_is_no_value(use: Callable[[Any], Any]) -> None:
    fused: Any = hf.fuse(members([1.0, 2.0], False))
    message = r"different values of 'gain' on their parameter 'scale'.*hf.optim.groups\(fused, rule\)"
    with pytest.raises(hf.FusionError, match=message):
        use(fused.scale.gain)
    assert "different values" in repr(fused.scale.gain)
    # What refers to a part of a model is another one in each.
    assert isinstance(fused.scale.partner, DifferingMark)


# Losses that cannot train raise errors of hfusion that name the remedy, in every function that takes a loss.
Loss = Callable[..., Any]
BATCH = torch.randn(5, 8), torch.tensor([0, 1, 2, 0, 1])


def step(loss: Loss, compile: bool) -> None:
    fused = hf.fuse([nn.Linear(8, 3) for _ in range(2)])
    hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)(*BATCH)


def population(loss: Loss, *others: nn.Module) -> None:
    models = [nn.Linear(8, 3), nn.Linear(8, 3), *others]
    hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=loss, compile=False).step(*BATCH)


def plain(loss: Loss) -> None:
    models = [nn.Linear(8, 3), nn.Sequential(nn.Linear(8, 3))]
    population = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=loss)
    population.step(*BATCH)


def sweep(loss: Loss) -> None:
    pytest.importorskip("optuna")
    hf.sweep(lambda: nn.Linear(8, 3), lambda trial: {"lr": 0.1}, loss, [BATCH], trials=2, epochs=1)


ENTRIES: dict[str, Callable[[Loss], None]] = {
    "eager step": lambda loss: step(loss, False),
    "compiled step": lambda loss: step(loss, True),
    "population": population,
    "mixed population": lambda loss: population(loss, nn.Sequential(nn.Linear(8, 3))),
    "plain members": plain,
    "sweep": sweep,
}


def each_sample(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target, reduction="none")


LOSSES: dict[str, tuple[Loss, str]] = {
    "number per sample": (each_sample, r"must give one number for .* it gave .*5\]\. Take its mean\."),
    "Python number": (lambda output, target: F.cross_entropy(output, target).item(), "it gave float. Return a tensor"),
    "nothing": (lambda output, target: None, "it gave NoneType. Return a tensor"),
    "detached": (lambda output, target: F.cross_entropy(output.detach(), target), "without detach"),
    "whole numbers": (lambda output, target: (output.argmax(-1) == target).sum(), "of dtype torch.int64, have no grad"),
    "per_model": (hf.per_model(F.cross_entropy), r"is per_model\(cross_entropy\), but .* without hf.per_model"),
}


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("kind", LOSSES)
def test_a_loss_that_cannot_train(entry: str, kind: str) -> None:
    loss, message = LOSSES[kind]
    with pytest.raises(ValueError, match=message):
        ENTRIES[entry](loss)


def test_a_model_without_trained_parameters_needs_no_gradient() -> None:
    check_losses(torch.tensor(1.0), trains=False)
    with pytest.raises(ValueError, match="let a parameter require a gradient"):
        check_losses(torch.tensor(1.0))
