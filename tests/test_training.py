"""The main promise: an array trains as its members do alone."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

import hfusion as hf
from tests.alone import Branch, assert_alone, call, compare_call, compare_tensors
from tests.zoo import MODELS, Model

# So large that the rounding of a gradient that is zero in truth (a bias before a BatchNorm) stays rounding.
EPS = 1e-4


def members(model: Model, count: int) -> list[nn.Module]:
    torch.manual_seed(count)
    return [model.make().double() for _ in range(count)]


# Each model with every number of members and with both kinds of inputs, and each number with both.
ARRAYS = [
    (model, count, (place + turn) % 2 == 0)
    for place, model in enumerate(MODELS)
    for turn, count in enumerate((1, 2, 5))
]


@pytest.mark.parametrize(
    ("model", "count", "per_member"),
    ARRAYS,
    ids=lambda value: {False: "shared", True: "stacked"}.get(value, str(value)),
)
def test_five_steps(model: Model, count: int, per_member: bool) -> None:
    models = members(model, count)
    fused, alone = hf.fuse(models), copy.deepcopy(models)
    optimizers: list[Any] = [torch.optim.Adam(m.parameters(), lr=0.01 * (b + 1), eps=EPS) for b, m in enumerate(alone)]
    optimizers.append(hf.optim.Adam(fused.parameters(), lr=[0.01 * (b + 1) for b in range(count)], eps=EPS))
    for step, size in enumerate([4, 4, 3, 4, 3]):
        x = hf.stacked([model.draw(size) for _ in range(count)]) if per_member else model.draw(size)
        compare_call(fused, alone, call(x), f"call {step}")
        for optimizer in optimizers:
            optimizer.step()
        compare_tensors(fused, alone, f"step {step}")
    for module in (fused, *alone):
        module.eval()
    compare_call(fused, alone, model.draw(3), "evaluation", grads=False)
    assert list(fused.state_dict()) == list(alone[0].state_dict())
    assert all(stack.is_contiguous() for stack in fused.state_dict().values())
    for original, untouched in zip(models, members(model, count), strict=True):
        pairs = zip(original.parameters(), untouched.parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


def on_gpu(model: nn.Module) -> nn.Module:
    """Move a model to CUDA, with tensors that are plain attributes, which `torch.nn.Module.cuda` leaves."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, Tensor):
                setattr(module, name, value.cuda())
    return model.cuda()


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS, ids=str)
def test_three_steps_on_a_gpu(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In float64, against the loop on the same GPU; kernels may add up in another order there."""
    monkeypatch.setattr("tests.alone.RELATIVE", 1e-7)
    monkeypatch.setattr("tests.alone.ABSOLUTE", 1e-9)
    assert_alone([on_gpu(m) for m in members(model, 3)], *(model.draw(4).cuda() for _ in range(3)), rate=0.02)


# The rows of docs/tools.md that are not about optimizers: these are in tests/optim.

MEMBERS = 3


def pair() -> tuple[hf.FusedModule, list[nn.Module]]:
    layers = lambda: (nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))  # noqa: E731
    models: list[nn.Module] = [nn.Sequential(*layers()).double() for _ in range(MEMBERS)]
    return hf.fuse(copy.deepcopy(models)), models


def inputs(count: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(4)
    for _ in range(count):
        yield torch.randn(6, 3, generator=generator, dtype=torch.float64)


def test_update_bn_member_by_member() -> None:
    fused, models = pair()
    before = copy.deepcopy(fused.state_dict())
    for asked in (fused, AveragedModel(fused)):
        update_bn(inputs(3), asked)
    assert all(torch.equal(value, before[key]) for key, value in fused.state_dict().items())
    for member, model in zip(fused, models, strict=True):
        update_bn(inputs(3), member)
        update_bn(inputs(3), model)
    compare_tensors(fused, models, "after update_bn")
    assert fused.get_buffer("1.num_batches_tracked").tolist() == [3] * MEMBERS


def compiled(model: nn.Module) -> Any:
    return torch.compile(copy.deepcopy(model), backend="eager")


def test_models_that_torch_compile_has_wrapped() -> None:
    """The modules inside are fused, also where they branch on values."""
    _, models = pair()
    fused = hf.fuse([*map(compiled, models)])
    for x in inputs(2):
        compare_call(fused, models, x)
    assert type(fused.unfuse()[0]) is type(models[0])
    fused.put(0, compiled(models[1]))
    fused.append([compiled(models[0])])
    (x,) = inputs(1)
    torch.testing.assert_close(fused(x)[[-1, 0]], torch.stack([model(x) for model in models[:2]]))
    branching = [Branch(3, 2).double() for _ in range(2)]
    fused = hf.fuse([*map(compiled, branching)])
    torch.testing.assert_close(fused(x), torch.stack([model(x) for model in branching]))
    with pytest.raises(hf.FusionError, match=r"module 0 is wrapped by torch.compile. Give the module inside it"):
        hf.fuse([nn.Sequential(compiled(models[0]))])
