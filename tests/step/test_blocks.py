"""Steps in blocks of members: on threads, within a memory, and without members that rest."""

from __future__ import annotations

import copy
import math
import os
import signal
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.step.memory_budget import block_bytes, state_bytes
from hfusion.step.parallel_blocks import ParallelBlocksStep
from hfusion.step.train_step import TrainStep
from tests.acts.zoo import Tied
from tests.alone import Member, Own, compare_gradients, compare_tensors
from tests.step.test_train_step import needs_compiler
from tests.zoo import normal


# Steps in parts, on threads: the same bits as one part after the other.
def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@needs_compiler
def test_an_error_of_one_part_is_raised_after_all_have_ended() -> None:
    step, x, target = made(3, 6), torch.randn(8, 40), torch.randint(3, (8,))
    for _ in range(4):
        step(x, target)
    with pytest.raises(RuntimeError, match="the step of members 0 to 1 failed"):
        step(x, target + 7)
    before = [param.detach().clone() for param in step._fused.parameters()]
    assert torch.isfinite(step(x, target)).all()
    assert not same(before, list(step._fused.parameters()))


# Members with statistics and draws, which a step in any number of parts leaves alike.
def member() -> nn.Module:
    return nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Dropout(0.3), nn.Linear(30, 3))


def made(parts: int | str = "auto", count: int = 3, **settings: Any) -> TrainStep:
    fused = hf.build(member, seeds=range(count))
    optimizer = hf.optim.Adam(fused.parameters(), lr=[0.1 * (1 + row) for row in range(count)])
    return hf.train_step(fused, F.cross_entropy, optimizer, parts=parts, **{"compile": True, **settings})


def advance_in_parts(step: TrainStep, times: int = 3) -> list[Tensor]:
    """Losses, state, gradients and what is drawn next: all that a step leaves behind."""
    torch.manual_seed(1)
    x, target = torch.randn(8, 40), torch.randint(3, (8,))
    losses = [step(x, target) for _ in range(times)]
    grads = [param.grad for param in step._fused.parameters() if param.grad is not None]
    return [t.clone() for t in (*losses, *step._fused.state_dict().values(), *grads, torch.rand(2))]


# ``hf.train_step(..., memory=)``: blocks of members, against the members alone in float64.
EPS = 1e-4


def budget(fused: hf.FusedModule, opt: Any, x: Any, size: int, samples: int) -> int:
    """The least memory in which ``size`` members fit."""
    program = fused.compiled(Arguments.of((x,), {})).program
    return state_bytes(fused, opt) + block_bytes(program, size, samples)


def small() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 3))


@dataclass(frozen=True)
class Case:
    """Five members in blocks of ``size``: 2 leaves a smaller last block."""

    name: str
    make: Any
    draw: Any
    size: int
    optimizer: str = "Adam"
    clip: bool = False
    stacked: bool = False
    compile: bool = False

    def __str__(self) -> str:
        words = [self.name, str(self.size), self.optimizer]
        return "-".join(words + [name for name in ("clip", "stacked", "compile") if getattr(self, name)])


CASES = [
    Case("cnn", small, normal(2, 6, 6), 3, "SGD", clip=True),
    Case("cnn", small, normal(2, 6, 6), 1, "RMSprop", stacked=True),
    Case("tied", Tied, normal(5), 2, "AdamW", clip=True, stacked=True),
    Case("cnn", small, normal(2, 6, 6), 2, clip=True, compile=True),
    Case("tied", Tied, normal(5), 3, "SGD", stacked=True, compile=True),
]


def memory_budget_loss_of(output: Any, target: Tensor) -> Tensor:
    return (output.sin() * target.reshape(-1, *[1] * (output.dim() - 1))).mean()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_blocks_train_as_the_members_alone(case: Case) -> None:
    torch.manual_seed(0)
    models = [case.make().double() for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    options = {} if case.optimizer == "SGD" else {"eps": EPS}
    rates = [0.02 * (b + 1) for b in range(5)]
    opt = getattr(hf.optim, case.optimizer)(fused.parameters(), lr=rates, **options)
    make, norm = partial(getattr(torch.optim, case.optimizer), **options), 0.05 if case.clip else math.inf
    owns = [Own(lr, norm=norm) for lr in rates]
    members = [Member(model, make, memory_budget_loss_of, own) for model, own in zip(alone, owns, strict=True)]

    def clip(*_: Any) -> None:
        hf.optim.clip_grad_norm_(fused.parameters(), 0.05)

    if case.clip:
        opt.register_step_pre_hook(clip)

    def draw(size: int) -> list[Tensor]:
        return [case.draw(size) for _ in range(5)] if case.stacked else [case.draw(size)] * 5

    def inputs(xs: list[Tensor]) -> Any:
        return hf.stacked(torch.stack(xs)) if case.stacked else xs[0]

    memory = budget(fused, opt, inputs(draw(6)), case.size, 6)
    step = hf.train_step(fused, memory_budget_loss_of, opt, compile=case.compile, memory=memory, parts=1)
    for size in (6, 6, 5, 6):
        xs, target = draw(size), torch.rand(size, dtype=torch.float64)
        losses = step(inputs(xs), target)
        expected = [member.call(x, target)[0] for member, x in zip(members, xs, strict=True)]
        torch.testing.assert_close(losses, torch.stack(expected), rtol=1e-9, atol=1e-11)
    compare_tensors(fused, alone, "after the steps")
    compare_gradients(fused, alone, "after the steps")
    assert f"{case.size} of 5 at a time, at an estimated peak of" in str(step.report())
    assert ("program" in str(step.report())) == case.compile


def dropout(p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(p), nn.Linear(8, 2)).double()


def test_what_members_draw_depends_on_no_block() -> None:
    """Also for members with different dropout rates."""
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    losses = []
    for size in (1, 2, 3, 5):
        torch.manual_seed(0)
        fused = hf.fuse([dropout(0.2 + 0.1 * (b % 3)) for b in range(5)])
        opt = hf.optim.SGD(fused.parameters(), lr=0.1)
        step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, size, 6))
        torch.manual_seed(1)
        losses.append(torch.stack([step(x, y) for _ in range(3)]))
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0], rtol=1e-12, atol=0)


def test_a_shared_parameter_gets_the_sum_over_blocks() -> None:
    torch.manual_seed(0)
    base = nn.Linear(4, 4).double()
    models = [nn.Sequential(base, nn.Tanh(), nn.Linear(4, 2).double()) for _ in range(5)]
    alone = copy.deepcopy(models)
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    step = hf.train_step(fused, F.mse_loss, opt, compile=False, memory=budget(fused, opt, x, 2, 6))
    losses = step(x, y)
    expected = torch.stack([F.mse_loss(model(x), y) for model in alone])
    expected.sum().backward()
    torch.testing.assert_close(losses, expected.detach(), rtol=1e-9, atol=0)
    shared = dict(fused.named_parameters())["0.weight"]
    torch.testing.assert_close(shared.grad, alone[0][0].weight.grad, rtol=1e-9, atol=1e-12)


# Idle members: computation in blocks leaves them out, and the results of the others do not change.
MEMBERS = 6


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def convolved() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def shuffling() -> nn.Module:
    """Draws from the generator of all members."""

    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(9)]

    return nn.Sequential(Shuffled(), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("make", "size", "parts", "left_out"),
    [
        (dense, None, 1, []),
        (dense, 2, 1, [2, 3]),
        (dense, None, 2, [0, 1, 2]),
        (dense, 4, 1, []),
        (convolved, 1, 1, [0, 2, 3]),
        (shuffling, 2, 1, []),
    ],
    ids=["one program", "blocks", "threads", "blocks of two sizes", "members", "drawn together"],
)
def test_others_do_not_notice(make: type[nn.Module], size: int | None, parts: int, left_out: list[int]) -> None:
    idle = frozenset([0, 1, 2] if parts == 2 else [0, 2, 3])

    def run(resting: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        fused = hf.fuse([make() for _ in range(MEMBERS)])
        opt = hf.optim.AdamW(fused.parameters(), lr=0.01)
        step, losses = hf.train_step(fused, F.cross_entropy, opt, parts=parts, compile=True), []
        step.at_once = size
        for number in range(8):
            if number == 4 and resting:
                step.idle = idle
            losses.append(step(torch.randn(5, 9), torch.randint(3, (5,))))
        states = [tensor for entry in opt.state.values() for tensor in entry.values()]
        return losses, [*fused.state_dict().values(), *states]

    whole, with_idle = run(False), run(True)
    others = [member for member in range(MEMBERS) if member not in idle]
    for actual, expected in zip([*with_idle[0], *with_idle[1]], [*whole[0], *whole[1]], strict=True):
        assert torch.equal(actual[others], expected[others])
    assert with_idle[0][-1].isnan().nonzero().flatten().tolist() == left_out


# Steps in parts together with what users put around a step: the same as by autograd, in float64.


@needs_compiler
def test_ctrl_c_ends_between_steps_and_steps_go_on() -> None:
    """Threads are not interrupted while they compute: a step that has begun is completed."""
    torch.manual_seed(0)
    array = hf.fuse([nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)) for _ in range(4)])
    opt = hf.optim.SGD(array.parameters(), lr=0.0)
    step = hf.train_step(array, F.cross_entropy, opt, parts=2, compile=True)
    inputs = torch.randn(64, 256), torch.randint(3, (64,))
    expected = [step(*inputs) for _ in range(4)][-1]
    (program,) = (variant.program for variant in step._all_variants())
    assert isinstance(program, ParallelBlocksStep)

    def interrupt() -> None:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    def go_on() -> None:
        while True:
            step(*inputs)

    for _ in range(5):
        threading.Thread(target=interrupt).start()
        with pytest.raises(KeyboardInterrupt):
            go_on()
        assert torch.equal(step(*inputs), expected)
