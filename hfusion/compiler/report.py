"""What a fused module tells of itself: which operators run how, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from hfusion.core.program import Program

# Characters of a column of a report; the rare longer cell, as a reason in words, pushes its row to the right.
WIDEST = 40


@dataclass
class Cost:
    """What some alike operators cost: seconds estimated, seconds measured, and those of the lowerings that lost."""

    estimate: float = 0.0
    measured: float | None = None
    lost: dict[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        if self.measured is None:
            return f"~{seconds(self.estimate)}" if self.estimate else ""
        text = f"~{seconds(self.estimate)}"
        text += f", measured {seconds(self.measured)}"
        return text + "".join(f"; {how} {seconds(value)}" for how, value in self.lost.items())


@dataclass(frozen=True)
class Part:
    """One program: ``rows`` are (operator, layout, how, count); ``copies`` the transitions that copy.

    ``costs``: per row, what these operators cost together, forward and backward.
    """

    title: str
    rows: tuple[tuple[str, str, str, int], ...]
    copies: int
    check: str
    program: Program
    costs: tuple[Cost, ...]

    def __str__(self) -> str:
        cells = [(op, layout, how, str(cost)) for (op, layout, how, _), cost in zip(self.rows, self.costs, strict=True)]
        widths = [max([len(row[k]) for row in cells if len(row[k]) <= WIDEST] or [0]) for k in range(3)]
        lines = [
            f"  {row[3]:4d} x "
            + "  ".join([f"{cell:<{w}}" for cell, w in zip(line[:3], widths, strict=True)] + [line[3]])
            for row, line in zip(self.rows, cells, strict=True)
        ]
        return "\n".join([self.title, *map(str.rstrip, lines), f"  {self.copies} copies between layouts; {self.check}"])


@dataclass(frozen=True)
class Report:
    """``str(report)`` is for people, ``report.parts`` for programs; ``print(part.program)`` shows every node.

    ``loops`` says what was not captured and runs in a loop over members.
    """

    parts: tuple[Part, ...]
    loops: tuple[str, ...] = ()

    def __str__(self) -> str:
        if not self.parts and not self.loops:
            return "nothing captured yet: capture happens at the first call"
        return "\n".join([*map(str, self.parts), *self.loops])


def describe(program: Program, check: str) -> Part:
    """Count what ``program`` does."""
    counted: Counter[tuple[str, str, str]] = Counter()
    choices: defaultdict[tuple[str, str, str], list[Any]] = defaultdict(list)
    for node in program.module.graph.nodes:
        if node.op == "call_function" and "origin" in node.meta and not node.meta.get("transition"):
            key = (operator_name(node.meta["origin"]), node.meta["layout"].value, node.meta["how"])
            counted[key] += 1
            choices[key] += [node.meta["choice"]] if "choice" in node.meta else []
    mode = "train" if program.training else "eval"
    rows = tuple((*key, count) for key, count in sorted(counted.items()))
    costs = tuple(_cost(choices[key]) for key in sorted(counted))
    return Part(f"{program.name}  B={program.members}  {mode}", rows, program.copies, check, program, costs)


def operator_name(origin: fx.Node) -> str:
    """Such as ``conv2d.default``."""
    return str(origin.target).removeprefix("aten.")


def _cost(choices: Sequence[Any]) -> Cost:
    """The sums over operators that run alike; of lowerings that lost, over those for which they were a candidate."""
    total = Cost()
    for choice in choices:
        total.estimate += choice.price.estimate
        if choice.price.measured is not None:
            total.measured = (total.measured or 0.0) + choice.price.measured
        for how, price in choice.lost:
            if price.measured is not None:
                total.lost[how] = total.lost.get(how, 0.0) + price.measured
    return total


def seconds(value: float) -> str:
    """Such as ``31us``, ``2.5ms``, ``1.2s``."""
    if value < 1e-3:
        return f"{value * 1e6:.0f}us"
    return f"{value * 1e3:.1f}ms" if value < 1 else f"{value:.1f}s"
