"""Steps in parts together with what users put around a step: the same as by autograd, in float64."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.team import torch_threads
from hfusion.step import parallel_blocks
from hfusion.step.parallel_blocks import ParallelBlocksStep
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_stepping import CLOSE

pytestmark = needs_compiler


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).double()


def make(count: int = 4) -> tuple[hf.FusedModule, Any]:
    torch.manual_seed(1)
    array = hf.fuse([small() for _ in range(count)])
    return array, hf.optim.SGD(array.parameters(), lr=[0.1 * (row + 1) for row in range(count)], momentum=0.9)


def data() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(5, 4, generator=draw, dtype=torch.float64), torch.randint(3, (5,), generator=draw)


def clipped(array: hf.FusedModule, opt: Any) -> Callable[..., None]:
    def clip(*arguments: object) -> None:
        hf.optim.clip_grad_norm_(array.parameters(), [0.1, 1.0, 0.01, 10.0])

    opt.register_step_pre_hook(clip)
    return lambda losses: opt.step()


def scaled(array: hf.FusedModule, opt: Any) -> Callable[..., None]:
    """The losses of a program are not scaled; the scaler holds back who is not finite."""
    scaler = hf.optim.GradScaler(init_scale=[1.0, 2.0, 4.0, 8.0])

    def update(losses: Tensor) -> None:
        scaler.scale(losses)
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()

    return update


def two_at_a_time(array: hf.FusedModule, opt: Any) -> Callable[..., None]:
    """Gradients of two minibatches in one step; those that a program leaves lie where the next ones will."""
    gradients: list[list[Tensor]] = []

    def update(losses: Tensor) -> None:
        params = [param for param in array.parameters() if param.grad is not None]
        gradients.append([param.grad.clone() for param in params if param.grad is not None])
        if len(gradients) == 2:
            for param, first_grad, second_grad in zip(params, *gradients, strict=True):
                param.grad = first_grad + second_grad
            opt.step()
            gradients.clear()

    return update


@pytest.mark.parametrize("around", [clipped, scaled, two_at_a_time])
def test_what_stands_around_a_step(around: Callable[..., Callable[..., None]]) -> None:
    results = []
    for settings in ({"compile": False}, {"compile": True, "parts": 1}, {"compile": True, "parts": 3}):
        array, opt = make()
        step = hf.train_step(array, F.cross_entropy, opt, **settings)
        step.update = around(array, opt)
        losses = [step(*data()) for _ in range(6)]
        assert ("on 3 threads" in str(step.report())) is (settings.get("parts") == 3)
        results.append([*losses, *array.state_dict().values()])
    for eager, compiled in zip(results[0] * 2, results[1] + results[2], strict=True):
        torch.testing.assert_close(eager, compiled, **CLOSE)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_batch_that_members_share_is_not_written_to(parts: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        target.mul_(2.0)
        return output.mean() * target.clone().mean()

    array, opt = make()
    step = hf.train_step(array, loss, opt, parts=parts, compile=True)
    with pytest.raises(hf.FusionError, match="loss writes into its arguments"):
        step(data()[0], torch.ones(5, dtype=torch.float64))


def test_ctrl_c_ends_between_steps_and_steps_go_on() -> None:
    """Threads are not interrupted while they compute: a step that has begun is completed."""
    torch.manual_seed(0)
    array = hf.fuse([nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3)) for _ in range(4)])
    opt = hf.optim.SGD(array.parameters(), lr=0.0)
    step = hf.train_step(array, F.cross_entropy, opt, parts=2, compile=True)
    inputs = torch.randn(64, 256), torch.randint(3, (64,))
    expected = [step(*inputs) for _ in range(4)][-1]
    (program,) = step._maker.programs()
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


def test_blocks_of_one_thread_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel_blocks, "core_cache", lambda: 1)
    (array, opt), (other, its_opt) = make(8), make(8)
    with torch_threads(1):
        step = hf.train_step(array, F.cross_entropy, opt, compile=True)
        plain = hf.train_step(other, F.cross_entropy, its_opt, compile=False)
        for _ in range(4):
            torch.testing.assert_close(step(*data()), plain(*data()), **CLOSE)
    assert "for 4 members, called once per 4" in str(step.report())
