"""Custom functions whose backward calls backward, as reentrant checkpoints do, train the same everywhere."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from tests.trained import Way, assert_same, machine, plain, planned, task

pytestmark = [
    # Of torch, about a checkpoint inside of another one.
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
    pytest.mark.filterwarnings("ignore:.* runs eagerly, exact but slower"),
]


class Rerun(torch.autograd.Function):
    """A reentrant checkpoint that does not refuse torch.autograd.grad, as reversible layers and older packages have."""

    @staticmethod
    def forward(ctx: Any, run: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, *grads)
        return None, x.grad


def reentrant(run: Callable[[Tensor], Tensor], x: Tensor, **options: Any) -> Tensor:
    output: Tensor = checkpoint(run, x, use_reentrant=True, **options)
    return output


class Block(nn.Module):
    """``again(run, x)`` computes a layer, a layer that only some members use, and dropout."""

    def __init__(self, again: Callable[..., Tensor] = reentrant, dropout: float = 0.0, **options: Any) -> None:
        super().__init__()
        self.again, self.dropout, self.options = again, dropout, options
        self.fc, self.other = nn.Linear(5, 5), nn.Linear(5, 5)

    def inner(self, x: Tensor) -> Tensor:
        layer = self.fc if float(self.other.bias[0].detach()) > 0 else self.other
        return F.dropout(layer(self.fc(x).tanh()), self.dropout, self.training)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.inner, x, **self.options)


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(6, 5), nn.ModuleList(blocks), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.last(x)


class Whole(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(reentrant(self.blocks[0], self.first(x)))


class Nested(Net):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(reentrant(lambda h: reentrant(self.blocks[0].inner, self.blocks[1](h)), self.first(x)))  # type: ignore[operator]


class Tied(Net):
    def forward(self, x: Tensor) -> Tensor:
        block = self.blocks[0]
        return self.last(block(block(block.fc(self.first(x)))))  # type: ignore[operator]


MODELS: dict[str, Callable[..., nn.Module]] = {
    "one of several submodules": lambda **options: Net(nn.Linear(5, 5), Block(**options)),
    "two submodules": lambda **options: Net(Block(**options), nn.Linear(5, 5), Block(**options)),
    "the whole forward": lambda **options: Whole(Block(**options)),
    "nested": lambda **options: Nested(Block(**options), Block(**options)),
    "a shared block": lambda **options: Tied(Block(**options)),
    "a function without a refusal": lambda **options: Net(Block(lambda run, x: Rerun.apply(run, x), 0.0), nn.ReLU()),  # type: ignore[no-untyped-call]
}
WAYS = ("loop", "train_step", "compiled", "Population")


def members(name: str, **options: Any) -> list[nn.Module]:
    torch.manual_seed(0)
    models = [MODELS[name](**options).double() for _ in range(3)]
    for sign, model in zip((1, -1, 1), models, strict=True):
        block = next(part for part in model.modules() if isinstance(part, Block))
        nn.init.constant_(block.other.bias, 0.1 * sign)
    return models


def batches() -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(4, n, generator=draw, dtype=torch.float64) for n in (6, 3)) for _ in range(3)]  # type: ignore[misc]


def adamw(params: Any) -> Any:
    return hf.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def trained(way: str, models: list[nn.Module]) -> list[nn.Module]:
    """Copies of the models, trained in one of `WAYS`."""
    if way == "Population":
        population = hf.Population(deepcopy(models), optimizer=adamw, loss=F.mse_loss)
        for x, y in batches():
            population.step(x, y)
        return list(population.models)
    fused = hf.fuse(models)
    optimizer = adamw(fused.parameters())
    if way == "loop":
        for x, y in batches():
            optimizer.zero_grad()
            hf.per_model(F.mse_loss)(fused(x), y).sum().backward()
            optimizer.step()
    else:
        step = hf.train_step(fused, F.mse_loss, optimizer, compile=way == "compiled")
        for x, y in batches():
            step(x, y)
    return fused.unfuse()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("way", WAYS)
def test_members_train_as_alone(way: str, name: str) -> None:
    models = members(name)
    for model, copy in zip(trained(way, models), models, strict=True):
        optimizer = torch.optim.AdamW(copy.parameters(), lr=0.05, weight_decay=0.1)
        for x, y in batches():
            optimizer.zero_grad()
            F.mse_loss(copy(x), y).backward()
            optimizer.step()
        for actual, expected in zip(model.parameters(), copy.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"dropout": 0.4}, {"dropout": 0.4, "preserve_rng_state": False}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_hf_train_gives_the_bits_of_the_loop(name: str, options: dict[str, Any]) -> None:
    array = hf.fuse(members(name, **options))
    # A block that several shards or minibatches use gets its gradients in another order, which differs by rounding.
    shared = name == "a shared block"
    way = Way(adamw, 0.5, 1 if shared else 2)
    expected = plain(array, way, batches(), F.mse_loss)
    hf_task, on = task(array, way, batches(), loss=F.mse_loss, eval_loader=batches()), machine()
    for count in (1,) if shared else (1, 4):
        plan = planned([hf_task], on, [count], [count == 1], [False])
        assert_same([array], [hf_task], [expected], on, plan)


def test_the_recomputed_dropout_has_the_mask_of_the_forward() -> None:
    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(64))

        def forward(self, x: Tensor) -> Tensor:
            return reentrant(lambda h: F.dropout(h * self.w, 0.5), x)

    fused = hf.fuse([nn.Sequential(nn.Identity(), Drop()) for _ in range(3)])
    for _ in range(2):
        fused.zero_grad()
        y = fused(torch.ones(64, requires_grad=True))
        y.sum().backward()
        (w,) = fused.parameters()
        assert torch.equal(w.grad, y)
        assert not torch.equal(y[0], y[1])


@pytest.mark.parametrize("name", MODELS)
def test_the_check_changes_no_gradient(name: str) -> None:
    fused = hf.fuse(members(name))
    before = [torch.rand_like(parameter) for parameter in fused.parameters()]
    for parameter, grad in zip(fused.parameters(), before, strict=True):
        parameter.grad = grad.clone()
    fused(batches()[0][0])
    for parameter, grad in zip(fused.parameters(), before, strict=True):
        assert torch.equal(parameter.grad, grad)
