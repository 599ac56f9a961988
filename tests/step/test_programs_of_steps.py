"""Steps as programs: compiled member by member, recorded, and with checks that raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.step.test_train_step import Pair, arrays, batch, loss_of, needs_compiler
from tests.zoo import Model, normal


# Steps that are compiled member by member, against the eager loop of hfusion.
class Sloped(nn.Module):
    """An activation whose slope is one of two, so that it runs member by member; buffers, and a base that all share."""

    shared = nn.Linear(4, 4).double()
    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Sloped.instances += 1
        self.base, self.norm, self.head = Sloped.shared, nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.slope = (0.1, 0.3)[Sloped.instances % 2]

    def forward(self, x: Tensor) -> Tensor:
        h = F.leaky_relu(self.norm(self.base(x)), self.slope)
        return self.head(F.leaky_relu(F.leaky_relu(h, self.slope), self.slope))


@needs_compiler
def test_member_by_member() -> None:
    """Loops over many members: one program per kind of member."""
    model = Model("sloped", Sloped, normal(4))
    fused, reference = arrays(model, 12)
    # One rate: the base is trained, and the same for all.
    opt, other = (hf.optim.Adam(array.parameters(), lr=0.01, eps=1e-4) for array in (fused, reference))
    comparison = Pair(hf.train_step(fused, loss_of, opt, compile=True), fused, reference, hf.per_model(loss_of), other)
    for step, size in enumerate([4, 4, 3, 3, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    rows = comparison.step.report().rows
    assert "2 programs of" in rows[0].how
    assert "called once per member" in rows[0].how
    assert comparison.step.compilations == 2


def row(comparison: Pair) -> str:
    return str(comparison.step.report().rows[0])


@pytest.mark.gpu
def test_equals_eager_on_a_gpu() -> None:
    def member() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).double().cuda()

    models = [member() for _ in range(3)]
    fused, reference = hf.fuse(models), hf.fuse(models)
    # The gradient of the first bias, before a BatchNorm, is rounding, which a smaller eps would let through.
    opt, other = (hf.optim.Adam(array.parameters(), lr=[0.1, 0.01, 0.001], eps=1e-4) for array in (fused, reference))
    train_step = hf.train_step(fused, loss_of, opt, compile=True)
    comparison = Pair(train_step, fused, reference, hf.per_model(loss_of), other)
    for number, size in enumerate([4, 4, 4, 3, 4, 3, 5]):
        x, target = (tensor.double().cuda() for tensor in (torch.randn(size, 4), torch.rand(size)))
        comparison.advance(x, target, f"after step {number}")
    assert row(comparison).endswith("recorded and replayed as one")


@pytest.mark.gpu
def test_draws_differ_at_every_replay() -> None:
    fused = hf.fuse([nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1)).cuda() for _ in range(2)])
    train_step = hf.train_step(fused, _mean, hf.optim.SGD(fused.parameters(), lr=0.0), compile=True)
    x, target = torch.ones(8, 4, device="cuda"), torch.zeros(8, device="cuda")
    draws = [train_step(x, target).cpu() for _ in range(5)]
    assert all(not torch.equal(a, b) for a, b in pairwise(draws))
    assert all(losses.isfinite().all() for losses in draws)


def _mean(output: Tensor, target: Tensor) -> Tensor:
    return (output.squeeze(-1) - target).square().mean()


# Checks that only raise, in compiled steps: a step is one program, and raises what the members raise.
class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 3), nn.BatchNorm1d(3)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.norm(self.fc(x))
        if (self.fc.bias > 100).any():
            raise ValueError(f"the bias is {self.fc.bias.max():.0f}")
        return h


def checked_loss(y: Tensor, target: Tensor) -> Tensor:
    if (target < 0).any():
        raise ValueError("a negative target")
    return F.mse_loss(y, target)


def check_step(step: Callable[..., Tensor], models: list[Checked], x: Tensor, target: Tensor) -> None:
    expected = []
    for model in models:
        model.zero_grad()
        loss = checked_loss(model(x), target)
        loss.backward()
        expected.append(loss.detach())
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    torch.testing.assert_close(step(x, target), torch.stack(expected))


@pytest.mark.parametrize("parts", [1, 2])
def test_a_step_with_checks_is_compiled_and_raises_as_a_member(parts: int) -> None:
    models = [Checked() for _ in range(4)]
    fused, alone = hf.fuse(models), copy.deepcopy(models)
    step = hf.train_step(fused, checked_loss, hf.optim.SGD(fused.parameters(), lr=0.1), parts=parts, compile=True)
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.rand(6, 3, dtype=torch.float64)
    for _ in range(3):
        check_step(step, alone, x, target)
    assert "program of" in str(step.report())
    before = {name: tensor.detach().clone() for name, tensor in fused.state_dict().items()}
    with pytest.raises(ValueError, match=r"^a negative target"):
        step(x, -target)
    for name, parameter in fused.named_parameters():
        assert torch.equal(parameter, before[name])
    fused.load_state_dict(before)
    with torch.no_grad():
        fused.fc.bias[2] += 200  # type: ignore[union-attr, index, operator]
    with pytest.raises(ValueError, match=r"^the bias is (199|200|201)"):
        step(x, target)
    # The members before the one that raises have run, as in a loop over them.
    changed = (fused.norm.num_batches_tracked != before["norm.num_batches_tracked"]).tolist()  # type: ignore[union-attr]
    assert changed == [True, True, True, False]
    fused.load_state_dict(before)
    check_step(step, alone, x, target)
    assert "eager" not in str(step.report())


# Compiled steps of operators that put a part of a tensor into it.
PUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "index_add": lambda y: y.index_add(1, torch.tensor([1, 1, 3]), y[:, :3]),
    "index_copy": lambda y: y.index_copy(1, torch.tensor([1, 2, 3]), y[:, :3]),
    "index_put": lambda y: y.index_put((torch.tensor([1, 2, 2]),), y[:3], accumulate=True),
    "slice_scatter": lambda y: y.slice_scatter(y[:, :-1], 1, 1, 6),
    "select_scatter": lambda y: y.t().select_scatter(y[0], 0, 1).t() + y.select_scatter(y[:, 2], 1, 0),
    "diagonal_scatter": lambda y: y.diagonal_scatter(y[0]),
}


class Puts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # One each, since a tensor that is used later is not written to.
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in PUTS)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([put(layer(x)).sin() for put, layer in zip(PUTS.values(), self.layers, strict=True)], 1)


def aliased_writes_loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out.sum(1) - target).square().mean()


@needs_compiler
@pytest.mark.parametrize("count", [1, 2])
def test_values_are_read_before_they_are_overwritten(count: int) -> None:
    torch.manual_seed(0)
    members = [Puts().double() for _ in range(count)]
    fused = hf.fuse(copy.deepcopy(members))
    step = hf.train_step(fused, aliased_writes_loss_of, hf.optim.SGD(fused.parameters(), lr=0.01), compile=True)
    x, target = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    alone = [torch.optim.SGD(member.parameters(), lr=0.01) for member in members]
    for _ in range(3):
        losses = step(x, target)
        for row, (member, optimizer) in enumerate(zip(members, alone, strict=True)):
            optimizer.zero_grad()
            loss = aliased_writes_loss_of(member(x), target)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-9, atol=1e-12)
    assert "program" in str(step.report())


# A step whose optimizer has none of its array's parameters any more says so; `fully_shard` is in tests/cluster.
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=needs_compiler)])
def test_parameters_that_were_replaced(compiled: bool) -> None:
    fused = hf.build(lambda: nn.Linear(4, 3), seeds=range(3))
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compiled)
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    for _ in range(3):
        step(x, y)
    assert ("program" in step.report().rows[0].how) is compiled
    for name, param in list(fused.named_parameters()):
        setattr(fused, name, nn.Parameter(param.detach().clone()))
    before = [param.detach().clone() for param in fused.parameters()]
    with pytest.raises(hf.FusionError, match="the parameters of the fused Linear were replaced after train_step was"):
        step(x, y)
    assert all(map(torch.equal, before, fused.parameters()))
