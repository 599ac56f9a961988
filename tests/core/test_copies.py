"""Classes that copy themselves, attributes of parameters: arrays train as alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.parameter_attributes import DifferingMark
from tests.alone import Member, Own, normal
from tests.oracle import RELATIVE


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


class SharesParameters(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc = self.fc
        return copied


class LosesNumbers(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm, memo)
        return copied


class Outer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.head = LoadsState(scale), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


KINDS = (LoadsState, SharesParameters, LosesNumbers, Outer)
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


def of_task(members: list[nn.Module]) -> list[nn.Module]:
    report = hf.train([hf.Task(members, F.mse_loss, sgd, [batch()] * 2, name="task")])
    return list(report["task"].models)


WAYS: dict[str, Callable[[list[nn.Module]], list[nn.Module]]] = {
    "unfuse": lambda members: of_array(members).unfuse(),
    "deepcopy": lambda members: copy.deepcopy(of_array(members)).unfuse(),
    "hf.train": of_task,
    "stop": lambda members: of_population(members).stop(list(range(len(members)))),
}


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_trained_as_alone(kind: Callable[[float], nn.Module], way: str, members: int) -> None:
    alone = models(kind, members)
    for model in alone:
        member = Member(model, torch.optim.SGD, F.mse_loss, Own(RATE))
        for _ in range(2):
            member.call(*batch())
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
    alone = [Member(model, torch.optim.Adam, F.mse_loss, Own(0.1)) for model in models]
    for _ in range(3):
        step(x, target)
        for member in alone:
            member.call(x, target)
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
    "attribute": lambda mark: mark.base,
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
