"""Classes that copy themselves, attributes of parameters: arrays train as alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.gradient_usage import absent_rows
from hfusion.core.parameter_attributes import DifferingMark
from tests.alone import Member, Own, normal
from tests.forwards.table import branch, linear, module, parameter
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


# A parameter that a member has not used in a step stays as it is for that member, with its moments and counts.
MEMBERS = 3


def by_key(self: Any, x: Tensor) -> Tensor:
    """Uses ``a``, ``b`` or neither, by the sign of a value."""
    key = float(x.detach()[0, 0])
    if key > 1:
        return self.a(x)
    return self.b(x) if key > 0 else x


def looped_twice(self: Any, x: Tensor) -> Tensor:
    """Loops within what is batched, twice, with a parameter that is used before and after."""
    h = self.branch(x) + self.first(x).tanh()
    return self.last(self.branch(h * self.scale) * self.scale)


def left(self: Any, h: Tensor, x: Tensor) -> Tensor:
    """Gives its input, or a constant that does not depend on it."""
    return h * self.weight if float(x[0, 0]) > 0 else torch.ones_like(h)


def before_an_exit(self: Any, x: Tensor) -> Tensor:
    """Layers before an exit are unused too, batched or looped, except for the part that bypasses the exit."""
    h = self.branch(self.first(x)).relu()
    h = self.conv(h.unsqueeze(-1)).squeeze(-1)
    return self.last(self.exit(h + self.around(x).detach(), x)) + self.around(x)


def two_results(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of which a loss may use one."""
    h = self.first(x)
    return self.exit(h, x), self.aux(h)


def after_a_loop(self: Any, x: Tensor) -> Tensor:
    """A looped layer before an exit, which gets no gradient from some members."""
    return self.last(self.exit(self.first(x), x))


branching = module(by_key, a=linear, b=linear)
looped = module(lambda self, x: self.fc(branch(x)), fc=linear)
leaving = module(left, weight=parameter())
# All of it is looped, and a part that no member uses.
Alone = module(by_key, a=linear, b=linear, unused=linear)
Inside = module(looped_twice, branch=branching, first=linear, last=linear, scale=parameter())


def keyed_batch(*keys: float) -> Tensor:
    """One input for each member, whose first value decides on its branch."""
    xs = torch.rand(len(keys), 5, 4, dtype=torch.float64) / 2
    xs[:, 0, 0] = torch.tensor(keys, dtype=torch.float64)
    return xs


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "adam": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
}
RATES = [0.1, 0.05, 0.02]
# Every step, the values on which the members branch.
KEYS = [(2.0, 0.5, -1.0), (2.0, 2.0, 2.0), (0.5, -1.0, -1.0), (-1.0, 0.5, 2.0), (0.5, 2.0, 0.5)]


@cache
def array_of(make: Callable[[], nn.Module]) -> tuple[list[nn.Module], hf.FusedModule, dict[str, Tensor]]:
    """Models and their array, which is captured once, with the values that it has at first."""
    models = [make().double() for _ in range(MEMBERS)]
    fused = hf.fuse(models)
    return models, fused, {key: value.clone() for key, value in fused.state_dict().items()}


class Pair:
    """An array with its optimizer, and its members alone with theirs."""

    def __init__(self, make: Callable[[], nn.Module], name: str, options: dict[str, Any]) -> None:
        models, self.fused, values = array_of(make)
        self.models = copy.deepcopy(models)
        self.fused.load_state_dict(values)
        self.fused.zero_grad()
        self.name, self.options = name, options
        self.optimizer = getattr(hf.optim, name)(self.fused.parameters(), lr=RATES, **options)
        self.alone = [
            getattr(torch.optim, name)(model.parameters(), lr=rate, **options)
            for model, rate in zip(self.models, RATES, strict=True)
        ]

    def zero(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.zero_grad()

    def backward(self, xs: Tensor) -> None:
        outputs = whole(self.fused(hf.stacked(xs)))
        (outputs**2).flatten(1).mean(1).sum().backward()
        for model, x in zip(self.models, xs, strict=True):
            outputs = whole(model(x))
            if outputs.requires_grad:
                (outputs**2).mean().backward()

    def step(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.step()

    def check(self) -> None:
        """Gradients that are none alone, parameters and state."""
        states = [optimizer.state for optimizer in self.alone]
        for key, param in self.fused.named_parameters():
            parameters = [model.get_parameter(key) for model in self.models]
            none = [p.grad is None for p in parameters]
            rows = None if param.grad is None else absent_rows(param.grad)
            absent = [param.grad is None] * MEMBERS if rows is None else rows.tolist()
            assert absent == none, (key, absent, none)
            close(param, parameters, key)
            for member, state in enumerate(states):
                fused_state = self.optimizer.state.get(param, {})
                for kind, value in state.get(parameters[member], {}).items():
                    if isinstance(value, Tensor):
                        close(fused_state[kind][member : member + 1], [value], f"{kind} of {key}")
        for member, saved in enumerate(self.optimizer.unfuse()):
            alone = self.alone[member].state_dict()["state"]
            begun = {k for k, entry in alone.items() if any(isinstance(v, Tensor) for v in entry.values())}
            assert set(saved["state"]) == begun


def close(stack: Tensor, rows: Sequence[Tensor], label: str) -> None:
    expected = torch.stack([row.detach() for row in rows]).to(stack.dtype)
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{label}: {m}")


def whole(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else torch.cat(list(outputs), -1)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", [Alone, Inside])
def test_equals_alone(make: Callable[[], nn.Module], name: str, options: dict[str, Any]) -> None:
    pair = Pair(make, name, options)
    for keys in KEYS:
        pair.zero()
        pair.backward(keyed_batch(*keys))
        pair.check()
        pair.step()
        pair.check()


LAYERS = {"first": linear, "exit": leaving, "last": linear}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "before": module(before_an_exit, branch=branching, around=linear, conv=lambda: nn.Conv1d(4, 4, 1), **LAYERS),
    "both results": module(two_results, aux=linear, **LAYERS),
    "after a loop": module(after_a_loop, **LAYERS | {"first": looped}),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_of_other_models(make: Callable[[], nn.Module]) -> None:
    pair = Pair(make, "AdamW", {})
    for keys in KEYS:
        pair.zero()
        pair.backward(keyed_batch(*keys))
        pair.step()
        pair.check()


def test_clipping_counts_what_is_there() -> None:
    for order in (2.0, float("inf"), -float("inf"), 0.5, 0.0):
        pair = Pair(Alone, "SGD", {})
        pair.backward(keyed_batch(2.0, 0.5, -1.0))
        norms = hf.optim.clip_grad_norm_(pair.fused.parameters(), 0.1, norm_type=order)
        alone = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=order) for m in pair.models]
        # Member 2 has no gradient at all.
        torch.testing.assert_close(norms[:2], torch.stack(alone[:2]))
        pair.step()
        pair.check()


def test_a_planned_array_loops_where_a_part_does_what_its_capture_did_not() -> None:
    """The first member, which is captured, gives a new tensor; the last one gives back its input."""
    models, *_ = array_of(Inside)
    fused = hf.fuse(copy.deepcopy(models))
    fused.planned_for(torch.device("cpu"))
    for keys in KEYS:
        xs = keyed_batch(*keys)
        expected = [model(x) for model, x in zip(models, xs, strict=True)]
        close(fused(hf.stacked(xs)), expected, "outputs")
