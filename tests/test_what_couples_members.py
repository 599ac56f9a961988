"""The rows of docs/forward.md that are not about optimizers: these are in tests/optim."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim.swa_utils import AveragedModel, update_bn

import hfusion as hf

MEMBERS = 3


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.norm(self.fc(x)).relu())
        return y


def pair() -> tuple[hf.FusedModule, list[nn.Module]]:
    models = [Normed().double() for _ in range(MEMBERS)]
    return hf.fuse(copy.deepcopy(models)), list(models)


def inputs(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        yield torch.randn(6, 3, generator=generator, dtype=torch.float64)


def backward(fused: hf.FusedModule, models: list[nn.Module], x: Tensor) -> None:
    for model in (fused, *models):
        model.zero_grad()
    fused(x).square().flatten(1).mean(1).sum().backward()
    for model in models:
        model(x).square().mean().backward()


def assert_equal(fused: nn.Module, models: list[Any], of: Callable[[nn.Module], Any] = nn.Module.state_dict) -> None:
    for key, stack in of(fused).items():
        rows = torch.stack([of(model)[key] for model in models])
        torch.testing.assert_close(stack, rows if stack.dim() == rows.dim() else rows[0], rtol=1e-9, atol=1e-12)


def test_update_bn_member_by_member() -> None:
    fused, models = pair()
    before = copy.deepcopy(fused.state_dict())
    for asked in (fused, AveragedModel(fused)):
        update_bn(inputs(3), asked)
    assert all(torch.equal(value, before[key]) for key, value in fused.state_dict().items())
    for member, model in zip(fused, models, strict=True):
        update_bn(inputs(3), member)
        update_bn(inputs(3), model)
    assert_equal(fused, models)
    assert fused.get_buffer("norm.num_batches_tracked").tolist() == [3] * MEMBERS


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "weight norm": parametrizations.weight_norm,
    "spectral norm": parametrizations.spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", amount=0.5),
    "a submodule": lambda module: module.add_module("more", nn.ReLU()),
    "an attribute": lambda module: setattr(module, "more", nn.ReLU()),
    "a parameter": lambda module: module.register_parameter("more", nn.Parameter(torch.ones(2))),
    "a buffer": lambda module: module.register_buffer("more", torch.ones(2)),
    "a deletion": lambda module: delattr(module, "weight"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_would_change_a_captured_module_is_refused(change: Callable[[nn.Module], Any]) -> None:
    fused, models = pair()
    with pytest.raises(hf.FusionError, match=r"fused Linear.*fuse them again"):
        change(fused.get_submodule("fc"))
    (x,) = inputs(1)
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in models]))


def test_a_parameter_may_be_given_anew() -> None:
    fused, _ = pair()
    fc = fused.get_submodule("fc")
    fc.weight = nn.Parameter(torch.zeros_like(fc.get_parameter("weight")))
    assert not fused.get_parameter("fc.weight").any()


class Branching(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y / 2 if y.sum().item() > 0 else y


def compiled(model: nn.Module) -> Any:
    return torch.compile(copy.deepcopy(model), backend="eager")


def test_models_that_torch_compile_has_wrapped() -> None:
    """The modules inside are fused, also where they branch on values."""
    _, models = pair()
    fused = hf.fuse([*map(compiled, models)])
    for x in inputs(2):
        backward(fused, models, x)
    assert_equal(fused, models)
    assert type(fused.unfuse()[0]) is type(models[0])
    fused.put(0, compiled(models[1]))
    fused.append([compiled(models[0])])
    (x,) = inputs(1)
    torch.testing.assert_close(fused(x)[[-1, 0]], torch.stack([model(x) for model in models[:2]]))
    branching = [Branching(3, 2).double() for _ in range(2)]
    fused = hf.fuse([*map(compiled, branching)])
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in branching]))
    with pytest.raises(hf.FusionError, match=r"module 0 is wrapped by torch.compile. Give the module inside it"):
        hf.fuse([nn.Sequential(compiled(models[0]))])
