"""The example of compiled tasks at a small size: both ways train the same."""

from __future__ import annotations

import pytest
import torch

from tests.step.test_train_step import needs_compiler

pytest.importorskip("sklearn")


@needs_compiler
def test_both_ways_train_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import compiled_tasks

    eager, compiled = compiled_tasks.main(["--members", "3", "--epochs", "2"]).values()
    assert eager.shape == compiled.shape == (58, 3)
    torch.testing.assert_close(eager, compiled, rtol=1e-3, atol=1e-4)
    assert (eager[-1] < eager[0]).all()
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].endswith("3 members, resident, eager: compile=False")
    assert "resident, f32[64,64], i64[64]: one program of" in printed[1]
