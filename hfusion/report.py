"""What a fused module tells of itself: which operators run how, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from hfusion.program import Program


@dataclass(frozen=True)
class Part:
    """One program: ``rows`` are (operator, layout, how, count); ``copies`` the transitions that copy."""

    title: str
    rows: tuple[tuple[str, str, str, int], ...]
    copies: int
    check: str
    program: Program

    def __str__(self) -> str:
        widths = [max([len(str(row[k])) for row in self.rows] or [0]) for k in range(3)]
        lines = [
            f"  {n:4d} x {op:<{widths[0]}}  {layout:<{widths[1]}}  {how}".rstrip() for op, layout, how, n in self.rows
        ]
        return "\n".join([self.title, *lines, f"  {self.copies} copies between layouts; {self.check}"])


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
    copies = 0
    for node in program.module.graph.nodes:
        if node.op != "call_function":
            continue
        if node.meta.get("transition"):
            copies += node.meta["how"] == "copy"
        elif "origin" in node.meta:
            operator = str(node.meta["origin"].target).removeprefix("aten.")
            counted[operator, node.meta["layout"].value, node.meta["how"]] += 1
    mode = "train" if program.training else "eval"
    rows = tuple((*key, count) for key, count in sorted(counted.items()))
    return Part(f"{program.name}  B={program.members}  {mode}", rows, copies, check, program)
