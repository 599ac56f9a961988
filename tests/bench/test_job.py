from __future__ import annotations

import pytest
from rich.console import Console

from hfusion.bench import job
from hfusion.bench.__main__ import main


@pytest.mark.parametrize("way", ["serial", "hfusion"])
def test_a_job_in_its_own_process(way: str) -> None:
    row = job.once("mlp-small", 2, way, 2, 1)
    assert row.reason == ""
    for seconds in (row.cold_s, row.warm_s):
        assert seconds is not None
        assert 0 < seconds < 600


def test_a_job_that_fails_has_a_reason() -> None:
    row = job.once("no-such-model", 2, "serial", 2, 1)
    assert row.cold_s is None
    assert row.reason == "StopIteration"
    shown, footnotes = job.table([row])
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    assert captured.get().count("n/a") == 2
    assert footnotes[-1] == "no-such-model x 2, serial: StopIteration"


def test_what_does_not_belong_to_jobs(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--job", "--contenders", "serial"])
    assert "--contenders does not belong to --job" in capsys.readouterr().err
