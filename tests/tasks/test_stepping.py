"""Tasks that are compiled train as a loop over `hfusion.train_step`, and, but for rounding, as the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.tasks import resident_training
from tests.step.test_train_step import needs_compiler
from tests.trained import (
    EPOCHS,
    SEED,
    Way,
    adamw,
    batches,
    cross_entropy,
    fused,
    machine,
    momentum,
    plain,
    planned,
    task,
)

pytestmark = needs_compiler
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Normed(nn.Module):
    """A buffer that is written to, a parameter that nothing uses, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


def array(make: Callable[[], nn.Module] = Normed, seed: int = 0) -> hf.FusedModule:
    """Return a new array, because only the very first step of an array is eager."""
    torch.manual_seed(seed)
    return fused(make)


def stepped(module: hf.FusedModule, loader: Any, after: Callable[[Any], None] = lambda optimizer: None) -> list[Tensor]:
    """A loop over `hf.train_step`: its losses, and the state after it."""
    optimizer = adamw(list(module.parameters()))
    step = hf.train_step(module, cross_entropy, optimizer, compile=True)
    torch.manual_seed(SEED)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            losses.append(step(x, y))
            after(optimizer)
    return [torch.stack(losses), *module.state_dict().values()]


def trained(module: hf.FusedModule, loader: Any, settings: Way | None = None, **more: Any) -> tuple[list[Tensor], Any]:
    """The same by a compiled task, and the report."""
    hf_task = task(module, settings or Way(), loader, compile=True, **more)
    on = machine()
    report = hf.train(hf_task, on)
    report.timeline.validate(report.plan)
    assert all(param.grad is None for param in module.parameters())
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())
    return [report["task"].losses, *module.state_dict().values()], report


def assert_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for tensor, reference in zip(actual, expected, strict=True):
        assert torch.equal(tensor, reference)


def test_the_steps_are_those_of_train_step() -> None:
    """Also of the last minibatch, which is smaller; and what is evaluated is what has been trained."""
    module, loader = array(), batches(torch.float64)
    expected = stepped(array(), loader)
    actual, report = trained(module, loader, eval_loader=loader[:2])
    assert_equal(actual, expected)
    losses, state = plain(array(), Way(), loader)
    for tensor, reference in zip(actual, [losses, *state.values()], strict=True):
        torch.testing.assert_close(tensor, reference, **CLOSE)
    module.eval()
    with torch.no_grad():
        eval_losses = torch.stack([hf.per_model(cross_entropy)(module(x), y) for x, y in loader[:2]])
    module.train()
    assert torch.equal(report["task"].eval_losses[-1], eval_losses)
    (array_report,) = report["task"].arrays
    assert [call.how.split(" of ")[0] for call in array_report.calls] == ["one program"]
    assert str(array_report) in str(report["task"])
    assert str(array_report).startswith("task: 3 members, resident, f64[6,6], i64[6]: one program of")


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, [0.5, 0.05, 1.0]])
@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_clipped_and_accumulated(optimizer: Any, clip: Any, accumulate: int) -> None:
    """The last group of an epoch is smaller."""
    settings, loader = Way(optimizer, clip, accumulate), batches(torch.float64)
    losses, state = plain(array(), settings, loader)
    heard: list[hf.Step] = []
    actual, report = trained(array(), loader, settings, callbacks=[heard.append])
    for tensor, reference in zip(actual, [losses, *state.values()], strict=True):
        torch.testing.assert_close(tensor, reference, **CLOSE)
    assert [(step.epoch, step.step) for step in heard] == [(e, s) for e in range(EPOCHS) for s in range(len(loader))]
    assert torch.equal(torch.stack([step.losses for step in heard]), report["task"].losses)


def _plain(module: hf.FusedModule, loader: Any) -> list[Tensor]:
    losses, state = plain(module, Way(), loader)
    return [losses, *state.values()]


def test_a_task_that_cannot_be_compiled_runs_eagerly_and_says_why() -> None:
    """Bit for bit as the plain loop."""
    loader = batches(torch.float64)
    module = array()
    hf_task = task(module, Way(), loader, compile=True)
    plan = planned([hf_task], machine(), [3], [False])
    words = r"'task' runs eagerly, exact but slower: it is spilled, in 3 shards.*hf.Task\(compile=False\)"
    with pytest.warns(UserWarning, match=words):
        report = hf.train(hf_task, machine(), plan=plan)
    assert_equal([report["task"].losses, *module.state_dict().values()], _plain(array(), loader))
    assert "eager: it" in str(report["task"])


# Tasks that leave open whether they are compiled: estimates decide once, and results stay exact.

# The seconds from which a compilation pays: any, and none.
PAYS = 0.0


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Tasks that leave it open give no warning of the decision."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def pays(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Let a compilation pay for tasks of so many seconds."""
    return partial(monkeypatch.setattr, resident_training, "LEAST_SECONDS")


def ran(module: hf.FusedModule, loader: Any, **options: Any) -> tuple[list[Tensor], str]:
    """Losses and the state after a run, and how its array ran."""
    run = {name: options.pop(name) for name in ("plan", "checkpoint", "every") if name in options}
    report = hf.train(task(module, Way(), loader, **options), machine(), **run)
    (row,) = report["task"].arrays
    return [report["task"].losses, *module.state_dict().values()], str(row).partition("resident, ")[2] or str(row)


def test_a_task_that_pays_is_compiled_from_its_second_minibatch_on(pays: Callable[[float], None]) -> None:
    pays(PAYS)
    loader = batches(torch.float64)
    actual, how = ran(array(), loader)
    assert "one program of" in how
    assert_equal(actual, stepped(array(), loader))
