"""A view is a view: what is said to a member of an array holds, as if it were said to the model alone."""

from __future__ import annotations

import copy
import pickle
import types
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfusion as hf
from tests.alone import Member, Own, compare_tensors

MEMBERS = 4
Make = Callable[[], nn.Module]


class Normed(nn.Module):
    """With statistics, a scalar that forward reads, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.out.weight = self.fc.weight
        self.scale = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.fc(x)).tanh()) * self.scale
        return y


def pair(make: Make = Normed, members: int = MEMBERS) -> tuple[hf.FusedModule, list[nn.Module]]:
    torch.manual_seed(3)
    models = [make().double() for _ in range(members)]
    return hf.fuse(copy.deepcopy(models)), models


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(actual: Tensor | None, expected: Tensor | None, label: str) -> None:
    assert (actual is None) == (expected is None), label
    if actual is not None:
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10, msg=lambda m: f"{label}: {m}")


def compare(fused: hf.FusedModule, models: Sequence[nn.Module]) -> None:
    """State, gradients, modes and flags of every member, seen from both sides."""
    state, stacks = fused.state_dict(), dict(fused.named_parameters())
    for row, (member, model) in enumerate(zip(fused, models, strict=True)):
        for key, value in model.state_dict().items():
            close(member.state_dict()[key], value, f"{key} of {row}")
            close(state[key][row], value, f"row {row} of {key}")
        for name, parameter in model.named_parameters():
            expected = member.get_parameter(name)
            assert expected.requires_grad == parameter.requires_grad, name
            close(expected.grad, parameter.grad, f"gradient of {name} of {row}")
            grad = stacks[name].grad
            zero = parameter.grad is None
            if grad is not None:
                close(grad[row], torch.zeros_like(parameter) if zero else parameter.grad, f"row {row} of {name}.grad")
        for (path, submodule), original in zip(member.named_modules(), model.modules(), strict=True):
            assert submodule.training == original.training, path


def outputs(fused: hf.FusedModule, models: Sequence[nn.Module], x: Tensor) -> list[Tensor]:
    """Return the outputs of the array and of the models, after comparing them row by row."""
    fused_output, model_outputs = fused(x), [model(x) for model in models]
    for row, output in enumerate(model_outputs):
        close(fused_output[row].detach(), output.detach(), f"output of {row}")
    return [fused_output, *model_outputs]


def backward(fused: hf.FusedModule, models: Sequence[nn.Module], x: Tensor) -> None:
    fused_output, *model_outputs = outputs(fused, models, x)
    for output in (fused_output, *model_outputs):
        if output.requires_grad:
            output.square().sum().backward()


# Identity and life.


def test_one_view_for_each_row() -> None:
    fused, _ = pair()
    views = list(fused)
    assert all(fused[row] is views[row] and fused[row - MEMBERS] is views[row] for row in range(MEMBERS))
    assert type(fused[0]) is Normed
    assert all(a is b for a, b in zip(fused[2].parameters(), views[2].parameters(), strict=True))


def test_a_hook_on_a_parameter_of_one_member_runs() -> None:
    fused, models = pair()
    for module in (fused[1], models[1]):
        module.get_parameter("out.bias").register_hook(lambda grad: grad * 3)
    backward(fused, models, inputs())
    compare(fused, models)


def test_a_layer_that_a_member_froze_trains_again() -> None:
    fused, models = pair()
    for trained in (False, True):
        for module in (fused[1], models[1]):
            module.get_submodule("norm").requires_grad_(trained)
        backward(fused, models, inputs())
        compare(fused, models)


def test_views_move_with_their_rows() -> None:
    fused, models = pair()
    views = list(fused)
    backward(fused, models, inputs())
    views[3].eval()
    models[3].eval()
    fused.keep([3, 1])
    assert (fused[0], fused[1]) == (views[3], views[1])
    compare(fused, [models[3], models[1]])
    backward(fused, [models[3], models[1]], inputs(1))
    compare(fused, [models[3], models[1]])
    models[0].zero_grad()
    fused.append([models[0]])
    assert fused[0] is views[3]
    assert fused[2] is not views[0]
    compare(fused, [models[3], models[1], models[0]])
    before = copy.deepcopy(views[0].state_dict())
    with torch.no_grad():
        fused.get_parameter("fc.weight").zero_()
    assert all(torch.equal(value, before[key]) for key, value in views[0].state_dict().items())


def test_copies_of_an_array_keep_what_was_said() -> None:
    fused, models = pair()
    for model in (fused[2], models[2]):
        model.get_submodule("norm").eval()
        model.get_submodule("out").requires_grad_(False)
        model.get_submodule("fc").register_forward_hook(double)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        alone = copy.deepcopy(models)
        assert other[2] is not fused[2]
        backward(other, alone, inputs())
        compare(other, alone)
    for member, expected in zip(fused.unfuse(), models, strict=True):
        assert [m.training for m in member.modules()] == [m.training for m in expected.modules()]
        assert [p.requires_grad for p in member.parameters()] == [p.requires_grad for p in expected.parameters()]


def double(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2


# What an array cannot hold.

REFUSED: dict[str, tuple[Callable[[Any], object], Callable[[Any], object], str]] = {
    "another dtype": (lambda m: m.float(), lambda m: m.double(), "float32 in member 2"),
    "another shape": (
        lambda m: setattr(m.out, "bias", nn.Parameter(torch.zeros(3).double())),
        lambda m: setattr(m.out, "bias", nn.Parameter(torch.ones(4).double())),
        r"out.bias has shape \(4,\) in the array and \(3,\) in member 2",
    ),
    "a submodule": (lambda m: m.add_module("more", nn.ReLU()), lambda m: delattr(m, "more"), "has a module more"),
    "another class": (
        lambda m: setattr(m, "norm", nn.LayerNorm(4).double()),
        lambda m: setattr(m, "norm", nn.BatchNorm1d(4).double()),
        "norm is BatchNorm1d in the array and LayerNorm in member 2",
    ),
    "a buffer": (lambda m: m.register_buffer("more", torch.ones(2)), lambda m: delattr(m, "more"), "a tensor more"),
    "an untied weight": (
        lambda m: setattr(m.out, "weight", nn.Parameter(torch.ones(4, 4).double())),
        lambda m: setattr(m.out, "weight", m.fc.weight),
        "tie different tensors",
    ),
    "pruning": (
        lambda m: prune.l1_unstructured(m.out, "bias", amount=0.5),
        lambda m: prune.remove(m.out, "bias"),
        "out.bias_orig",
    ),
    "a module in a list": (
        lambda m: setattr(m, "more", [nn.Linear(2, 2)]),
        lambda m: delattr(m, "more"),
        "not registered as a submodule",
    ),
}


@pytest.mark.parametrize(("change", "undo", "why"), REFUSED.values(), ids=REFUSED)
def test_changes_that_do_not_fit_are_refused_until_undone(change: Any, undo: Any, why: str) -> None:
    fused, models = pair()
    fused[2].get_parameter("fc.weight")
    change(fused[2])
    for call in (lambda: fused(inputs()), lambda: fused.keep([0, 2]), lambda: copy.deepcopy(fused)):
        with pytest.raises(hf.FusionError, match=why):
            call()
    undo(fused[2])
    if why != "float32 in member 2":
        change(models[2])
        undo(models[2])
        backward(fused, models, inputs())
        compare(fused, models)


def test_members_exchange_modules_and_memory() -> None:
    fused, models = pair()
    backward(fused, models, inputs())
    for one, other in ((fused[0], fused[1]), (models[0], models[1])):
        one.norm, other.norm = other.norm, one.norm
        one.fc.bias, other.fc.bias = other.fc.bias, one.fc.bias
        one.fc.weight.data, other.fc.weight.data = other.fc.weight.data, one.fc.weight.data
    backward(fused, models, inputs())
    compare(fused, models)
    fused[0].fc.bias = fused[1].fc.bias
    with pytest.raises(hf.FusionError, match="is one tensor with one of member"):
        fused(inputs())


# Steps, populations, runs.


def test_a_population_hears_its_members() -> None:
    fused, models = pair()
    make = lambda p: hf.optim.SGD(p, lr=0.1, momentum=0.9)  # noqa: E731
    pop = hf.Population(fused, optimizer=make, loss=nn.functional.mse_loss, clip_norm=0.5, compile=False)
    make_alone = partial(torch.optim.SGD, momentum=0.9)
    alone = [Member(model, make_alone, nn.functional.mse_loss, Own(0.1, norm=0.5)) for model in models]
    assert pop.models[1] is pop.models[1] is fused[1]
    assert pop.models[-1] is fused[3]
    for model in (pop.models[2], models[2]):
        assert model is not None
        model.get_submodule("fc").requires_grad_(False)
        model.get_submodule("norm").eval()
        model.get_submodule("out").register_forward_hook(double)
    for _ in range(2):
        losses = pop.step(inputs(), inputs(1))
        close(losses, torch.stack([member.call(inputs(), inputs(1))[0] for member in alone]), "losses")
    compare_tensors(fused, models, "after the steps")


class MaxNorm(nn.Linear):
    """A layer whose forward bounds its own weight."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Initialized(nn.Linear):
    """A layer that sets its bias by its first batch, and says so in Python."""

    is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_set:
            with torch.no_grad():
                self.weight.div_(super().forward(x).std())
            self.is_set = True
        return super().forward(x)


APART: dict[str, Callable[[nn.Module], object]] = {
    "hook": lambda model: model.register_forward_hook(double),
    "mode": lambda model: model.eval(),
    "frozen": lambda model: model.get_submodule("0").requires_grad_(False),
    "together": lambda model: None,
}


@pytest.mark.parametrize("kind", [MaxNorm, Initialized])
@pytest.mark.parametrize("apart", APART)
def test_members_that_run_apart_may_write_into_their_parameters(apart: str, kind: type[nn.Linear]) -> None:
    """Also where a backward needs the parameters that were written."""
    models = [nn.Sequential(nn.Linear(4, 4), kind(4, 3)).double() for _ in range(3)]
    fused = hf.fuse(copy.deepcopy(models))
    for model in (fused[1], models[1]):
        APART[apart](model)
    x = torch.randn(5, 4, dtype=torch.float64)
    for _ in range(2):
        outputs, alone = fused(x), [model(x) for model in models]
        close(outputs, torch.stack(alone), "output")
        outputs.sum().backward()
        sum(output.sum() for output in alone).backward()
    for member, model in zip(fused, models, strict=True):
        for (name, own), other in zip(member.named_parameters(), model.parameters(), strict=True):
            close(own, other, name)
            assert (own.grad is None) == (other.grad is None)
            if other.grad is not None:
                close(own.grad, other.grad, f"gradient of {name}")


def test_a_loop_notices_parameters_that_change_before_its_backward() -> None:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    fused[1].register_forward_hook(double)
    loss = fused(torch.randn(5, 4)).sum()
    with torch.no_grad():
        fused.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


OF_TORCH: dict[str, tuple[Make, str, Any]] = {
    "LeakyReLU": (lambda: nn.LeakyReLU(0.1), "negative_slope", 0.9),
    "Dropout": (lambda: nn.Dropout(0.0), "p", 1.0),
    "LayerNorm": (lambda: nn.LayerNorm(3), "eps", 1.0),
    "GELU": (nn.GELU, "approximate", "tanh"),
    "Softmax": (lambda: nn.Softmax(0), "dim", 1),
}


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("name", OF_TORCH)
def test_attributes_of_modules_of_torch_are_heard(name: str, looped: bool) -> None:
    """What torch's own forward reads, of one member after a first call."""
    make, attribute, value = OF_TORCH[name]
    models = [nn.Sequential(nn.Linear(4, 3), make()).double() for _ in range(3)]
    fused = hf.fuse(copy.deepcopy(models))
    x = torch.randn(5, 4, dtype=torch.float64)
    for model in (fused[2], models[2]) if looped else ():
        model.register_forward_hook(double)
    for number in range(2):
        close(fused(x), torch.stack([model(x) for model in models]), f"call {number}")
        for model in (fused[1], models[1]):
            setattr(model[1], attribute, value)  # type: ignore[index]


class Encoder(nn.Module):
    """Forward does not read ``scale``, another method does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.scale = nn.Linear(4, 3), 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x)  # type: ignore[no-any-return]

    def encode(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale  # type: ignore[no-any-return]


def test_attributes_that_another_method_reads_are_heard() -> None:
    models = [Encoder().double() for _ in range(3)]
    fused = hf.fuse(copy.deepcopy(models))
    x = torch.randn(5, 4, dtype=torch.float64)
    fused(x)
    for scale in (5.0, 7.0):
        for model in (fused[1], models[1]):
            model.scale = scale  # type: ignore[assignment]
        close(fused.encode(x), torch.stack([model.encode(x) for model in models]), f"encode at {scale}")
    for name in ("encode", "forward"):
        for model in (fused[2], models[2]):
            setattr(model, name, types.MethodType(lambda self, x: -self.fc(x), model))
        close(fused.encode(x), torch.stack([model.encode(x) for model in models]), f"its own {name}")


def _clamp(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.1, 0.1)


def _halve(model: nn.Module) -> None:
    vector = nn.utils.parameters_to_vector(model.parameters()) * 0.5
    nn.utils.vector_to_parameters(vector, model.parameters())


@pytest.mark.parametrize("write", [_clamp, _halve])
def test_what_is_written_to_a_member_by_data_is_in_its_row_at_once(write: Callable[[nn.Module], None]) -> None:
    """Before a step of the optimizer, and before another array reads the stacks."""
    fused, models = pair()
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.5, momentum=0.9)
    alone = [torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9) for model in models]
    target, targets = copy.deepcopy(fused), copy.deepcopy(models)
    for _ in range(2):
        fused(inputs()).square().sum().backward()
        for model in models:
            model(inputs()).square().sum().backward()
        for model in (*models, *fused):
            write(model)
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(fused.parameters()), 0.5)
            for average, model in zip(targets, models, strict=True):
                torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        for own in alone:
            own.step()
            own.zero_grad()
    compare(fused, models)
    compare(target, targets)
