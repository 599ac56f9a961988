"""Findings of the sweep for one operator and one pattern of shared and stacked arguments."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Verdict(enum.IntEnum):
    """From good to bad: of several samples the worst counts."""

    NONE = 0
    RIGHT = 1
    LOOPED = 2
    REFUSED = 3
    ERROR = 4
    WRONG = 5


@dataclass(frozen=True)
class Pattern:
    """How many members, and which of the tensor arguments are stacked."""

    members: int
    stacked: tuple[bool, ...]

    def __str__(self) -> str:
        return f"B={self.members} {self.label}"

    @property
    def label(self) -> str:
        if not any(self.stacked):
            return "all shared"
        if all(self.stacked):
            return "all stacked"
        return f"argument {self.stacked.index(True)} stacked"


@dataclass(frozen=True)
class Finding:
    """One trial: the verdict, and the reason where it is not right; ``group`` is the kind of call."""

    operator: str
    group: str
    pattern: Pattern
    verdict: Verdict
    reason: str = ""
    sample: str = ""


# Arguments that are stacked alone, at most.
MAX_ALONE = 4


def patterns(tensors: int, members: tuple[int, ...]) -> list[Pattern]:
    """All shared, each one stacked alone, all stacked."""
    rows = [(False,) * tensors, (True,) * tensors]
    rows += [tuple(k == alone for k in range(tensors)) for alone in range(min(tensors, MAX_ALONE))]
    return [Pattern(b, row) for b in members for row in dict.fromkeys(rows)]
