"""Steps in parts, on threads: the same bits as one part after the other."""

from __future__ import annotations

import gc
import os
import threading
import time
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.step.program_lifecycle import InUse
from tests.step.test_step_graph import arrays, loss_of
from tests.step.test_train_step import ATTENTION, TINY, Pair, batch, needs_compiler
from tests.zoo import Model


def adam(array: hf.FusedModule) -> hf.optim.Adam:
    return hf.optim.Adam(array.parameters(), lr=[0.01 * (1 + row) for row in range(len(array))], eps=1e-4)


def parted(model: Model, count: int, parts: int) -> Pair:
    fused, reference = arrays(model, count)
    step = hf.train_step(fused, loss_of, adam(fused), parts=parts, compile=True)
    return Pair(step, fused, reference, hf.per_model(loss_of), adam(reference))


RECURRENT = Model("recurrent", lambda: RecurrentBothWays(), lambda n: torch.randn(n, 3, 4, dtype=torch.float64))


class RecurrentBothWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 3, batch_first=True, bidirectional=True), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.lstm(x)[0].relu().sum(1))


@needs_compiler
@pytest.mark.parametrize("model", [TINY, ATTENTION, RECURRENT], ids=str)
def test_parts_equal_the_loop(model: Model) -> None:
    """Blocks of unequal sizes, other numbers of samples, loaded state, other rates."""
    comparison = parted(model, 5, 2)
    for step, size in enumerate([4, 4, 3, 3, 5, 5]):
        comparison.advance(*batch(model, size), f"after step {step}")
    comparison.load_ones([0.3, 0.2, 0.1, 0.4, 0.5])
    comparison.advance(*batch(model, 4), "after loading, at other rates")
    (row,) = comparison.step.report().rows
    assert row.how.endswith("for 3 and 2 members, called once per block, on 2 threads"), row.how


def classifier(count: int, **settings: Any) -> Any:
    """A step of members alike in all but their weights, with BatchNorm; B programs of one block each would be slow."""
    torch.manual_seed(1)
    models = [nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(count)]
    fused = hf.fuse(models)
    return hf.train_step(fused, F.cross_entropy, adam(fused), **{"compile": True, **settings})


def data(count: int = 0) -> tuple[Any, Tensor]:
    draw = torch.Generator().manual_seed(2)
    x, target = torch.randn(max(count, 1), 5, 4, generator=draw), torch.randint(3, (5,), generator=draw)
    return (hf.stacked(x) if count else x[0]), target


def state(step: Any) -> list[Tensor]:
    tensors = [*step._fused.state_dict().values(), *(p.grad for p in step._fused.parameters())]
    moments = [value for entry in step._optimizer.state.values() for value in entry.values()]
    return [tensor.clone() for tensor in (*tensors, *moments)]


def advance(step: Any, *inputs: Any, times: int = 4) -> list[Tensor]:
    losses = [step(*inputs) for _ in range(times)]
    return [*losses, *state(step)]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@needs_compiler
@pytest.mark.parametrize("stacked", [False, True])
def test_threads_show_in_no_bit(stacked: bool) -> None:
    """Blocks of two members, on one, two and four threads, and one after the other in this one."""
    inputs = data(8 if stacked else 0)
    results = []
    for threads in (1, 2, 4, 0):
        step = classifier(8, parts=4)
        step.at_once = 2
        advance(step, *inputs, times=2)
        variant = next(variant for variants in step._variants.values() for variant in variants)
        assert "for 2 members, called once per 2, on 4 threads" in variant.program.how
        if threads:
            variant.program._threads = threads
        else:
            variant.state = InUse(variant.program._program)
        results.append(advance(step, *inputs))
    assert all(same(results[0], other) for other in results[1:])


@needs_compiler
def test_an_error_of_one_part_is_raised_after_all_have_ended() -> None:
    step, (x, target) = classifier(6, parts=3), data()
    advance(step, x, target)
    with pytest.raises(RuntimeError, match="the step of members 0 to 1 failed"):
        step(x, target + 7)
    before = [param.detach().clone() for param in step._fused.parameters()]
    assert torch.isfinite(step(x, target)).all()
    assert not same(before, list(step._fused.parameters()))


@needs_compiler
def test_a_trained_parameter_of_all_members_is_one_part() -> None:
    base = nn.Linear(4, 4)
    fused = hf.fuse([nn.Sequential(base, nn.Linear(4, 3)) for _ in range(4)])
    step = hf.train_step(fused, F.cross_entropy, hf.optim.SGD(fused.parameters(), lr=0.1), parts=2, compile=True)
    advance(step, *data())
    assert "in one part: all members share the trained 0.weight" in str(step.report())


@needs_compiler
def test_a_frozen_base_is_in_all_parts() -> None:
    base = nn.Linear(4, 4).requires_grad_(False)
    results = []
    for parts in (1, 2):
        torch.manual_seed(3)
        fused = hf.fuse([nn.Sequential(base, nn.ReLU(), nn.Linear(4, 3)) for _ in range(4)])
        step = hf.train_step(fused, F.cross_entropy, adam(fused), parts=parts, compile=True)
        results.append([step(*data()) for _ in range(4)])
    torch.testing.assert_close(results[0], results[1])
    assert "on 2 threads" in str(step.report())


def threads_left(expected: int) -> int:
    """Return the number of threads of teams, once it is `expected` or a minute has passed."""
    deadline = time.monotonic() + 60
    while True:
        gc.collect()
        count = sum(thread.name.startswith("hfusion-") for thread in threading.enumerate())
        if count == expected or time.monotonic() > deadline:
            return count
        time.sleep(0.01)


@needs_compiler
def test_threads_end_with_the_last_step() -> None:
    assert threads_left(0) == 0
    step, other, inputs = classifier(6, parts=3), classifier(6, parts=3), data()
    advance(step, *inputs)
    advance(other, *inputs)
    del step
    # The one that asks is the third.
    assert threads_left(2) == 2
    del other
    assert threads_left(0) == 0


@needs_compiler
def test_a_forked_process_has_threads_of_its_own() -> None:
    step, inputs = classifier(6, parts=3), data()
    advance(step, *inputs)
    process = os.fork()
    if process == 0:
        os._exit(0 if len(advance(step, *inputs)) > 4 else 1)
    assert os.waitpid(process, 0)[1] == 0
    advance(step, *inputs)


@pytest.mark.parametrize("parts", [0, -1, 1.5, "two", True, None])
def test_parts_are_a_number(parts: Any) -> None:
    with pytest.raises(ValueError, match="parts is"):
        classifier(2, parts=parts)


class Dropping(nn.Module):
    """Dropout of several kinds, on stacked and packed values, with rates that differ; normal numbers; attention."""

    instances = 0

    def __init__(self) -> None:
        super().__init__()
        Dropping.instances += 1
        self.conv, self.norm = nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3)
        self.channels, self.some = nn.Dropout2d(0.4), nn.Dropout(0.1 * (Dropping.instances % 2 + 1))
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.channels(F.relu(self.norm(self.conv(x)))).flatten(2).transpose(1, 2)
        h = F.scaled_dot_product_attention(h, h, h, dropout_p=0.3 if self.training else 0.0)
        h = self.some(h.mean(1))
        return self.head(h + 0.1 * torch.randn_like(h))


@needs_compiler
def test_draws_of_a_member_are_the_same_in_any_part() -> None:
    results = []
    for parts, count in ((1, 4), (2, 4), (4, 4), (1, 2)):
        Dropping.instances = 0
        torch.manual_seed(5)
        members = [Dropping().double() for _ in range(4)][:count]
        fused = hf.fuse(members)
        step = hf.train_step(fused, loss_of, hf.optim.SGD(fused.parameters(), lr=0.0), parts=parts, compile=True)
        x, target = torch.randn(6, 1, 4, 4, dtype=torch.float64), torch.rand(6, dtype=torch.float64)
        step(x, target)
        step(x, target)
        torch.manual_seed(6)
        losses = [step(x, target) for _ in range(3)]
        assert ("threads" in str(step.report())) == (parts > 1), step.report()
        assert not torch.allclose(losses[1], losses[2])
        results.append([*losses, *(param.grad.clone() for param in fused.parameters())])
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            if len(actual) == len(expected):
                torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    # Fewer members take fewer seeds, so the second step is another.
    torch.testing.assert_close(results[3][0], results[0][0][:2], rtol=1e-9, atol=1e-12)
