"""Results of the sub-benchmark ``fuse``: cells, comparisons and their rows; and the JSON output of all of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hfusion.bench import timing

BASELINE = "serial"
OURS = ("hfusion", "hfusion-compiled")
# Variants of hfusion that are no default, so that they are not compared with others.
BESIDE = ("hfusion-one-part", "hfusion-tuned", "hfusion-blocks", "hfusion-blocks-compiled")


@dataclass(frozen=True)
class Cell:
    """One contender on one workload: seconds per step in every round, or the reason why there are none."""

    contender: str
    seconds: tuple[float, ...] = ()
    cores: int = 1
    note: str = ""
    reason: str = ""
    disagrees: bool = False


@dataclass(frozen=True)
class FuseRow:
    """A cell as a row of the JSON file.

    ``ms`` is the median wall time of a step of all members; ``speedup`` over the serial loop and ``spread``
    (quartile distance over median) have no unit; ``cores`` counts the cores kept busy. Without a time,
    ``reason`` says why.
    """

    model: str
    members: int
    contender: str
    ms: float | None
    speedup: float | None
    spread: float | None
    cores: int
    note: str
    reason: str


@dataclass(frozen=True)
class ModelResult:
    """The results of all contenders on one model and one number of members."""

    model: str
    members: int
    threads: int
    cells: tuple[Cell, ...]

    def cell(self, contender: str) -> Cell | None:
        """Return the cell of ``contender``, None if it was not selected."""
        return next((cell for cell in self.cells if cell.contender == contender), None)

    def speedup(self, cell: Cell) -> float | None:
        """Wall time over the serial loop's; None if one of them was not timed."""
        baseline = self.cell(BASELINE)
        if baseline is None or not baseline.seconds or not cell.seconds:
            return None
        return timing.speedup(baseline.seconds, cell.seconds)

    def oversubscription(self, cell: Cell) -> float:
        """Return the ratio of the cores that this contender used to those of the others."""
        return max(1.0, cell.cores / self.threads)

    def versus_best(self) -> tuple[str, float] | None:
        """The fastest other contender per core, and the faster hfusion's speed-up over it; None if one is not timed."""
        timed = [cell for cell in self.cells if cell.seconds]
        others = [cell for cell in timed if cell.contender not in (*OURS, *BESIDE)]
        ratios = [
            min(((cell.contender, self._per_core(cell, fused)) for cell in others), key=lambda item: item[1])
            for fused in timed
            if fused.contender in OURS and others
        ]
        return max(ratios, key=lambda item: item[1], default=None)

    def _per_core(self, cell: Cell, fused: Cell) -> float:
        return timing.speedup(cell.seconds, fused.seconds) * self.oversubscription(cell)

    def rows(self) -> list[FuseRow]:
        return [self._row(cell) for cell in self.cells]

    def _row(self, cell: Cell) -> FuseRow:
        seconds = cell.seconds
        return FuseRow(
            self.model,
            self.members,
            cell.contender,
            ms=1e3 * statistics.median(seconds) if seconds else None,
            speedup=self.speedup(cell),
            spread=timing.spread(seconds) if seconds else None,
            cores=cell.cores,
            note=cell.note,
            reason=cell.reason,
        )


def kept_rows(path: Path) -> list[FuseRow]:
    """Read the rows of a JSON file of an earlier run.

    Raises ValueError with the fault of the file.
    """
    try:
        return [FuseRow(**row) for row in json.loads(path.read_text())["rows"]]
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} holds no rows of fuse: give a file that its --json wrote") from error


def rows_of(comparisons: Sequence[ModelResult]) -> list[FuseRow]:
    """The rows of all comparisons, in their order."""
    return [row for comparison in comparisons for row in comparison.rows()]


def write_json(path: Path, machine: Mapping[str, str | int | float], rows: Sequence[Any], kind: str = "rows") -> None:
    """Write ``{"machine": ..., kind: rows}``; the rows are dataclasses."""
    path.write_text(json.dumps({"machine": machine, kind: [asdict(row) for row in rows]}, indent=1) + "\n")
