"""Jobs of a few seconds, each in a separate process."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from hfusion.bench import command_line, short_benchmark
from hfusion.bench.progress import meter
from hfusion.bench.short_benchmark import JobTime, WrongJob, check_losses, run_job


@pytest.mark.parametrize("contender", ["eager", "steps"])
def test_jobs_end_with_the_same_losses(contender: str, tmp_path: Path) -> None:
    alone = run_job("mlp-small", 2, 1, "serial", str(tmp_path), steps=2)
    fused = run_job("mlp-small", 2, 1, contender, str(tmp_path), steps=2)
    for job in (alone, fused):
        assert job.seconds > 0
        assert job.cpu_seconds > 0
        assert job.own_cpu_seconds > 0
    check_losses(contender, alone.losses, fused.losses)
    with pytest.raises(WrongJob, match="ends with the losses"):
        check_losses(contender, alone.losses, [loss + 1 for loss in fused.losses])


def test_a_failed_job_is_reported(tmp_path: Path) -> None:
    with pytest.raises(WrongJob, match="fly of mlp-small: RuntimeError: set_num_threads"):
        run_job("mlp-small", 2, 0, "fly", str(tmp_path), steps=1)


NAMES = ("serial", "steps-cold", "steps-warm")
ROUNDS = [
    {
        "serial": JobTime(10.0, 10.0, 10.0, (1.0,)),
        "steps-cold": JobTime(12.0, 20.0, 9.0, (1.0,)),
        "steps-warm": JobTime(4.0, 5.0, 5.0, (1.0,)),
        "eager-cold": JobTime(4.0, 5.0, 5.0, (2.0,)),
        "eager-warm": JobTime(reason="no such luck"),
    }
] * 3


def test_rows() -> None:
    rows = [short_benchmark.row("cnn", 16, name, ROUNDS) for name in NAMES]
    assert [row.beyond for row in rows] == [0.0, 2.0, -6.0]
    assert short_benchmark.table(rows)[0].row_count == 3


def test_rows_without_times() -> None:
    rows = [short_benchmark.row("cnn", 16, name, ROUNDS) for name in ("eager-cold", "eager-warm")]
    assert [(row.seconds, row.disagrees) for row in rows] == [(None, True), (None, False)]
    shown, footnotes = short_benchmark.table(rows)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    assert [captured.get().count(word) for word in ("WRONG [1]", "n/a [2]")] == [4, 4]
    assert footnotes[-2:] == [
        "[1] eager-cold of cnn ends with the losses [2.0], trained alone [1.0]",
        "[2] no such luck",
    ]


def test_cold_contenders_start_with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A warm contender finds the caches of the run before, and a cold contender an empty folder."""
    filled: dict[str, list[bool]] = {}

    def job(model: str, members: int, threads: int, contender: str, folder: str) -> JobTime:
        filled.setdefault(contender, []).append(any(Path(folder).iterdir()))
        (Path(folder) / contender).touch()
        return JobTime(1.0, 1.0, 1.0, (1.0,))

    monkeypatch.setattr(short_benchmark, "run_job", job)
    settings = short_benchmark.ShortSettings(("cnn",), (16,), short_benchmark.CONTENDERS, 1, 1)
    with meter(short_benchmark.pieces(settings)) as bar:
        rows = list(short_benchmark.run(settings, bar))
    assert [row.contender for row in rows] == [contender.name for contender in short_benchmark.CONTENDERS]
    cache_states = [False, True]
    assert filled == {
        "serial": [False],
        "eager": cache_states,
        "compiled": cache_states,
        "background": cache_states,
        "steps": cache_states,
    }


@pytest.mark.parametrize(
    ("arguments", "models", "names"),
    [
        (["--models", "cnn", "--repeats", "2"], ("cnn",), [contender.name for contender in short_benchmark.CONTENDERS]),
        (["--repeats", "2", "--contenders", "steps-warm"], ("mlp-small", "cnn", "transformer"), ["steps-warm"]),
        (["--repeats", "2", "--models", "lstm", "--contenders", "serial"], ("lstm",), ["serial"]),
    ],
    ids=["model", "contender", "another model"],
)
def test_arguments(arguments: list[str], models: tuple[str, ...], names: list[str]) -> None:
    chosen = command_line.short_settings(command_line.parse(["short", *arguments]))
    contenders = command_line.named(short_benchmark.CONTENDERS, names)
    assert chosen == short_benchmark.ShortSettings(models, (16,), contenders, 2, 1)
