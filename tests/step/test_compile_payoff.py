"""When a step is compiled whose number of steps is known."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from hfusion.step import compile_scheduler
from hfusion.step.compile_mode import CompileMode
from hfusion.step.compile_payoff import CompileRecord, Worth, add_record
from tests.step.test_compile_scheduler import _kept as _kept
from tests.step.test_compile_scheduler import advance, made


def unpaid(steps: int, ahead: int, cost: int) -> Worth:
    return Worth(why=f"{steps} more steps take {ahead} s eagerly, and its compilation about {cost} s")


@pytest.mark.usefixtures("_kept")
def test_a_step_that_is_not_worth_it_is_eager_without_a_warning() -> None:
    torch.manual_seed(0)
    add_record(CompileRecord(1, False, False, 1000.0, 2.0))
    add_record(CompileRecord(1, False, True, 1000.0, 2.0))
    step = made(steps=6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = advance(step, 6)
    for actual, expected in zip(losses, advance(made(compile=False), 6), strict=True):
        assert torch.equal(actual, expected)
    (row,) = {str(row.why).partition(" more steps")[0] for row in step.report().rows}
    assert row == "4"


@pytest.mark.usefixtures("_kept")
def test_steps_whose_number_nobody_knows_are_compiled_once_they_took_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    remaining_steps: list[int] = []

    def verdict(remaining: int, *others: Any) -> Worth:
        remaining_steps.append(remaining)
        return Worth() if remaining >= 8 else unpaid(remaining, 1, 9)

    monkeypatch.setattr(compile_scheduler, "judge", verdict)
    torch.manual_seed(0)
    step = made(compile=None)
    losses = [loss for count in (6, 2) for loss in advance(step, count)]
    assert f"eager: {unpaid(4, 1, 9).why}" in str(step.report())
    losses += advance(step, 3)
    assert "program of" in str(step.report())
    assert remaining_steps == [2, 4, 8]
    plain = made(compile=False)
    for actual, expected in zip(losses, [loss for n in (6, 2, 3) for loss in advance(plain, n)], strict=True):
        torch.testing.assert_close(actual, expected)
    # What is kept is not judged.
    again = made(compile=None)
    advance(again, 3)
    assert "program of" in str(again.report())
    assert remaining_steps == [2, 4, 8]


@pytest.mark.parametrize("steps", [-1, 1.5, True, "many"])
def test_wrong_numbers_of_steps(steps: Any) -> None:
    with pytest.raises(ValueError, match="give the number of steps"):
        CompileMode.of(True, None, steps=steps)
