"""Jobs of some seconds, each a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfusion.bench import arguments, short
from hfusion.bench.short import JobTime, WrongJob, check_losses, run_job


def test_jobs_end_with_the_same_losses(tmp_path: Path) -> None:
    alone = run_job("mlp-small", 2, 1, "serial", str(tmp_path), steps=2)
    ours = run_job("mlp-small", 2, 1, "hfusion", str(tmp_path), steps=2)
    assert ours.seconds > 0
    check_losses("hfusion", alone.losses, ours.losses)
    with pytest.raises(WrongJob, match="ends with the losses"):
        check_losses("hfusion", alone.losses, [loss + 1 for loss in ours.losses])


def test_a_job_that_fails_is_told(tmp_path: Path) -> None:
    with pytest.raises(WrongJob, match="fly of mlp-small: RuntimeError: set_num_threads"):
        run_job("mlp-small", 2, 0, "fly", str(tmp_path), steps=1)


def test_rows() -> None:
    rounds = [
        {
            "serial": JobTime(10.0, 10.0, 10.0, (1.0,)),
            "cold": JobTime(12.0, 20.0, 9.0, (1.0,)),
            "warm": JobTime(4.0, 5.0, 5.0, (1.0,)),
        }
    ] * 3
    rows = list(short._rows("cnn", 16, rounds))
    assert [(row.contender, row.beyond) for row in rows] == [("serial", 0.0), ("cold", 2.0), ("warm", -6.0)]
    assert short.table(rows).row_count == 3


def test_arguments() -> None:
    chosen = arguments.short_settings(arguments.parse(["short", "--models", "cnn", "--repeats", "2"]))
    assert chosen == short.ShortSettings(("cnn",), (16,), 2, 1)
