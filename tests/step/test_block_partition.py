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
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import BoundProgram
from hfusion.device.openmp import torch_threads
from hfusion.step import block_partition
from hfusion.step.parallel_blocks import ParallelBlocksStep
from hfusion.step.step_graph import StepCall
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_stepping import CLOSE, Normed
from tests.trained import EPOCHS, Way, batches, fused, machine, task

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


@pytest.mark.parametrize("accumulate", [1, 2])
def test_tasks_clip_and_accumulate(accumulate: int) -> None:
    """Also where the last minibatches of an epoch are fewer than those that are summed."""
    results = []
    for settings in ({"compile": False}, {"compile": True, "parts": 3}):
        torch.manual_seed(0)
        array = fused(Normed)
        train_task = task(array, Way(clip=[0.5, 0.05, 1.0], accumulate=accumulate), batches(torch.float64), **settings)
        report = hf.train(train_task, machine())
        how = " ".join(call.how for array_report in report[train_task.name].arrays for call in array_report.calls)
        assert ("on 3 threads" in how) is (settings["compile"] is True)
        results.append([report[train_task.name].losses, *array.state_dict().values()])
    assert len(results[0][0]) == EPOCHS * len(list(batches(torch.float64)))
    for eager, compiled in zip(*results, strict=True):
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


def test_threads_that_call_one_step_take_turns() -> None:
    """A batch of all, so that the order of the threads shows in nothing."""
    results = []
    for count in (1, 4):
        array, opt = make()
        step = hf.train_step(array, F.cross_entropy, opt, parts=2, compile=True)
        step(*data())

        def advance(step: Any = step, times: int = 24 // count) -> None:
            for _ in range(times):
                step(*data())

        threads = [threading.Thread(target=advance) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results.append(torch.cat([param.detach().flatten() for param in array.parameters()]))
    assert torch.equal(*results)


def test_blocks_on_one_thread_leave_gradients_where_they_belong() -> None:
    """As on threads: nothing is copied together, and the bits are those of the program called block by block."""
    array = hf.fuse([nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)) for _ in range(3)])
    opt = hf.optim.SGD(array.parameters(), lr=0.0)
    step = hf.train_step(array, F.cross_entropy, opt, parts=1, compile=True)
    step.at_once = 2
    inputs = torch.randn(5, 4), torch.randint(2, (5,))
    losses, places = [], []
    for _ in range(4):
        losses.append(step(*inputs))
        places.append([parameter.grad.data_ptr() for parameter in array.parameters() if parameter.grad is not None])
    (program,) = step._maker.programs()
    assert isinstance(program, ParallelBlocksStep)
    assert "on 1 thread" not in str(step.report())
    assert "for 2 and 1 members, called once per block" in str(step.report())
    assert len(places[-1]) == 4
    assert places[-1] == places[-2]
    grads = [parameter.grad.clone() for parameter in array.parameters() if parameter.grad is not None]
    call = StepCall(Arguments.of((inputs[0],), {}), Arguments.of((inputs[1],), {}))
    assert torch.equal(program._program.step(call), losses[-1])
    again = [parameter.grad for parameter in array.parameters() if parameter.grad is not None]
    assert all(map(torch.equal, grads, again))


@pytest.mark.parametrize(
    ("members", "threads", "cache", "size"),
    # A value of a member has 96 bytes.
    [(16, 1, 1 << 20, 16), (16, 2, 1 << 20, 8), (16, 1, 768, 8), (16, 2, 1, 4), (7, 1, 1, 7), (40, 2, 960, 10)],
)
def test_blocks_stay_in_the_cache_of_a_core(
    members: int, threads: int, cache: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_partition, "core_cache", lambda: cache)
    array = hf.fuse([nn.Sequential(nn.Linear(2, 6), nn.ReLU(), nn.Linear(6, 1)) for _ in range(members)])
    x = torch.ones(4, 2)
    array(x)
    forward = array.find(Arguments.of((x,), {}))
    assert forward is not None
    assert block_partition.block_size(BoundProgram.of(forward, array), threads) == size


def test_blocks_of_one_thread_are_those_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_partition, "core_cache", lambda: 1)
    (array, opt), (other, its_opt) = make(8), make(8)
    with torch_threads(1):
        step = hf.train_step(array, F.cross_entropy, opt, compile=True)
        plain = hf.train_step(other, F.cross_entropy, its_opt, compile=False)
        for _ in range(4):
            torch.testing.assert_close(step(*data()), plain(*data()), **CLOSE)
    assert "for 4 members, called once per 4" in str(step.report())
