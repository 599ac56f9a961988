"""Every optimizer of torch on a whole array: equal to one per member, or refused; the replacement is right."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import hfusion as hf
from hfusion.optim import coupling
from tests.forwards.table import module, parameter
from tests.optim.arrays import Array

ELEMENTWISE: dict[str, dict[str, Any]] = {
    "Adadelta": {"lr": 1.0},
    "Adagrad": {"lr_decay": 0.1},
    "Adam": {"amsgrad": True},
    "Adamax": {},
    "AdamW": {},
    "ASGD": {"t0": 2.0, "weight_decay": 0.1},
    "NAdam": {"weight_decay": 0.1},
    "RAdam": {},
    "RMSprop": {"centered": True, "momentum": 0.9},
    "Rprop": {},
    "SGD": {"momentum": 0.9, "nesterov": True},
}
COUPLING: dict[str, tuple[Callable[[Any], Optimizer], str]] = {
    "LBFGS": (lambda params: torch.optim.LBFGS(params, lr=0.1), "one direction and one step length"),
    "Adafactor": (torch.optim.Adafactor, "norms over a whole tensor"),
    "Muon": (torch.optim.Muon, "orthogonalises"),
}


@pytest.fixture(autouse=True)
def watched() -> None:
    coupling.watch()


def test_every_optimizer_of_torch_is_decided_on() -> None:
    names = {name for name, cls in vars(torch.optim).items() if isinstance(cls, type) and issubclass(cls, Optimizer)}
    assert names - {"Optimizer"} == {*ELEMENTWISE, *COUPLING, "SparseAdam"}


@pytest.mark.parametrize(("name", "options"), ELEMENTWISE.items(), ids=ELEMENTWISE)
@pytest.mark.parametrize("foreach", [False, True])
def test_elementwise_ones_equal_alone(name: str, options: dict[str, Any], foreach: bool) -> None:
    array = Array(3, shapes=[(4, 3), (5,), ()])
    make = getattr(torch.optim, name)
    optimizers = [make(params, foreach=foreach, **options) for params in (array.params, *array.members)]
    for _ in range(5):
        array.draw_grads()
        for optimizer in optimizers:
            optimizer.step()
    array.assert_equal(1e-12)


# Its stack is a matrix, which Muon takes for one.
Scale = module(lambda self, x: x * self.weight, weight=parameter(3))


@pytest.mark.parametrize(("make", "why"), COUPLING.values(), ids=COUPLING)
def test_coupling_ones_are_refused(make: Callable[[Any], Optimizer], why: str) -> None:
    fused = hf.fuse([Scale() for _ in range(3)])
    message = rf"torch.optim.\w+ .*{why}.*'weight' holds 3 members.*docs/tools.md"
    optimizer = make(fused.parameters())
    losses = hf.per_model(nn.functional.mse_loss)
    x, target = torch.ones(2, 3).double(), torch.zeros(2, 3).double()

    def closure() -> Tensor:
        optimizer.zero_grad()
        total: Tensor = losses(fused(x), target).sum()
        total.backward()
        return total

    hf.per_model(nn.functional.mse_loss)(fused(x), target).sum().backward()
    before = fused.get_parameter("weight").detach().clone()
    with pytest.raises(hf.FusionError, match=message):
        optimizer.step(closure)  # type: ignore[arg-type]
    with pytest.raises(hf.FusionError, match=message):
        hf.train_step(fused, nn.functional.mse_loss, optimizer, compile=True)
    assert torch.equal(fused.get_parameter("weight"), before)


class Ours(torch.optim.SGD):
    """Of a third party."""


def step(kind: type[Optimizer], params: Sequence[Tensor]) -> None:
    optimizer: Any = kind(params, lr=0.1)  # type: ignore[call-arg]
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()


def test_an_unknown_one_is_warned_of_once() -> None:
    array = Array(2, shapes=[(3,)])
    with pytest.warns(UserWarning, match="Ours is not known to hfusion.*every element by itself"):
        step(Ours, array.params)
    step(Ours, array.params)


class SAM(torch.optim.SGD):
    """Perturbs by a norm over all tensors in its first step, as implementations of sharpness-aware minimization do."""

    def first_step(self) -> None:
        raise NotImplementedError

    second_step = first_step


def test_sam_is_refused() -> None:
    array = Array(2, shapes=[(3,)])
    with pytest.raises(hf.FusionError, match=r"SAM scales a step by one norm.*holds 2 members.*docs/tools.md"):
        step(SAM, array.params)
    # A single member has no other to be coupled with.
    step(SAM, Array(1, shapes=[(3,)]).params)
