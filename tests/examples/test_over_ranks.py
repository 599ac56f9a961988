"""The example of members over ranks, in one process."""

from __future__ import annotations

import pytest

from examples import over_ranks


def test_the_worst_follow_the_best(capsys: pytest.CaptureFixture[str]) -> None:
    means = over_ranks.main(["--members", "8", "--epochs", "3"])
    assert len(means) == 8
    # Those that began with the smallest rates are copies of better ones.
    assert max(means[:2]) < 1.0
    assert "epoch 2: best" in capsys.readouterr().out
