"""The report of a fused module: how its operators run, and why."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from torch import fx

from hfusion.core.program import Program
from hfusion.core.text import folded, html_table, paragraph
from hfusion.ops.lowering import Lowering

# Largest width of a column in characters; a longer cell pushes the rest of its row to the right.
WIDEST = 40


@dataclass(frozen=True)
class Row:
    """``count`` operators of one name that run in the same way; ``cost``: their estimated seconds with backward."""

    operator: str
    lowering: Lowering
    count: int
    cost: float

    @property
    def cells(self) -> tuple[str, str, str, str]:
        return (
            self.operator,
            self.lowering.layout.value,
            str(self.lowering),
            f"~{seconds(self.cost)}" if self.cost else "",
        )


@dataclass(frozen=True)
class ProgramReport:
    """One program: ``rows`` say which operators run how; ``copies`` are the transitions that copy."""

    title: str
    rows: tuple[Row, ...]
    copies: int
    check: str
    program: Program

    def __str__(self) -> str:
        cells = [row.cells for row in self.rows]
        widths = [max([len(row[k]) for row in cells if len(row[k]) <= WIDEST] or [0]) for k in range(3)]
        lines = [
            f"  {row.count:4d} x "
            + "  ".join([f"{cell:<{w}}" for cell, w in zip(line[:3], widths, strict=True)] + [line[3]])
            for row, line in zip(self.rows, cells, strict=True)
        ]
        return "\n".join([self.title, *map(str.rstrip, lines), f"  {self.copies} copies between layouts; {self.check}"])


@dataclass(frozen=True, repr=False)
class FusionReport:
    """A report on the programs of a fused module: ``str(report)`` to read, ``report.parts`` as data.

    ``print(part.program)`` shows every node.

    ``loops`` lists the code that was not captured and runs in a loop over members; ``sizes`` how batches of different
    sizes run.
    """

    parts: tuple[ProgramReport, ...]
    loops: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.parts and not self.loops:
            return "nothing captured yet: capture happens at the first call"
        return "\n".join([*map(str, self.parts), *self.loops, *self.sizes])

    def __repr__(self) -> str:
        eager = sum(row.count for part in self.parts for row in part.rows if "opaque" in row.operator) + len(self.loops)
        return f"<FusionReport: programs {len(self.parts)}, member by member {eager}; print() shows the operators>"

    def _repr_html_(self) -> str:
        if not self.parts and not self.loops:
            return paragraph(str(self))
        programs = [_program_html(part, is_open=len(self.parts) == 1) for part in self.parts]
        return "".join([*programs, *map(paragraph, (*self.loops, *self.sizes))])


def _program_html(part: ProgramReport, is_open: bool) -> str:
    rows = ((row.count, *row.cells) for row in part.rows)
    operators = html_table(("count", "operator", "layout", "runs as", "cost"), rows, len(part.rows))
    body = operators + paragraph(f"{part.copies} copies between layouts; {part.check}")
    return folded(part.title, body, is_open)


def describe(program: Program, check: str) -> ProgramReport:
    """Count the operators of ``program`` by the way they run."""
    alike: defaultdict[tuple[str, Lowering], list[fx.Node]] = defaultdict(list)
    for node in program.module.graph.nodes:
        if node.op == "call_function" and "origin" in node.meta and not node.meta.get("transition"):
            alike[str(node.meta["origin"].target).removeprefix("aten."), node.meta["lowering"]].append(node)
    rows = [
        Row(operator, lowering, len(nodes), math.fsum(n.meta["choice"].price for n in nodes if "choice" in n.meta))
        for (operator, lowering), nodes in alike.items()
    ]
    mode = "train" if program.training else "eval"
    title = f"{program.name}  B={program.members}  {mode}"
    return ProgramReport(title, tuple(sorted(rows, key=lambda row: row.cells)), program.copies, check, program)


def seconds(value: float) -> str:
    """Format a time, such as ``31us``, ``2.5ms``, ``1.2s``."""
    if value < 1e-3:
        return f"{value * 1e6:.0f}us"
    return f"{value * 1e3:.1f}ms" if value < 1 else f"{value:.1f}s"
