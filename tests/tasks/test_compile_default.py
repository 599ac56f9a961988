"""Tasks that leave open whether they are compiled: estimates decide once, and results stay exact."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hfusion as hf
from hfusion.step.compile_payoff import CompileRecord, add_record
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_stepping import Normed, array, assert_equal, stepped
from tests.tasks.test_unused import Skipping
from tests.tasks.test_unused import loader as skipped
from tests.trained import Dropping, Way, batches, cross_entropy, machine, plain, task

pytestmark = needs_compiler

# A machine that compiles within a microsecond, and one that takes for ever.
PAYS = CompileRecord(10_000, False, False, 1e-6, 100.0)
NEVER = CompileRecord(1, False, False, 1e5, 2.0)


@pytest.fixture(autouse=True)
def _silent() -> Iterator[None]:
    """Tasks that leave it open give no warning of the decision."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[CompileRecord], None]:
    """Let this be all that the machine knows of compilations."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def records(record: CompileRecord) -> None:
        for path in (tmp_path / "cache").glob("hfusion/compiling-*.json"):
            path.unlink()
        add_record(record)

    return records


def trained(module: hf.FusedModule, loader: Any, **options: Any) -> tuple[list[Tensor], str]:
    """Losses and the state after a run, and how its array ran."""
    run = {name: options.pop(name) for name in ("plan", "checkpoint", "every") if name in options}
    report = hf.train(task(module, Way(), loader, **options), machine(), **run)
    (row,) = report["task"].arrays
    return [report["task"].losses, *module.state_dict().values()], str(row).partition("resident, ")[2] or str(row)


def looped(module: hf.FusedModule, loader: Any, loss: Any = cross_entropy) -> list[Tensor]:
    losses, state = plain(module, Way(), loader, loss)
    return [losses, *state.values()]


def test_a_task_that_pays_is_compiled_from_its_second_minibatch_on(measured: Callable[..., None]) -> None:
    measured(PAYS)
    loader = batches(torch.float64)
    actual, how = trained(array(), loader)
    assert "one program of" in how
    assert_equal(actual, stepped(array(), loader))


@pytest.mark.parametrize(
    ("make", "record", "loader", "loss", "why"),
    [
        (Normed, NEVER, batches(torch.float64), cross_entropy, "eager: 10 more steps take"),
        (Dropping, PAYS, batches(torch.float64), cross_entropy, "eager: it may draw random numbers"),
        (Skipping, PAYS, skipped(), F.mse_loss, "eager: exit runs in a loop over members"),
    ],
)
def test_one_that_does_not_is_the_plain_loop_bit_for_bit(
    make: Any, record: CompileRecord, loader: Any, loss: Any, why: str, measured: Callable[..., None]
) -> None:
    measured(record)
    actual, how = trained(array(make), loader, loss=loss)
    assert how.startswith(why)
    assert_equal(actual, looped(array(make), loader, loss))


def test_what_the_user_says_needs_no_estimate(measured: Callable[..., None]) -> None:
    loader = batches(torch.float64)
    measured(NEVER)
    assert "one program of" in trained(array(), loader, compile=True)[1]
    measured(PAYS)
    actual, how = trained(array(), loader, compile=False)
    assert how == "eager: compile=False"
    assert_equal(actual, looped(array(), loader))
