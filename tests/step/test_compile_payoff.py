"""When a step is compiled whose number of steps is known."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from hfusion.device.measured_records import MAX_ROWS
from hfusion.step import compile_scheduler
from hfusion.step.compile_mode import CompileMode
from hfusion.step.compile_payoff import CompileRecord, StepClock, Worth, add_record, judge, read_records
from tests.step.test_compile_scheduler import _kept as _kept
from tests.step.test_compile_scheduler import advance, made

SMALL = CompileRecord(10, False, False, 4.0, 5.0)
BEHIND = CompileRecord(10, False, True, 8.0, 5.0)


def unpaid(steps: int, ahead: int, cost: int) -> Worth:
    return Worth(why=f"{steps} more steps take {ahead} s eagerly, and its compilation about {cost} s")


@pytest.mark.parametrize(
    ("remaining", "eager", "size", "records", "spare", "verdict"),
    [
        # Without records no step waits, and runs that end before a first compilation stay eager.
        (110, 0.1, 10, [], False, Worth(behind=True)),
        (90, 0.1, 10, [], False, unpaid(90, 9, 10)),
        (90, 0.1, 10, [], True, unpaid(90, 9, 10)),
        (110, 0.1, 10, [CompileRecord(10, True, False, 1.0, 9.0)], True, Worth(behind=True)),
        # 100 steps of 0.1 s become 8 s faster, for 4 s; of 0.04 s 3.2 s.
        (100, 0.1, 10, [SMALL], False, Worth()),
        (100, 0.04, 10, [SMALL], False, unpaid(100, 4, 4)),
        # A step of twice the size takes twice as long to compile.
        (110, 0.1, 20, [SMALL], False, Worth()),
        (100, 0.1, 30, [SMALL], False, unpaid(100, 10, 12)),
        # Beside training it is worth it if it is there in time.
        (100, 0.1, 10, [SMALL, BEHIND], True, Worth(behind=True)),
        (
            70,
            0.1,
            10,
            [SMALL, BEHIND],
            True,
            unpaid(70, 7, 8),
        ),
        (0, 0.1, 10, [SMALL], True, unpaid(0, 0, 4)),
        # By what it brought before, if that is known.
        (1000, 0.1, 10, [CompileRecord(10, False, False, 4.0)], False, Worth()),
        (
            1000,
            0.1,
            10,
            [CompileRecord(10, False, False, 4.0, 0.9)],
            False,
            Worth(why="compiled steps like it were no faster on this machine (0.90 times as fast)"),
        ),
    ],
)
def test_verdicts(remaining: int, eager: float, size: int, records: list[Any], spare: bool, verdict: Worth) -> None:
    assert judge(remaining, eager, size, False, records, spare) == verdict


def test_rows_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert read_records() == []
    for number in range(MAX_ROWS + 2):
        add_record(CompileRecord(number + 1, True, False, 0.5, None if number % 2 else 2.0))
    records = read_records()
    assert len(records) == MAX_ROWS
    assert records[-1] == CompileRecord(MAX_ROWS + 2, True, False, 0.5, None)
    (path,) = (tmp_path / "hfusion").glob("compiling-*.json")
    for content in ("{", "[]", '{"steps": [{"operators": "many"}]}', '{"steps": [{"operators": 1, "looped": 0}]}'):
        path.write_text(content)
        assert read_records() == []


def test_a_clock_leaves_the_first_compiled_step_out() -> None:
    clock = StepClock()
    for seconds in (1.0, 3.0, 2.0, 100.0):
        clock.note_eager(seconds)
    assert clock.speedup is None
    assert [clock.note_compiled(seconds) for seconds in (9.0, 0.5, 0.5, 0.25, 1.0)] == [
        False,
        False,
        False,
        True,
        False,
    ]
    assert clock.speedup == 4.0


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
def test_another_process_compiles_if_nothing_is_known() -> None:
    step = made(steps=10**9)
    advance(step, 4)
    assert "compiled in the background" in str(step.report())


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


def test_when_to_compile_is_said_once() -> None:
    with pytest.raises(ValueError, match="compile is None, which leaves open when"):
        CompileMode.of(None, 3, steps=10)
    assert CompileMode.of(True, 3, steps=10).eager(2)
