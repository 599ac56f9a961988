"""The example that trains while another process compiles."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from examples import first_second
from tests.step.test_train_step import needs_compiler


@needs_compiler
def test_it_changes_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HFUSION_CHECK")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    runs = [first_second.train(2, lambda done: done < 6, eager_steps=3) for _ in range(2)]
    (change, losses), (again, others) = runs
    assert (len(change.eager), len(change.compiled)) == (3, 3)
    assert str(again).startswith("3 eager steps")
    assert torch.equal(losses, others)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    first_second.main(["--members", "2", "--seconds", "0"])
    assert "2 eager steps" in capsys.readouterr().out
