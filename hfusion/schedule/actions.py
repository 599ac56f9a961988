"""Actions of a device on a shard, as data; each prints as one line of text, which parses back."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hfusion.core.errors import HFusionError


class ActionError(HFusionError):
    """Raised for a text that cannot be parsed as an action."""


class Act(StrEnum):
    """The kind of an action."""

    LOAD = "LOAD"
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD = "BACKWARD"
    STEP = "STEP"
    EVALUATE = "EVALUATE"
    EVICT = "EVICT"
    SAVE = "SAVE"

    @property
    def lane(self) -> str:
        """The lane of a device that does this action: ``in``, ``compute`` or ``out``. Lanes work concurrently."""
        return _LANES.get(self, "compute")


_LANES = {Act.LOAD: "in", Act.EVICT: "out"}


class Section(StrEnum):
    """A section of a shard's memory on a device: its state, values at its cuts, or activations saved for backward."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    BOUNDARY = "boundary"
    SAVED = "saved"


@dataclass(frozen=True, slots=True)
class Action:
    """One action on one shard, in a list whose order a single device can follow.

    It allocates ``takes`` bytes on the device when it starts and releases ``frees`` when it ends; it copies ``moves``
    bytes or computes for ``seconds``. ``sections``: loaded by a LOAD and removed by its EVICT. ``after``: indices of
    actions that must have ended; ``~k`` is the last EVICT of shard ``k`` in earlier minibatches. A LOAD may be hoisted
    over all other actions.
    """

    act: Act
    shard: int
    sections: frozenset[Section] = frozenset()
    takes: int = 0
    frees: int = 0
    moves: int = 0
    seconds: float = 0.0
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        sections = "+".join(section for section in Section if section in self.sections) or "-"
        after = ",".join(f"~{~index}" if index < 0 else str(index) for index in self.after) or "-"
        numbers = f"takes {self.takes} frees {self.frees} moves {self.moves} seconds {self.seconds!r}"
        return f"{self.act} {self.shard} {sections} {numbers} after {after}"

    @classmethod
    def parse(cls, line: str) -> Action:
        """Parse the printed form of an action. Raises ActionError."""
        try:
            act, shard, sections, *rest = line.split()
            names, (takes, frees, moves, seconds, after) = rest[::2], rest[1::2]
            if names != ["takes", "frees", "moves", "seconds", "after"]:
                raise ValueError(f"the numbers are named {names}")
            return cls(
                Act(act),
                int(shard),
                frozenset(map(Section, sections.split("+") if sections != "-" else ())),
                int(takes),
                int(frees),
                int(moves),
                float(seconds),
                tuple(map(_parse_index, after.split(","))) if after != "-" else (),
            )
        except ValueError as error:
            form = "ACT shard sections takes n frees n moves n seconds s after i,j"
            raise ActionError(f"cannot read the action {line!r} ({error}): write {form!r}") from error


def estimate(action: Action, load_rate: float, evict_rate: float) -> float:
    """Return the estimated seconds of an action. Rates are in bytes per second."""
    if action.act is Act.LOAD:
        return action.moves / load_rate
    if action.act is Act.SAVE:
        return action.moves / evict_rate
    # An eviction copies at most the bytes that it frees.
    return min(action.moves, action.frees) / evict_rate if action.act is Act.EVICT else action.seconds


def _parse_index(text: str) -> int:
    return ~int(text[1:]) if text.startswith("~") else int(text)
