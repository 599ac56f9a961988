"""Tasks that leave open whether they are compiled: estimates decide once, and results stay exact."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.tasks import compile_choice
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_stepping import Normed, array, assert_equal, stepped
from tests.trained import Dropping, Way, batches, cross_entropy, machine, plain, planned, task

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
    return partial(monkeypatch.setattr, compile_choice, "LEAST_SECONDS")


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


class Recurrent(nn.Module):
    """GRU layers without dropout, which draw nothing although torch calls the operator random."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers, self.head = nn.GRU(2, 4, 2, batch_first=True, dropout=dropout), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.unflatten(1, (3, 2)))[0][:, -1])


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_layers_with_dropout_of_0_are_compiled(dropout: float, pays: Callable[[float], None]) -> None:
    pays(PAYS)
    module, loader = array(partial(Recurrent, dropout)), batches(torch.float64)
    state = torch.get_rng_state()
    how = trained(module, loader)[1]
    assert how.startswith("eager: it may draw random numbers" if dropout else "f64")
    assert bool(dropout) or torch.equal(torch.get_rng_state(), state)


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


def test_shards_are_not_compiled(pays: Callable[[float], None]) -> None:
    pays(PAYS)
    loader = batches(torch.float64)
    plan = planned([task(array(), Way(), loader)], machine(), [3], [False])
    actual, how = trained(array(), loader, plan=plan)
    assert how.endswith("spilled in 3 shards, eager: it is spilled, in 3 shards, which run one by one")
    assert_equal(actual, looped(array(), loader))


def test_what_the_user_says_needs_no_estimate(pays: Callable[[float], None]) -> None:
    loader = batches(torch.float64)
    pays(NEVER)
    assert "one program of" in trained(array(), loader, compile=True)[1]
    pays(PAYS)
    actual, how = trained(array(), loader, compile=False)
    assert how == "eager: compile=False"
    assert_equal(actual, looped(array(), loader))


@pytest.mark.parametrize(("first", "then"), [(PAYS, NEVER), (NEVER, PAYS)])
def test_a_run_that_goes_on_repeats_the_choice(
    first: float, then: float, pays: Callable[[float], None], tmp_path: Path
) -> None:
    """Even if another revision or machine would choose otherwise."""
    loader = batches(torch.float64)
    pays(first)
    expected, how = trained(array(), loader)

    def fail(heard: Any) -> None:
        if isinstance(heard, hf.Step) and (heard.epoch, heard.step) == (1, 1):
            raise OSError("cut off")

    with pytest.raises(hf.TrainError, match="cut off"):
        trained(array(), loader, callbacks=[fail], checkpoint=tmp_path / "run", every=2)
    pays(then)
    actual, again = trained(array(), loader, checkpoint=tmp_path / "run", every=2)
    assert_equal(actual, expected)
    assert again.startswith("eager: it was eager before its checkpoint") == how.startswith("eager")
