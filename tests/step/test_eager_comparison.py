"""Compiled steps are compared with eager ones, once, where ``compile=None`` leaves the choice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from hfusion.device.cache import read_sealed, write_sealed
from hfusion.step.autotune import COMPILED, EAGER, VariantTimes
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
def test_hooks_run_once_for_each_step(folder: Path) -> None:
    advance(made())
    step, calls = made(compile=None), []
    step._fused.register_forward_hook(lambda *_: calls.append(1))
    advance(step, 6)
    assert len(calls) == 6
    assert not list(folder.glob("*-eager.json"))
