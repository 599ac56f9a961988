from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from torch import Tensor

from hfusion.bench import comparison_table, fuse_benchmark, machine_description, plot, results, serial, vmapped
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Contender, Running, Workload
from tests.bench.tiny import CPU, TINY

SERIAL = Contender("serial", "", serial.start)
VMAP = Contender("vmap", "", vmapped.start)


def settings(*contenders: Contender) -> fuse_benchmark.FuseSettings:
    return fuse_benchmark.FuseSettings(
        (TINY,), members=(2, 3), contenders=contenders, rounds=2, slot=1e-4, threads=1, device=CPU
    )


def compare(*contenders: Contender) -> list[results.ModelResult]:
    chosen, done = settings(*contenders), [0]

    def advance(pieces: int) -> None:
        done[0] += pieces

    compared = list(fuse_benchmark.run(chosen, Meter(say=lambda _: None, advance=advance)))
    assert done[0] == fuse_benchmark.pieces(chosen)
    return compared


def start_wrong(workload: Workload) -> Running:
    loop = serial.SerialLoop.of(replace(workload, members=workload.members + 1), range(1, workload.members + 1))
    return Running(loop.step)


def start_broken(workload: Workload) -> Running:
    raise RuntimeError(f"no {workload.members} members here\nand a second line")


def step_broken(workload: Workload) -> Running:
    def step() -> Tensor:
        raise RuntimeError("the step is broken")

    return Running(step)


def rendered(compared: list[results.ModelResult], *names: str) -> str:
    console = Console(width=150, record=True, file=None, quiet=False)
    shown, footnotes = comparison_table.table(compared, names)
    with console.capture() as captured:
        console.print(shown)
    return captured.get() + "\n".join(footnotes)


def test_rows_of_the_json_file(tmp_path: Path) -> None:
    compared = compare(SERIAL, VMAP)
    target = tmp_path / "bench.json"
    results.write_json(target, machine_description.describe(CPU), results.rows_of(compared))
    read = json.loads(target.read_text())
    assert {"cpu", "cores", "threads", "torch", "python", "platform", "date"} <= read["machine"].keys()
    assert [(row["model"], row["members"], row["contender"]) for row in read["rows"]] == [
        ("tiny", members, contender) for members in (2, 3) for contender in ("serial", "vmap")
    ]
    for row in read["rows"]:
        assert row["ms"] > 0
        assert row["speedup"] > 0
        assert row["spread"] >= 0
        assert row["reason"] == ""
    assert read["rows"][0]["speedup"] == 1.0


def test_without_the_serial_loop_there_is_no_speedup() -> None:
    (first, _) = compare(VMAP)
    (row,) = first.rows()
    assert row.ms is not None
    assert row.speedup is None


@pytest.mark.parametrize("start", [start_broken, step_broken])
def test_a_contender_that_cannot_run_is_shown_with_its_reason(start: type[Running]) -> None:
    compared = compare(SERIAL, Contender("broken", "", start))
    row = compared[0].rows()[1]
    assert (row.ms, row.speedup, row.spread) == (None, None, None)
    assert row.reason in ("RuntimeError: no 2 members here", "RuntimeError: the step is broken")
    shown = rendered(compared, "serial", "broken")
    assert "n/a [1]" in shown
    assert f"[1] broken: {row.reason}" in shown


def test_a_wrong_contender_is_not_timed() -> None:
    compared = compare(SERIAL, Contender("wrong", "", start_wrong))
    cell = compared[0].cell("wrong")
    assert cell is not None
    assert cell.disagrees
    assert cell.seconds == ()
    assert "wrong: member 0 has loss" in cell.reason
    assert "WRONG [1]" in rendered(compared, "serial", "wrong")


def comparison(**seconds: tuple[float, ...]) -> results.ModelResult:
    cells = tuple(results.Cell(name.replace("_", "-"), times) for name, times in seconds.items())
    return results.ModelResult("m", 4, 1, cells)


def test_versus_best_takes_the_fastest_other() -> None:
    result = comparison(serial=(8.0, 8.0), vmap=(3.0, 3.0), hfusion=(4.0, 4.0))
    assert result.versus_best() == ("vmap", 0.75)
    shown = rendered([result], "serial", "vmap", "hfusion")
    # A loss of speed stands there like a win.
    assert "2.00x" in shown
    assert "0.75x" in shown


def test_versus_best_takes_the_faster_of_ours() -> None:
    result = comparison(serial=(8.0, 8.0), vmap=(3.0, 3.0), hfusion=(4.0, 4.0), hfusion_compiled=(2.0, 2.0))
    assert result.versus_best() == ("vmap", 1.5)
    assert comparison(serial=(8.0,), hfusion_compiled=(2.0,)).versus_best() == ("serial", 4.0)
    assert comparison(hfusion=(4.0,), hfusion_compiled=(2.0,)).versus_best() is None
    assert "hfusion vs best other" in " ".join(rendered([result], "serial", "vmap", "hfusion-compiled").split())


def test_versus_best_counts_processes_per_core() -> None:
    result = comparison(serial=(8.0,), processes=(5.0,), hfusion=(4.0,))
    cells = tuple(replace(cell, cores=2) if cell.contender == "processes" else cell for cell in result.cells)
    assert replace(result, cells=cells).versus_best() == ("serial", 2.0)
    assert replace(result, cells=cells, threads=2).versus_best() == ("processes", 1.25)
    assert "[1] wall time on 2 cores" in rendered([replace(result, cells=cells)], "serial", "processes", "hfusion")


def test_the_plot_leaves_out_what_was_not_timed(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    png, svg = tmp_path / "bench.png", tmp_path / "bench.svg"
    plot.draw(comparison(serial=(8.0,), vmap=(), hfusion=(4.0,)).rows(), [png, svg])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in svg.read_text()


def test_rows_are_read_back(tmp_path: Path) -> None:
    result = comparison(serial=(8.0,), vmap=(), hfusion=(4.0,))
    path = tmp_path / "bench.json"
    results.write_json(path, {}, results.rows_of([result]))
    assert results.kept_rows(path) == result.rows()


def test_versus_best_without_hfusion_or_others() -> None:
    assert comparison(serial=(1.0,)).versus_best() is None
    assert comparison(hfusion=(1.0,)).versus_best() is None
    assert comparison(serial=(1.0,), hfusion=()).versus_best() is None
