"""`hf.train_step` against the eager loop of hfusion, which other tests hold against the members alone."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.alone import Member, Own, assert_trained_alone, compare_tensors
from tests.forwards.table import module
from tests.zoo import MODELS, Model, normal

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

TINY = Model("tiny", lambda: nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), normal(4))
ATTENTION = next(model for model in MODELS if model.name == "attention")


@dataclass
class Pair:
    """A step and the eager loop over the same members."""

    step: Any
    ours: hf.FusedModule
    theirs: hf.FusedModule
    loss: Any
    other: Any

    def advance(self, x: Any, target: Tensor, label: str) -> None:
        expected = eager(self.theirs, self.loss, self.other, x, target)
        losses = self.step(x, target)
        assert not losses.requires_grad
        close(losses, expected, f"losses {label}")
        compare(self.ours, self.theirs, label)

    def load_ones(self, rates: list[float]) -> None:
        """Let all tensors of both be ones, and go on at these rates."""
        state = self.ours.state_dict()
        for array in (self.ours, self.theirs):
            array.load_state_dict({name: torch.ones_like(tensor) for name, tensor in state.items()})
        for opt in (self.step._optimizer, self.other):
            opt.param_groups[0]["lr"] = rates


# The traced step, run as it is: what inductor is given must be the eager step already.

EPS = 1e-4


def loss_of(output: Any, target: Tensor) -> Tensor:
    """A loss that reaches every output, one number."""
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([(leaf.sin() * (k + 1)).mean() for k, leaf in enumerate(leaves)]).sum() * target.mean()


def arrays(model: Model, count: int) -> tuple[hf.FusedModule, hf.FusedModule]:
    """Two arrays of the same members."""
    torch.manual_seed(count)
    models = [model.make().double() for _ in range(count)]
    return hf.fuse(models), hf.fuse(models, verify=False)


def adam(fused: hf.FusedModule) -> hf.optim.Adam:
    return hf.optim.Adam(fused.parameters(), lr=[0.01 * (b + 1) for b in range(len(fused))], eps=EPS)


def eager(fused: hf.FusedModule, loss: Any, opt: Any, x: Any, target: Any) -> Tensor:
    opt.zero_grad()
    losses = loss(fused(x), target)
    losses.sum().backward()
    opt.step()
    return losses.detach()


def close(actual: Tensor, expected: Tensor, label: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=lambda m: f"{label}: {m}")


def compare(module: nn.Module, reference: nn.Module, when: str) -> None:
    ours, theirs = (
        [dict(each.state_dict()), {name: param.grad for name, param in each.named_parameters()}]
        for each in (module, reference)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12, msg=lambda m: f"{when}: {m}")
    assert all(param.grad is None or param.grad.is_contiguous() for param in module.parameters())


def pair(
    model: Model, *, compile: bool, count: int = 3, loss: Callable[..., Any] = loss_of, parts: int | str = "auto"
) -> Pair:
    fused, reference = arrays(model, count)
    step = hf.train_step(fused, loss, adam(fused), compile=compile, parts=parts)
    return Pair(step, fused, reference, hf.per_model(loss), adam(reference))


def batch(model: Model, size: int) -> tuple[Tensor, Tensor]:
    return model.draw(size), torch.rand(size, dtype=torch.float64)


@needs_compiler
@pytest.mark.parametrize("model", [TINY, ATTENTION], ids=str)
@pytest.mark.parametrize(("parts", "count"), [("auto", 3), (2, 5)], ids=["whole", "parts"])
def test_compiled(parts: int | str, count: int, model: Model) -> None:
    """Other numbers of samples, loaded state, other rates; and blocks of unequal sizes."""
    comparison = pair(model, compile=True, count=count, parts=parts)
    for step, size in enumerate([4, 4, 3, 3, 5, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    comparison.load_ones([0.3, 0.2, 0.1, 0.4, 0.5][:count])
    comparison.advance(*batch(model, 4), "after loading, at other rates")
    # One program serves all sizes.
    (row,) = comparison.step.report().rows
    if parts == 2:
        assert row.how.endswith("for 3 and 2 members, called once per block, on 2 threads"), row.how
    else:
        assert row.how.startswith("one program of")
        assert comparison.step.compilations == 1


TwoInputs = module(lambda self, x, y: self.a(x) + self.b(y), a=lambda: nn.Linear(3, 2), b=lambda: nn.Linear(4, 2))


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
def test_tuples_and_keywords(compile: bool) -> None:
    """One result whichever way the inputs are given."""
    torch.manual_seed(0)
    models = [TwoInputs() for _ in range(2)]
    x, y, target = torch.randn(5, 3).double(), torch.randn(5, 4).double(), torch.randn(2, 5, 2).double()
    results = []
    for inputs, keywords in [((x, y), {}), ([x, y], {}), ({"x": x, "y": y}, {}), (x, {"y": y})]:
        fused = hf.fuse(models)
        step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)
        results.append(torch.stack([step(inputs, hf.stacked(target), **keywords) for _ in range(3)]))
    for losses in results[1:]:
        assert torch.equal(losses, results[0])
    assert torch.equal(
        results[0][0], torch.stack([F.mse_loss(m(x, y), t) for m, t in zip(models, target, strict=True)])
    )


def test_what_runs_member_by_member_runs_eagerly_and_says_so() -> None:
    model = next(model for model in MODELS if model.name == "branching")
    comparison = pair(model, compile=True)
    with pytest.warns(UserWarning, match="runs eagerly.*gate runs in a loop over members"):
        comparison.advance(*batch(model, 4), "first")
    comparison.advance(*batch(model, 4), "second")
    assert "gate" in comparison.step.report().rows[0].why
    assert "eager" in repr(comparison.step)


def count(self: nn.Module, x: Tensor) -> Tensor:
    self.calls += 1
    return self.a(x)


def test_a_forward_that_counts_is_named() -> None:
    fused = hf.fuse([module(count, a=lambda: nn.Linear(3, 2), calls=0)() for _ in range(2)])
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1))
    with pytest.warns(UserWarning, match="runs eagerly.*changes Python state in calls"):
        step(torch.ones(4, 3).double(), torch.ones(4, 2).double())
    assert fused[0].calls == 1


def branching_loss(output: Tensor, target: Tensor) -> Tensor:
    loss = (output.mean() - target.mean()) ** 2
    return loss if loss > 1e9 else 2 * loss


def test_a_loss_that_cannot_be_captured() -> None:
    comparison = pair(TINY, compile=True, loss=branching_loss)
    with pytest.warns(UserWarning, match="the loss runs in a loop over members"):
        comparison.advance(*batch(TINY, 4), "first")
    comparison.advance(*batch(TINY, 4), "second")


def test_hooks_are_called() -> None:
    comparison = pair(TINY, compile=True)
    called = []
    comparison.ours.get_parameter("0.weight").register_hook(lambda grad: called.append(len(grad)))
    with pytest.warns(UserWarning, match="a parameter has hooks"):
        comparison.advance(*batch(TINY, 4), "first")
    comparison.advance(*batch(TINY, 4), "second")
    assert called == [3, 3]


@needs_compiler
def test_hooks_that_come_and_go_once_a_program_is_there() -> None:
    comparison = pair(TINY, compile=True)
    weight, called = comparison.ours.get_parameter("0.weight"), []
    weight.register_hook(called.append).remove()
    for step in range(2):
        comparison.advance(*batch(TINY, 4), f"without hooks {step}")
    assert comparison.step.report().rows[0].how.startswith("one program")
    # The dict of hooks is the one that was empty before.
    handles = [
        weight.register_hook(called.append),
        comparison.ours.register_forward_hook(lambda *arguments: called.append(arguments)),
    ]
    with pytest.warns(UserWarning, match="a parameter has hooks"):
        comparison.advance(*batch(TINY, 4), "with hooks")
    handles[0].remove()
    comparison.advance(*batch(TINY, 4), "with a hook of the module")
    handles[1].remove()
    comparison.advance(*batch(TINY, 4), "without hooks again")
    assert len(called) == 3


def clip(opt: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    hf.optim.clip_grad_norm_(opt.param_groups[0]["params"], 0.1)


@needs_compiler
def test_an_optimizer_of_torch_with_schedule_clipping_and_gradients_left_over() -> None:
    """All that stands around a step in a training loop."""
    fused, reference = arrays(TINY, 3)
    opts = [torch.optim.AdamW(array.parameters(), lr=0.1, eps=1e-4) for array in (fused, reference)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(opt, 0.5) for opt in opts]
    for opt in opts:
        opt.register_step_pre_hook(clip)
    step, loss = hf.train_step(fused, loss_of, opts[0], compile=True), hf.per_model(loss_of)
    for number in range(5):
        x, target = batch(TINY, 4)
        for array in (fused, reference):
            loss(array(x), target).sum().backward()
        expected = eager(reference, loss, opts[1], x, target)
        close(step(x, target), expected, f"losses at step {number}")
        compare(fused, reference, f"after step {number}")
        for schedule in schedules:
            schedule.step()
    assert step.report().rows[0].how.startswith("one program")


# Uses a layer only if it is told to.
Switched = module(
    lambda self, x, switched: self.first(x) + self.extra(x) if switched else self.first(x),
    first=lambda: nn.Linear(4, 2),
    extra=lambda: nn.Linear(4, 2),
)


@needs_compiler
def test_what_a_step_does_not_use_has_no_gradient() -> None:
    models = [Switched() for _ in range(2)]
    alone = copy.deepcopy(models)
    opts = [torch.optim.SGD(model.parameters(), lr=0.1) for model in alone]
    fused = hf.fuse(models)
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    for switched in (True, True, False, False, True, False):
        losses = step(x, target, switched=switched)
        for member, model, opt in zip(range(2), alone, opts, strict=True):
            opt.zero_grad()
            loss = F.mse_loss(model(x, switched), target)
            loss.backward()
            opt.step()
            close(losses[member], loss.detach(), f"the loss of member {member}")
    compare_tensors(fused, alone, "after the steps")


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*an input requires grad, and a program gives gradients of parameters only")
def test_an_input_that_requires_grad_gets_its_gradient() -> None:
    fused = hf.fuse([nn.Linear(4, 2).double() for _ in range(2)])
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    x, target = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    x.requires_grad_()
    for number in range(2):
        members = [copy.deepcopy(model) for model in fused.unfuse()]
        (expected,) = torch.autograd.grad(sum(F.mse_loss(model(x), target) for model in members), x)
        x.grad = None
        step(x, target)
        assert x.grad is not None
        close(x.grad, expected, f"the gradient of the input at step {number}")


class Scaled:
    """A loss with a number that changes."""

    def __init__(self) -> None:
        self.scale = 1.0

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return self.scale * (output.mean() - target.mean()) ** 2


@needs_compiler
def test_what_the_loss_reads_may_change() -> None:
    loss = Scaled()
    comparison = pair(TINY, compile=True, loss=loss)
    for scale in (1.0, 2.0):
        loss.scale = scale
        for step in range(2):
            comparison.advance(*batch(TINY, 4), f"step {step} of scale {scale}")


WITHOUT_COMPILER = """
import warnings, torch, hfusion as hf
fused = hf.build(lambda: torch.nn.Linear(2, 1), seeds=[0, 1])
step = hf.train_step(fused, torch.nn.functional.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    losses = [step(torch.ones(4, 2), torch.ones(4, 1)) for _ in range(3)]
assert (losses[2] < losses[0]).all()
(warning,) = [str(w.message) for w in caught if "train_step" in str(w.message)]
assert "runs eagerly" in warning and "install a C++ compiler" in warning, warning
assert "install a C++ compiler" in str(step.report())
"""


def test_without_a_compiler_it_falls_back(tmp_path: Any) -> None:
    environment = {**os.environ, "CXX": "/nowhere/c++", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], check=True, env=environment)


# Steps as programs: compiled member by member, recorded, and with checks that raise.
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
def checked(self: Any, x: Tensor) -> Tensor:
    h: Tensor = self.norm(self.fc(x))
    if (self.fc.bias > 100).any():
        raise ValueError(f"the bias is {self.fc.bias.max():.0f}")
    return h


Checked = module(checked, fc=lambda: nn.Linear(4, 3), norm=lambda: nn.BatchNorm1d(3))


def checked_loss(y: Tensor, target: Tensor) -> Tensor:
    if (target < 0).any():
        raise ValueError("a negative target")
    return F.mse_loss(y, target)


def check_step(step: Callable[..., Tensor], models: list[nn.Module], x: Tensor, target: Tensor) -> None:
    members = [Member(model, torch.optim.SGD, checked_loss, Own(0.1)) for model in models]
    torch.testing.assert_close(step(x, target), torch.stack([member.call(x, target)[0] for member in members]))


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
    models = [Puts().double() for _ in range(count)]
    batch = torch.randn(6, 6, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    step = assert_trained_alone(models, aliased_writes_loss_of, [batch] * 3, lr=0.01, compile=True)
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
