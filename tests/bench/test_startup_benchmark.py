from __future__ import annotations

from rich.console import Console

from hfusion.bench import startup_benchmark
from tests.bench.tiny import TINY, TINY_BRANCHING, workload
from tests.step.test_train_step import needs_compiler


@needs_compiler
def test_stages() -> None:
    row = startup_benchmark.measure_startup(workload(TINY))
    assert (row.model, row.members, row.note) == ("tiny", 3, "")
    for name in startup_benchmark.STAGES:
        assert getattr(row, name) > 0


def test_models_that_are_not_compiled_are_reported() -> None:
    row = startup_benchmark.measure_startup(workload(TINY_BRANCHING))
    assert row.compiled_ms is None
    assert row.next_ms is None
    assert row.note.startswith("eager: forward runs in a loop over members")
    shown, footnotes = startup_benchmark.table([row])
    console = Console(width=150)
    with console.capture() as captured:
        console.print(shown)
    assert captured.get().count("n/a [1]") == 2
    assert footnotes == [f"[1] {row.note}"]
