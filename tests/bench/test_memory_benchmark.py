from __future__ import annotations

from functools import partial

import pytest
from rich.console import Console

from hfusion.bench import cases, fuse_benchmark, memory_benchmark, models, processes, serial
from hfusion.bench.contenders import start_hfusion
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Contender, Running, Unavailable, Workload
from tests.bench.tiny import CPU

# Few samples, so that activations are small beside parameters.
WIDE = cases.FuseCase("wide", "", partial(models.mlp, 300, 300, 10), partial(cases.classified, 2, 300))
PARAMETERS = 300 * 300 + 300 + 300 * 10 + 10


def allocation(ts: float, size: int, address: int) -> dict[str, object]:
    return {"name": "[memory]", "ts": ts, "args": {"Bytes": size, "Addr": address}}


STEADY = {"name": memory_benchmark.STEADY, "ph": "X", "ts": 10.0}


@pytest.mark.parametrize(
    ("events", "peak"),
    [
        ([allocation(1, 8, 1)], 8),
        # What was larger before the steps does not count.
        ([allocation(1, 8, 1), allocation(2, 99, 2), allocation(3, -99, 2), allocation(11, 4, 3)], 12),
        ([allocation(1, 8, 1), allocation(11, 4, 2), allocation(12, -4, 2), allocation(13, 3, 2)], 12),
        # Freed in the steps is what was alive when they began.
        ([allocation(1, 8, 1), allocation(11, -8, 1)], 8),
        # What is older than the profile was never counted.
        ([allocation(1, -50, 9), allocation(11, 4, 2), allocation(12, -70, 8)], 4),
        # In the order of time, not of the file.
        ([allocation(12, 5, 2), allocation(11, -8, 1), allocation(1, 8, 1)], 8),
    ],
)
def test_the_peak_of_a_trace(events: list[dict[str, object]], peak: int) -> None:
    assert memory_benchmark.peak_of([*events, STEADY]) == peak


def start_never(workload: Workload) -> Running:
    raise Unavailable("it cannot")


def rows_of(*contenders: Contender) -> list[memory_benchmark.MemoryRow]:
    chosen = fuse_benchmark.FuseSettings(
        (WIDE,), members=(3,), contenders=contenders, rounds=1, slot=1e-3, threads=1, device=CPU
    )
    done: list[int] = []
    (rows,) = memory_benchmark.run(chosen, Meter(say=lambda _: None, advance=done.append))
    assert sum(done) == memory_benchmark.pieces(chosen)
    return rows


def test_bytes_per_member() -> None:
    rows = rows_of(Contender("serial", "", serial.start), Contender("hfusion", "", start_hfusion))
    for row in rows:
        assert row.bytes_per_member is not None
        # Parameters, gradients and two moments, and at most as much again of temporaries.
        assert 4 * 4 * PARAMETERS <= row.bytes_per_member < 2 * 4 * 4 * PARAMETERS


def test_contenders_that_are_not_counted_have_a_reason() -> None:
    rows = rows_of(
        Contender("serial", "", serial.start),
        Contender("processes", "", processes.start),
        Contender("never", "", start_never),
    )
    assert [row.reason for row in rows] == ["", "its tensors are in other processes", "it cannot"]
    assert [row.bytes is None for row in rows] == [False, True, True]
    console = Console(width=150)
    shown, footnotes = memory_benchmark.table(rows, ["serial", "processes", "never"])
    with console.capture() as captured:
        console.print(shown)
    assert "1.00x" in captured.get()
    assert footnotes == ["[1] processes: its tensors are in other processes", "[2] never: it cannot"]
