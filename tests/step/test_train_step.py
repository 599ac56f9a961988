"""`hf.train_step` against the eager loop of hfusion, which other tests hold against the members alone."""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
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
    expected = reference.state_dict()
    for name, tensor in module.state_dict().items():
        close(tensor, expected[name], f"{name} {when}")
    grads = {name: p.grad for name, p in reference.named_parameters()}
    for name, parameter in module.named_parameters():
        assert (parameter.grad is None) == (grads[name] is None), f"gradient of {name} {when}"
        if parameter.grad is not None:
            assert parameter.grad.is_contiguous()
            close(parameter.grad, grads[name], f"gradient of {name} {when}")


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
def test_compiled(model: Model) -> None:
    comparison = pair(model, compile=True)
    for step, size in enumerate([4, 4, 3, 3, 5, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    comparison.load_ones([0.3, 0.2, 0.1])
    comparison.advance(*batch(model, 4), "after loading, at other rates")
    rows = comparison.step.report().rows
    # One program serves all sizes.
    assert len(rows) == 1
    assert rows[0].how.startswith("one program of")
    assert comparison.step.compilations == 1


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.a(x) + self.b(y)


@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=needs_compiler)])
def test_tuples_and_keywords(compile: bool) -> None:
    """One result whichever way the inputs are given."""
    torch.manual_seed(0)
    models = [TwoInputs().double() for _ in range(2)]
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


class Switched(nn.Module):
    """Uses a layer only if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.extra = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor, switched: bool) -> Tensor:
        return self.first(x) + self.extra(x) if switched else self.first(x)


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
    for actual, model in zip(fused, alone, strict=True):
        for name, parameter in model.named_parameters():
            close(actual.get_parameter(name).detach(), parameter.detach(), name)


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


@needs_compiler
def test_autocast_is_a_situation_of_its_own() -> None:
    def run(compile: bool) -> list[Tensor]:
        torch.manual_seed(0)
        fused = hf.build(lambda: nn.Linear(64, 8), seeds=[0, 1])
        step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)
        x, target = torch.randn(16, 64), torch.randn(16, 8)
        losses = []
        for enabled in (False, True, True, False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                losses.append(step(x, target))
        assert len(step.report().rows) == (2 if compile else 1)
        return losses

    for compiled, plain in zip(run(True), run(False), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-2, atol=0)


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


def test_an_optimizer_of_other_parameters() -> None:
    fused, other = arrays(TINY, 2)
    with pytest.raises(ValueError, match="4 parameters of the Adam belong to no member of the fused Sequential"):
        hf.train_step(fused, loss_of, adam(other), compile=True)


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
