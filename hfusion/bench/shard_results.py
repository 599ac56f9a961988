"""Results of the sub-benchmark ``shard``: samples of runs, rows of the JSON file, and the table.

The lower bound of a step is max(compute, transfer): the time of its computing alone, or of its busier link alone. The
computing is that of the same shards with nothing copied, the transfers are those of the sequential loop; for a
resident array the bound is the plain loop's step.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from rich.table import Table
from rich.text import Text
from torch import Tensor

from hfusion.bench import timing
from hfusion.bench.comparison_table import Footnotes, factor

PLAIN = "plain loop"
OURS = "hf.train"
ALONE = "hf.train, no prefetch"
BY_HAND = "load-compute-evict"
STILL = "compute only"
FSDP = "fsdp2 offload"
ABOUT = {
    PLAIN: "the fused array in memory, with hf.optim in a loop: what everybody writes",
    OURS: "resident where the budget holds the array; else in shards, loaded ahead",
    ALONE: "the same shards on a device that holds only the largest with its unit",
    BY_HAND: "the same shards by hand: copy, compute, copy back, one after the other",
    STILL: "the computing of that loop alone, with all in memory and nothing copied",
    FSDP: "torch's fully_shard with CPUOffloadPolicy, one member after the other; it knows no budget",
}


def warm(steps: int) -> int:
    """Return the number of warm-up steps among ``steps``, which are not counted.

    They prepare kernels, and for some ten steps the heap grows until it has room for every shard: a page that is
    touched for the first time can cost thirty times its copy.
    """
    return steps // 2


def steady(ends: Sequence[float]) -> float:
    """The median seconds between the ends of steps, without those that are `warm`."""
    return statistics.median(b - a for a, b in pairwise(ends[warm(len(ends)) - 1 :]))


@dataclass(frozen=True)
class StepTimes:
    """Seconds of a step that are spent computing, copying to the device, and copying back."""

    compute: float
    into: float
    out: float

    @staticmethod
    def middle(steps: Sequence[StepTimes]) -> StepTimes:
        """The medians over steps."""
        of = statistics.median
        return StepTimes(of(s.compute for s in steps), of(s.into for s in steps), of(s.out for s in steps))


@dataclass(frozen=True)
class Sample:
    """One run: seconds of a steady step, losses ``[steps, B]`` on the CPU, lanes of a steady step, bytes.

    ``peak``: bytes that the plan or the executor accounts for; ``moved``: bytes copied per step both ways; None if they
    are not counted. ``shards``: 1 is resident.
    """

    seconds: float
    losses: Tensor
    lanes: StepTimes | None = None
    peak: int | None = None
    moved: float | None = None
    shards: int | None = None


@dataclass(frozen=True)
class ShardRow:
    """One contender at one budget: medians of milliseconds per step, and bytes.

    ``speedup`` over the plain loop and ``over_limit`` (1.0: as fast as can be) are medians of the ratios within rounds.
    ``compute_ms``, ``in_ms`` and ``out_ms`` are the lanes of this very run, ``moved_bytes`` per step and member. None:
    there is no such number; ``reason`` says why there is no time.
    """

    case: str
    members: int
    budget: str
    contender: str
    ms: float | None = None
    limit_ms: float | None = None
    peak_bytes: int | None = None
    speedup: float | None = None
    over_limit: float | None = None
    compute_ms: float | None = None
    in_ms: float | None = None
    out_ms: float | None = None
    moved_bytes: float | None = None
    shards: int | None = None
    reason: str = ""
    disagrees: bool = False


def limits(samples: Mapping[tuple[str, str], Sequence[Sample]]) -> dict[str, list[float]]:
    """Return the lower bound of a step's seconds by budget, for each round, from samples by budget and contender."""
    bounds: dict[str, list[float]] = {}
    for (budget, contender), contender_samples in samples.items():
        if contender == PLAIN:
            bounds[budget] = [sample.seconds for sample in contender_samples]
        elif contender == BY_HAND:
            lanes = zip(contender_samples, samples.get((budget, STILL), ()), strict=False)
            bounds[budget] = [_least(copied.lanes, still.lanes) for copied, still in lanes]
    return bounds


def _least(copied: StepTimes | None, still: StepTimes | None) -> float:
    assert copied is not None
    assert still is not None
    return max(still.compute, copied.into, copied.out)


def filled(head: ShardRow, samples: Sequence[Sample], plain: Sequence[Sample], limit: Sequence[float]) -> ShardRow:
    """``head`` with the numbers of samples, one per round as in ``plain`` and ``limit``, which may be empty."""
    seconds = [sample.seconds for sample in samples]
    recorded_lanes = [sample.lanes for sample in samples if sample.lanes is not None]
    lanes = StepTimes.middle(recorded_lanes) if recorded_lanes else None
    last = samples[-1]
    return replace(
        head,
        ms=1e3 * statistics.median(seconds),
        limit_ms=1e3 * statistics.median(limit) if limit else None,
        peak_bytes=last.peak,
        speedup=timing.speedup([sample.seconds for sample in plain], seconds) if plain else None,
        over_limit=timing.speedup(seconds, limit) if limit else None,
        compute_ms=None if lanes is None else 1e3 * lanes.compute,
        in_ms=None if lanes is None else 1e3 * lanes.into,
        out_ms=None if lanes is None else 1e3 * lanes.out,
        moved_bytes=None if last.moved is None else last.moved / head.members,
        shards=last.shards,
    )


HEADINGS = ("shards", "ms", f"vs {PLAIN}", "compute", "in", "out", "limit", "x limit", "peak MiB", "moved MiB/member")


def table(rows: Sequence[ShardRow]) -> tuple[Table, list[str]]:
    """A row per case, budget and contender; and the footnotes."""
    footnotes = Footnotes()
    shown = Table(title="one training step of arrays that do not fit, ms", padding=(0, 0))
    for heading in ("case", "budget", "contender"):
        shown.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        shown.add_column(heading, justify="right")
    for before, row in zip([None, *rows], rows, strict=False):
        if before is not None and before.case != row.case:
            shown.add_section()
        shown.add_row(row.case, row.budget, row.contender, *_cells(row, footnotes))
    about = [f"{name}: {text}" for name, text in ABOUT.items()]
    explained = f"limit: max(compute of {STILL}, in and out of {BY_HAND}); resident: the plain loop"
    return shown, [*about, explained, *footnotes.lines()]


def _cells(row: ShardRow, footnotes: Footnotes) -> list[str | Text]:
    if row.ms is None:
        word = "WRONG" if row.disagrees else "n/a"
        mark = footnotes.mark(f"{row.contender}, {row.case}, {row.budget}: {row.reason}")
        style = "bold red" if row.disagrees else "yellow"
        return ["-", Text(word + mark, style=style), *["-"] * (len(HEADINGS) - 2)]
    mebibytes = [None if size is None else size / 2**20 for size in (row.peak_bytes, row.moved_bytes)]
    return [
        "-" if row.shards is None else str(row.shards),
        f"{row.ms:.1f}",
        "-" if row.speedup is None else factor(row.speedup),
        *(_number(value, 1) for value in (row.compute_ms, row.in_ms, row.out_ms, row.limit_ms)),
        _number(row.over_limit, 2),
        *(_number(value, 1) for value in mebibytes),
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
