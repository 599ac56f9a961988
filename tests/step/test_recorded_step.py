"""Recorded steps against the eager loop of hfusion."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.step import block_partition as step
from hfusion.step.recorded_step import Record, RecordedStep, Work
from tests.step.test_step_graph import loss_of
from tests.step.test_train_step import TINY, Pair, batch, needs_compiler, pair

CPU = torch.device("cpu")


def replaying(array: hf.FusedModule, records: list[None]) -> Record:
    """Does on a CPU what a CUDA graph does: at first nothing, then the work again, into the same memory.

    Counts in ``records``.
    """

    def record(work: Work) -> Any:
        records.append(None)
        before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
        losses = work()
        params = list(array.parameters())
        grads = [param.grad for param in params]
        array.load_state_dict(before)

        def replay() -> None:
            losses.copy_(work())
            for grad, param in zip(grads, params, strict=True):
                if grad is not None and param.grad is not None:
                    grad.copy_(param.grad)

        losses.fill_(torch.nan)
        return replay, losses

    return record


def recorded(monkeypatch: pytest.MonkeyPatch) -> tuple[Pair, list[None]]:
    """A pair whose step is recorded, and an entry for every time that it was."""
    comparison, records = pair(TINY, compile=True), list[None]()
    monkeypatch.setattr(
        step, "recorded", lambda program: RecordedStep(program, CPU, replaying(comparison.ours, records))
    )
    return comparison, records


def advance(comparison: Pair, sizes: list[int]) -> None:
    for number, size in enumerate(sizes):
        comparison.advance(*batch(TINY, size), f"after step {number}")


def row(comparison: Pair) -> str:
    return str(comparison.step.report().rows[0])


@needs_compiler
def test_equals_eager_for_batches_that_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, records = recorded(monkeypatch)
    advance(comparison, [4, 4, 4, 3, 4, 3, 3, 4])
    assert row(comparison).endswith("recorded and replayed as one")
    assert len(records) == 2
    assert len(comparison.step._maker.programs()) == 1


@needs_compiler
def test_losses_are_the_callers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, _ = recorded(monkeypatch)
    losses = [comparison.step(*batch(TINY, 4)) for _ in range(5)]
    assert not any(torch.equal(a, b) for a, b in pairwise(losses))


@needs_compiler
def test_tensors_that_move_are_recorded_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    comparison, records = recorded(monkeypatch)
    advance(comparison, [4, 4, 4])
    for param in comparison.ours.parameters():
        param.data = param.data.clone()
    advance(comparison, [4, 4, 4])
    assert len(records) == 2


@needs_compiler
def test_what_cannot_be_recorded_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(array: hf.FusedModule) -> Record:
        def record(work: Work) -> Any:
            work()
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        return record

    # What is refused must not have run; only its gradients are there.
    comparison = pair(TINY, compile=True)
    for array in (comparison.ours, comparison.theirs):
        array.eval()
    monkeypatch.setattr(step, "recorded", lambda program: RecordedStep(program, CPU, refused(comparison.ours)))
    advance(comparison, [4, 4, 4, 3])
    assert row(comparison).endswith("not recorded: RuntimeError: operation not permitted when stream is capturing")


@needs_compiler
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_where_nothing_can_be_recorded_the_report_says_why(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """On a device without graphs, and where batches lie elsewhere than the array."""
    comparison, records, why = pair(TINY, compile=True), list[None](), "torch records no graphs on xpu"
    record = why if device == "cpu" else replaying(comparison.ours, records)
    where = torch.device(device)
    monkeypatch.setattr(step, "recorded", lambda program: RecordedStep(program, where, record))
    advance(comparison, [4, 4])
    assert not records
    assert row(comparison).endswith(
        f"not recorded: {why if device == 'cpu' else 'the batch lies on cpu, the array on meta'}"
    )


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
