"""The sub-benchmark ``links``: the cases of ``shard``, and larger ones, on a simulated accelerator.

The value of a plan depends on the ratio of the device's computing speed to that of its link, and a CPU has only one
such ratio. Here the shards are chosen for the rates of a data sheet, and their schedule is simulated: spilled arrays
as hf.train trains them, with no shard that stays on the device, and with one unit in memory at a time.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from hfusion.bench.comparison_table import factor
from hfusion.bench.progress import Meter, meter
from hfusion.bench.results import write_json
from hfusion.bench.shard_benchmark import ShardWorkload, read, without_prefetch
from hfusion.bench.shard_cases import CASES, LARGE_CASES, QUICK_CASES, ShardCase
from hfusion.bench.shard_results import ALONE, OURS
from hfusion.core.errors import PlanError
from hfusion.device.backend import types
from hfusion.device.calibrate import Rates
from hfusion.schedule.plan import Plan
from hfusion.schedule.simulate import simulate
from hfusion.tasks.arrange import arrays_of
from hfusion.tasks.array_plan import Room

# FLOP/s and bytes/s of an accelerator's data sheet, operators per second as of a host that calls one in 30 us, and a
# disk that no case needs.
FLOPS, MEMORY, CALLS, DISK = 60e12, 1.5e12, 4 / 30e-6, 2e9
# Bytes/s each way: PCIe 3.0 and 4.0 with sixteen lanes, as measured rather than as printed.
LINKS = (12e9, 25e9)
NOTHING_STAYS = "hf.train, no shard stays"
STEPS = 24


@dataclass(frozen=True)
class LinksRow:
    """One way to train a case: milliseconds of a steady step, and of its computing and its busier link alone."""

    case: str
    members: int
    link_gb: float
    budget: str
    contender: str
    ms: float | None = None
    compute_ms: float | None = None
    transfer_ms: float | None = None
    moved_mib: float | None = None
    shards: int | None = None
    reason: str = ""


def rates(link: float) -> Rates:
    """Return the rates of the accelerator with a link of ``link`` bytes per second each way."""
    return Rates(FLOPS, MEMORY, CALLS, link, link, DISK, DISK, device=types()[0])


def planned(workload: ShardWorkload, budget: int, link: float, *, keep: bool) -> Plan:
    """The plan of the case's one array. Raises PlanError where it does not fit."""
    room = Room(torch.device("cpu"), budget, rates(link), keep)
    (array,) = arrays_of(workload.task(), room)
    return Plan((array.plan,), {"accelerator": budget}, link, link, room.rates.action_seconds)


def rows_of(case: ShardCase, meter: Meter) -> Iterator[LinksRow]:
    """Yield a row for every link, budget and contender of a case."""
    workload = ShardWorkload(case, STEPS, torch.device("cpu"))
    for link in LINKS:
        need = planned(workload, 1 << 62, link, keep=True).tasks[0].device_bytes
        for part in case.parts:
            for contender in (OURS,) if part == 1 else (OURS, NOTHING_STAYS, ALONE):
                head = LinksRow(case.name, len(workload.models), link / 1e9, f"1/{part}", contender)
                try:
                    yield _row(head, planned(workload, need // part, link, keep=contender != NOTHING_STAYS))
                except PlanError as error:
                    yield replace(head, reason=str(error))
                meter.advance(1)


def _row(head: LinksRow, plan: Plan) -> LinksRow:
    if head.contender == ALONE:
        plan = without_prefetch(plan)
    sample = read(simulate(plan), plan)
    assert sample.lanes is not None
    assert sample.moved is not None
    return replace(
        head,
        ms=sample.seconds * 1e3,
        compute_ms=sample.lanes.compute * 1e3,
        transfer_ms=max(sample.lanes.into, sample.lanes.out) * 1e3,
        moved_mib=sample.moved / 2**20,
        shards=sample.shards,
    )


def pieces(cases: Sequence[ShardCase]) -> int:
    """Return the number of rows."""
    return len(LINKS) * sum(3 * len(case.parts) - 2 * (1 in case.parts) for case in cases)


def table(rows: Sequence[LinksRow]) -> Table:
    """A row per case, link, budget and way."""
    shown = Table(title="steps of arrays that do not fit an accelerator, simulated by the rates of a data sheet")
    for heading in ("case", "link GB/s", "budget", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("ms per step", "computing", "busier link", "over the larger", "MiB moved", "shards"):
        shown.add_column(heading, justify="right")
    for row in rows:
        head = (row.case, f"{row.link_gb:.0f}", row.budget, row.contender)
        if row.ms is None or row.compute_ms is None or row.transfer_ms is None:
            shown.add_row(*head, "n/a")
            continue
        over = factor(row.ms / max(row.compute_ms, row.transfer_ms))
        times = (f"{value:,.2f}" for value in (row.ms, row.compute_ms, row.transfer_ms))
        shown.add_row(*head, *times, over, f"{row.moved_mib:,.1f}", str(row.shards))
    return shown


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark with the command line ``arguments``."""
    parser = argparse.ArgumentParser(prog="python -m hfusion.bench links", description=__doc__, allow_abbrev=False)
    parser.add_argument("--quick", action="store_true", help="few cases")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
    parsed = parser.parse_args(arguments)
    cases = QUICK_CASES if parsed.quick else (*CASES, *LARGE_CASES)
    with meter(pieces(cases)) as bar:
        rows = [row for case in cases for row in rows_of(case, bar)]
    Console(width=160, highlight=False).print(table(rows))
    if parsed.json:
        write_json(parsed.json, {"flops": FLOPS, "memory": MEMORY, "calls": CALLS}, rows)
