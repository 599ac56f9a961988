"""Tasks that leave open whether they are compiled: estimates decide once, and results stay exact."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.tasks import resident_training
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_stepping import Normed, array, assert_equal, stepped
from tests.trained import Dropping, Way, batches, cross_entropy, machine, plain, task

pytestmark = needs_compiler

# The seconds from which a compilation pays: any, and none.
PAYS, NEVER = 0.0, math.inf


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


def trained(module: hf.FusedModule, loader: Any, **options: Any) -> tuple[list[Tensor], str]:
    """Losses and the state after a run, and how its array ran."""
    run = {name: options.pop(name) for name in ("plan", "checkpoint", "every") if name in options}
    report = hf.train(task(module, Way(), loader, **options), machine(), **run)
    (row,) = report["task"].arrays
    return [report["task"].losses, *module.state_dict().values()], str(row).partition("resident, ")[2] or str(row)


def looped(module: hf.FusedModule, loader: Any, loss: Any = cross_entropy) -> list[Tensor]:
    losses, state = plain(module, Way(), loader, loss)
    return [losses, *state.values()]


def test_a_task_that_pays_is_compiled_from_its_second_minibatch_on(pays: Callable[[float], None]) -> None:
    pays(PAYS)
    loader = batches(torch.float64)
    actual, how = trained(array(), loader)
    assert "one program of" in how
    assert_equal(actual, stepped(array(), loader))


@pytest.mark.parametrize(
    ("make", "seconds", "loader", "loss", "why"),
    [
        (Normed, NEVER, batches(torch.float64), cross_entropy, "eager: its 10 steps take about"),
        (Dropping, PAYS, batches(torch.float64), cross_entropy, "eager: it may draw random numbers"),
    ],
)
def test_one_that_does_not_is_the_plain_loop_bit_for_bit(
    make: Any, seconds: float, loader: Any, loss: Any, why: str, pays: Callable[[float], None]
) -> None:
    pays(seconds)
    actual, how = trained(array(make), loader, loss=loss)
    assert how.startswith(why)
    assert_equal(actual, looped(array(make), loader, loss))


def test_what_the_user_says_needs_no_estimate(pays: Callable[[float], None]) -> None:
    loader = batches(torch.float64)
    pays(NEVER)
    assert "one program of" in trained(array(), loader, compile=True)[1]
    pays(PAYS)
    actual, how = trained(array(), loader, compile=False)
    assert how == "eager: compile=False"
    assert_equal(actual, looped(array(), loader))
