"""One training step of B models, fused and unfused (``fuse``, the default)."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from hfusion.bench import cases, harness
from hfusion.bench.cases import CASES, Contender, Disagreement, Running, Unavailable, Workload
from hfusion.bench.contenders import CONTENDERS, start_serial
from hfusion.bench.harness import Benchmark, Row

OURS = ("hfusion", "hfusion-compiled")
AMP = {"bf16": torch.bfloat16}
_AGREEMENT_STEPS = 4
_QUICK_MODELS, _QUICK_CONTENDERS = ("mlp-small", "cnn"), ("serial", "vmap", "hfusion")


def prepare(contender: Contender, workload: Workload, expected: Tensor) -> tuple[Running | None, Row]:
    """Start a contender and compare its first losses. Returns None and the reason if one of the two fails."""
    row: Row = {"model": workload.case.name, "members": workload.members, "contender": contender.name}
    if contender.one_rate:
        workload = replace(workload, one_rate=True)
        expected = cases.losses(start_serial(workload), len(expected))
    running = None
    try:
        running = contender.start(workload)
        cases.check_agreement(contender.name, expected, cases.losses(running, len(expected)), workload.tolerance)
    except Exception as error:
        if running is not None:
            running.close()
        known = isinstance(error, Unavailable | Disagreement)
        reason = str(error) if known else cases.error_line(error)
        return None, row | {"reason": reason, "disagrees": isinstance(error, Disagreement)}
    return running, row | {"cores": running.cores, "note": running.note, "reason": ""}


def compare(
    workload: Workload,
    contenders: Sequence[Contender],
    rounds: int,
    slot: float,
    threads: int,
    baseline: Contender = CONTENDERS[0],
) -> list[Row]:
    """Return a row for each contender: the median of its times in ``rounds`` rounds of at least ``slot`` seconds.

    ``ms`` is the wall time of a step of all members; ``speedup`` over the baseline, by default the serial loop, and
    ``spread`` (quartile distance over median) have no unit. A row of hfusion's has ``versus_best``: its speed-up over
    ``best_other``, the fastest other contender per core.
    """
    where = f"{workload.case.name} x {workload.members}"
    # Compiled code of other workloads would count towards the limit of recompilations.
    torch.compiler.reset()
    expected = cases.losses(baseline.start(workload), _AGREEMENT_STEPS)
    rows, steps = [], {}
    with ExitStack() as stack:
        for contender in contenders:
            harness.say(f"{where}: preparing {contender.name}")
            running, row = prepare(contender, workload, expected)
            rows.append(row)
            if running is not None:
                stack.callback(running.close)
                steps[contender.name] = running.step
        harness.say(f"{where}: {rounds} rounds")
        times = harness.interleave(steps, rounds, slot, workload.device)
    timed = [row for row in rows if not row["reason"]]
    others = [row for row in timed if not row["contender"].startswith("hfusion")]
    for row in timed:
        seconds = times[row["contender"]]
        row |= {"ms": 1e3 * statistics.median(seconds), "spread": harness.spread(seconds), "speedup": None}
        if baseline.name in times:
            row["speedup"] = harness.speedup(times[baseline.name], seconds)
        if row["contender"] in OURS and others:
            per_core = {
                other["contender"]: harness.speedup(times[other["contender"]], seconds)
                * max(1.0, other["cores"] / threads)
                for other in others
            }
            row["best_other"] = min(per_core, key=lambda name: per_core[name])
            row["versus_best"] = per_core[row["best_other"]]
    return rows


def _run(options: argparse.Namespace) -> Iterator[Row]:
    models, contenders = options.models, options.contenders
    if options.quick:
        models = models or [case for case in CASES if case.name in _QUICK_MODELS]
        contenders = contenders or [contender for contender in CONTENDERS if contender.name in _QUICK_CONTENDERS]
    for case in models or CASES:
        for members in options.members or ((4,) if options.quick else (4, 16, 64)):
            yield from compare(
                Workload(case, members, options.device, AMP.get(options.amp)),
                contenders or CONTENDERS,
                options.repeats or (3 if options.quick else 7),
                0.01 if options.quick else 0.04,
                options.threads,
            )


def table(rows: Sequence[Row]) -> Table:
    def versus_best(row: Row) -> Text:
        return (
            Text("") if "versus_best" not in row else harness.factor(row["versus_best"]).append(f" {row['best_other']}")
        )

    values: dict[str, Callable[[Row], harness.Cell]] = {
        "ms": lambda row: f"{row['ms']:.3g}",
        "speed-up": lambda row: harness.factor(row["speedup"]),
        "spread": lambda row: f"{row['spread']:.0%}",
        "cores": lambda row: str(row["cores"]),
        "vs best other, per core": versus_best,
    }
    return harness.row_table("one training step of all members", rows, ("model", "members", "contender"), values)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--amp", choices=sorted(AMP), help="forward and loss under autocast, for all contenders")


BENCHMARK = Benchmark(__doc__, _run, table, {"models": CASES, "contenders": CONTENDERS}, True, _options)
