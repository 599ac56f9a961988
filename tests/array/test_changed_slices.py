"""Changes made to a slice of an array count in its members, in the array, and in all that is copied from them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hfusion as hf
from tests.array.test_changes_before_copies import Scaled, doubled

INPUT = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def halved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value * 0.5 if value.is_floating_point() else value for name, value in state.items()}


def stepped(make: Any, loss: Callable[..., Tensor]) -> Callable[[Any], None]:
    def step(model: Any) -> None:
        optimizer = make(model.parameters(), lr=0.1)
        loss(model(INPUT), INPUT[:, :2]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def of_each(change: Callable[[Any], object]) -> Callable[[Sequence[Any]], None]:
    def changed(members: Sequence[Any]) -> None:
        for member in members:
            change(member)

    return changed


# Of a slice, and of the models alone that are its members.
CHANGES: dict[str, tuple[Callable[[Any], object], Callable[[Any], object]]] = {
    "mode": (lambda part: part.eval(), of_each(lambda model: model.eval())),
    "mode of a submodule": (lambda part: part.norm.eval(), of_each(lambda model: model.norm.eval())),
    "frozen": (lambda part: part.requires_grad_(False), of_each(lambda model: model.requires_grad_(False))),
    "frozen parameter": (
        lambda part: part.fc.weight.requires_grad_(False),
        of_each(lambda model: model.fc.weight.requires_grad_(False)),
    ),
    "data": (
        lambda part: setattr(part.fc.weight, "data", part.fc.weight.data * 0.5),
        of_each(lambda model: setattr(model.fc.weight, "data", model.fc.weight.data * 0.5)),
    ),
    "values": (
        lambda part: part.fc.weight.data.mul_(0.5),
        of_each(lambda model: model.fc.weight.data.mul_(0.5)),
    ),
    "load": (
        lambda part: part.load_state_dict(halved(part.state_dict())),
        of_each(lambda model: model.load_state_dict(halved(model.state_dict()))),
    ),
    "load by assigning": (
        lambda part: part.load_state_dict(halved(part.state_dict()), assign=True),
        of_each(lambda model: model.load_state_dict(halved(model.state_dict()))),
    ),
    "optimizer": (
        stepped(hf.optim.SGD, hf.per_model(F.mse_loss)),
        of_each(stepped(torch.optim.SGD, F.mse_loss)),
    ),
    "attribute of a member": (
        lambda part: setattr(part[0], "scale", 3.0),
        lambda models: setattr(models[0], "scale", 3.0),
    ),
    "data of a member": (
        lambda part: setattr(part[1].fc.weight, "data", torch.ones(2, 3, dtype=torch.float64)),
        lambda models: setattr(models[1].fc.weight, "data", torch.ones(2, 3, dtype=torch.float64)),
    ),
    "mode of a member": (lambda part: part[1].eval(), lambda models: models[1].eval()),
    "hook of a member": (
        lambda part: part[1].fc.register_forward_hook(doubled),
        lambda models: models[1].fc.register_forward_hook(doubled),
    ),
}


def outputs(models: Sequence[Any]) -> list[Tensor]:
    return [copy.deepcopy(model)(INPUT) for model in models]


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_slices(change: str, called: bool) -> None:
    torch.manual_seed(0)
    models = [Scaled().double() for _ in range(4)]
    fused = hf.fuse(copy.deepcopy(models))
    part = fused[1:3]
    if called:
        for model in (*models, *models[1:3], fused, part):
            model(INPUT)
    of_part, of_models = CHANGES[change]
    of_part(part)
    of_models(models[1:3])
    expected = outputs(models)
    pairs = {
        "unfuse of the slice": (outputs(part.unfuse()), expected[1:3]),
        "unfuse": (outputs(fused.unfuse()), expected),
        "copy of the slice": (list(copy.deepcopy(part)(INPUT)), expected[1:3]),
        "pickle of the slice": (list(pickle.loads(pickle.dumps(part))(INPUT)), expected[1:3]),
        "copy": (list(copy.deepcopy(fused)(INPUT)), expected),
        "members": (outputs(list(fused)), expected),
        "array": (list(fused(INPUT)), expected),
    }
    for name, (actual, reference) in pairs.items():
        torch.testing.assert_close(
            actual, reference, rtol=1e-9, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}"
        )
    flags = [[p.requires_grad for p in model.parameters()] for model in models]
    assert [[p.requires_grad for p in member.parameters()] for member in fused] == flags
    assert [[p.requires_grad for p in member.parameters()] for member in part.unfuse()] == flags[1:3]


def test_a_slice_of_another_dtype_is_an_array_of_its_own() -> None:
    fused = hf.fuse([Scaled().double() for _ in range(4)])
    part = fused[1:3]
    part.float()
    assert part(INPUT.float()).dtype == torch.float32
    assert fused(INPUT).dtype == torch.float64
    assert fused[1:3] is not part
