"""Searches of unlike and like models, each a whole command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("optuna")
from hfusion.bench import command_line, search_job, search_spaces
from hfusion.bench.__main__ import main
from hfusion.bench.progress import meter
from hfusion.bench.search_job import SearchJob, SearchReport
from hfusion.bench.search_spaces import Checked, CommandTime, SearchCell, SpaceSettings


@pytest.fixture(autouse=True)
def standard_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_RATES", "standard")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfusion.bench.command_line.cores", lambda: 1)
    target = tmp_path / "bench.json"
    assert main(["sweep", "--space", "unlike", "--cells", "2x1", "--repeats", "1", "--json", str(target)]) == 0
    assert "whole commands" in capsys.readouterr().out
    rows = json.loads(target.read_text())["spaces"]
    assert [row["contender"] for row in rows] == [*search_spaces.ABOUT]
    for row in rows:
        assert (row["space"], row["trials"], row["epochs"], row["reason"]) == ("unlike", 2, 1, "")
        assert row["largest_difference"] <= 1e-9
        assert row["seconds"] > row["search_seconds"] > 0
        assert row["cpu_seconds"] > row["search_cpu_seconds"] > 0
        assert row["speedup"] == rows[0]["seconds"] / row["seconds"]
    assert rows[-1]["versus_best"] == min(row["seconds"] for row in rows[:2]) / rows[-1]["seconds"]


@pytest.mark.parametrize("saved", [math.inf, -math.inf], ids=["arrays", "plain"])
@pytest.mark.parametrize("space", search_spaces.SPACES)
def test_values_are_those_of_the_loop(space: str, saved: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way hf.sweep trains them."""
    monkeypatch.setattr("hfusion.tune.shape_array.seconds_saved", lambda choice: saved)
    threads = torch.get_num_threads()
    job = SearchJob("loop", space, trials=5, epochs=2, cores=1, exact=True, minibatches=2)
    alone = search_job.run(job)
    fused = search_job.run(replace(job, contender="hfusion"))
    torch.set_num_threads(threads)
    assert len({params["dropout"] for params in alone.params}) == 5
    assert search_spaces.largest_difference(fused, alone) <= search_spaces.TOLERANCE


REPORT = SearchReport(1.0, 1.0, [{"lr": 0.1}, {"lr": 0.2}], [[2.0, 1.0], [4.0, 3.0]])


@pytest.mark.parametrize(
    ("report", "difference"),
    [
        (REPORT, 0.0),
        (replace(REPORT, values=[[2.0, 1.0], [4.0, 3.3]]), pytest.approx(0.1)),
        (replace(REPORT, values=[[2.0, math.nan], [4.0, 3.0]]), math.inf),
        (replace(REPORT, values=[[2.0, 1.0], [4.0]]), math.inf),
        (replace(REPORT, params=[{"lr": 0.2}, {"lr": 0.1}]), math.inf),
    ],
    ids=["equal", "value", "no number", "epochs", "configurations"],
)
def test_the_largest_difference(report: SearchReport, difference: float) -> None:
    assert search_spaces.largest_difference(report, REPORT) == difference


JOB = SearchJob("loop", "twins", trials=2, epochs=2, cores=2)


def commands(*seconds: float) -> list[CommandTime]:
    return [CommandTime(value, 2 * value, REPORT) for value in seconds]


def test_rows_compare_within_rounds() -> None:
    checked = Checked(dict.fromkeys(search_spaces.ABOUT, 0.0))
    times = {"loop": commands(8, 16, 8), "processes": commands(4, 8, 6), "hfusion": commands(2, 4, 2)}
    loop, processes, fused = search_spaces.cell_rows(JOB, checked, times)
    assert (loop.seconds, loop.speedup, loop.versus_best) == (8, 1.0, None)
    assert (processes.seconds, processes.speedup) == (6, 2.0)
    assert (fused.speedup, fused.cpu_speedup, fused.versus_best, fused.best_rival) == (4.0, 4.0, 2.0, "processes")
    shown, _ = search_spaces.table([loop, processes, fused])
    assert shown.row_count == 3


def test_wrong_values_and_errors_have_no_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(job: SearchJob, caches: Path) -> CommandTime:
        (caches / job.contender).touch()
        if job.contender == "processes":
            raise search_spaces.SearchFailed("processes ended early")
        values = [[2.0, 1.0], [4.0, 3.1]] if job.contender == "hfusion" else REPORT.values
        return CommandTime(1.0, 1.0, replace(REPORT, values=values))

    monkeypatch.setattr(search_spaces, "run_command", command)
    settings = SpaceSettings(("twins",), (SearchCell(2, 2),), 2, 1)
    with meter(search_spaces.pieces(settings)) as bar:
        rows = list(search_spaces.run(settings, bar))
    assert [(row.seconds, row.disagrees) for row in rows] == [(1.0, False), (None, False), (None, True)]
    _, footnotes = search_spaces.table(rows)
    assert footnotes[-2] == "[1] processes ended early"
    assert "a value differs from the loop's by 3.3e-02" in footnotes[-1]


def test_a_command_that_fails_says_why(tmp_path: Path) -> None:
    with pytest.raises(search_spaces.SearchFailed, match="loop on nowhere ended with status 1: KeyError: 'nowhere'"):
        search_spaces.run_command(replace(JOB, space="nowhere"), tmp_path)


def test_arguments() -> None:
    chosen = command_line.space_settings(
        command_line.parse(["sweep", "--space", "twins,widths", "--cells", "24x3,96x5"])
    )
    assert (chosen.spaces, chosen.rounds) == (("twins", "widths"), 3)
    assert chosen.cells == (SearchCell(24, 3), SearchCell(96, 5))
    assert command_line.space_settings(command_line.parse(["sweep", "--space", "unlike"])).cells == search_spaces.CELLS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["fuse", "--space", "twins"], "--space belongs to sweep, not to fuse"),
        (["sweep", "--cells", "2x1"], "--cells belongs to --space"),
        (["sweep", "--repeats", "2"], "--repeats does not belong to sweep without --space"),
        (["sweep", "--space", "twin"], "unknown space 'twin': choose from unlike, widths, twins"),
        (["sweep", "--space", "twins", "--cells", "24"], "argument --cells: '' is not a whole number"),
        (["sweep", "--space", "twins", "--epochs", "2"], "--epochs does not belong to --space"),
    ],
)
def test_a_bad_argument_is_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(options)
    assert message in capsys.readouterr().err
