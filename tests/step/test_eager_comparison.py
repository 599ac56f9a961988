"""Compiled steps are compared with eager ones, once, where ``compile=None`` leaves the choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfusion.device.cache import read_sealed, write_sealed
from hfusion.step import autotune
from hfusion.step.autotune import COMPILED, EAGER, PARTS, NotedProgram, VariantTimes
from hfusion.step.parallel_blocks import ParallelBlocksStep
from tests.step.test_autotune import advance, made, same
from tests.step.test_train_step import needs_compiler


@needs_compiler
@pytest.mark.parametrize("amp", [False, True])
def test_the_faster_way_runs(folder: Path, amp: bool) -> None:
    """Measuring leaves nothing behind in the step that does it."""
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        compiled, eager = advance(made()), advance(made(compile=False))
        assert not list(folder.glob("*-eager.json"))
        first = made(compile=None)
        results = advance(first)
        (path,) = folder.glob("*-eager.json")
        seconds = json.loads(read_sealed(path))["seconds"]
        assert set(seconds) == {COMPILED, EAGER}
        wins = VariantTimes(seconds).eager_wins
        # In eager steps members draw from seeds of their own where a program may follow.
        assert first.compilations == 0
        assert wins or same(results, compiled)

        for variant in (COMPILED, EAGER):
            write_sealed(path, json.dumps({"seconds": {COMPILED: 1.0, EAGER: 1.0, variant: 0.5}}).encode())
            step = made(compile=None)
            trained = advance(step)
            report = str(step.report())
            if variant == COMPILED:
                assert "measured: compiled 500 ms, eager 1e+03 ms" in report
                assert same(trained, compiled)
            else:
                assert "eager: eager steps are faster on this machine: eager 500 ms, compiled 1e+03 ms" in report
                assert same(trained, eager)


@needs_compiler
def test_whoever_wants_compiled_steps_gets_them(folder: Path) -> None:
    advance(made())
    advance(made(compile=None))
    (path,) = folder.glob("*-eager.json")
    write_sealed(path, json.dumps({"seconds": {COMPILED: 1.0, EAGER: 0.5}}).encode())
    step = made()
    advance(step)
    (row,) = step.report().rows
    assert not row.how.startswith("eager")


@needs_compiler
def test_times_that_are_unsteady_decide_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "_STEADY", 0.0)
    compiled = advance(made(1))
    step = made(1, compile=None)
    assert same(advance(step), compiled)
    assert not list(folder.glob("*-eager.json"))
    assert "measured" not in str(step.report())


@needs_compiler
@pytest.mark.usefixtures("two_threads")
def test_the_choice_of_threads_is_no_part_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of its steps run on one thread: their times would be those of the program, or be too unsteady to count."""
    monkeypatch.setattr(VariantTimes, "fastest", PARTS)
    monkeypatch.setattr(VariantTimes, "eager_wins", False)
    advance(made(count=4))
    step = made(count=4, compile=None)
    advance(step, 2)
    (noted,) = step._maker.programs()
    while isinstance(noted, NotedProgram):
        noted = noted.program
    assert isinstance(noted, ParallelBlocksStep)
    assert noted._trial is not None
    assert len(noted._trial.measured_seconds) < 2
    assert noted.on_threads()._trial is None
    assert list(folder.glob("*-eager.json"))


@needs_compiler
def test_hooks_run_once_for_each_step(folder: Path) -> None:
    advance(made())
    step, calls = made(compile=None), []
    step._fused.register_forward_hook(lambda *_: calls.append(1))
    advance(step, 6)
    assert len(calls) == 6
    assert not list(folder.glob("*-eager.json"))


@pytest.mark.parametrize(("compiled", "wins"), [(1.0, False), (1.02, False), (1.1, True)])
def test_eager_steps_must_be_clearly_faster(compiled: float, wins: bool) -> None:
    assert VariantTimes({COMPILED: compiled, EAGER: 1.0}).eager_wins is wins
