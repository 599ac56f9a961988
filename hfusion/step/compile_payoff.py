"""Decide whether compiling a step pays, from the times of earlier compilations and steps on this machine.

The user's cache folder keeps one record for each program that was compiled. Without records of similar
steps, or with a spare core, steps are compiled in the background if that would end before the remaining steps do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, nearest
from hfusion.device.native import cores

# Estimated seconds of the first compilation on a machine, which includes torch's headers. It took 11 to 17 s for the
# benchmark's MLP, CNN and transformer on two cores of a Xeon.
FIRST_COMPILATION = 10.0
# How many eager steps are timed, and how many compiled steps after the first, which runs with cold memory.
_TIMED = 3


@dataclass(eq=False)
class StepClock:
    """Times of the first steps of a kind and of its compilation. The very first step, which captures, is not timed.

    Attributes:
        behind: whether another process compiles, and no step waits for it.
        compilation: seconds until the program was ready; None if it was not compiled for these steps.
        expected: estimated seconds of the compilation if it has a core of its own.
    """

    eager: list[float] = field(default_factory=list)
    compiled: list[float] = field(default_factory=list)
    behind: bool = False
    compilation: float | None = None
    expected: float | None = None

    def note_eager(self, seconds: float) -> None:
        if len(self.eager) < _TIMED:
            self.eager.append(seconds)

    def note_compiled(self, seconds: float) -> bool:
        """Note the seconds of a compiled step. Return True once, when enough steps were timed."""
        if len(self.compiled) <= _TIMED:
            self.compiled.append(seconds)
            return len(self.compiled) > _TIMED
        return False

    @property
    def speedup(self) -> float | None:
        """Speed-up of a compiled step, if both were timed."""
        if not self.eager or len(self.compiled) <= _TIMED:
            return None
        return median(self.eager) / median(self.compiled[1:])


@dataclass(frozen=True)
class CompileRecord:
    """A step that was compiled.

    Attributes:
        operators: number of graph nodes of a member's forward and loss.
        looped: whether the array loops over members.
        behind: whether another process compiled it.
        seconds: seconds until the program was ready.
        speedup: eager seconds per step divided by compiled ones, if both were measured.
    """

    operators: int
    looped: bool
    behind: bool
    seconds: float
    speedup: float | None = None


@dataclass(frozen=True)
class Worth:
    """The decision to compile, and whether in another process; ``why``: the reason if it does not pay."""

    behind: bool = False
    why: str = ""


def judge(
    remaining: int, eager: float, size: int, looped: bool, records: Sequence[CompileRecord], spare: bool
) -> Worth:
    """Decide whether to compile a step of ``size`` operators for its ``remaining`` runs, of ``eager`` seconds each.

    ``spare``: whether there is a core that torch does not use.
    """
    similar = [record for record in records if record.looped is looped]
    cost = compile_seconds(size, looped, records, spare)
    measured = [record for record in similar if record.speedup is not None]
    speedup = median(r.speedup or 1.0 for r in nearest(measured, size)) if measured else None
    eager_seconds = remaining * eager
    reason = f"{remaining} more steps take {eager_seconds:.2g} s eagerly, and its compilation about {cost:.2g} s"
    if speedup is not None and speedup <= 1.0:
        return Worth(why=f"compiled steps like it were no faster on this machine ({speedup:.2f} times as fast)")
    if spare or not similar:
        # No step waits for the program, so it only has to be ready before the last step.
        return Worth(behind=True) if cost < eager_seconds else Worth(why=reason)
    gain = eager_seconds * (1.0 - 1.0 / (speedup if speedup is not None else float("inf")))
    return Worth() if cost < gain else Worth(why=reason)


def compile_seconds(size: int, looped: bool, records: Sequence[CompileRecord], behind: bool) -> float:
    """Estimate the seconds to compile a step of ``size`` operators; ``behind``: in another process."""
    similar = [record for record in records if record.looped is looped]
    comparable = [record for record in similar if record.behind is behind] or similar
    if not comparable:
        return FIRST_COMPILATION
    # Scale up for larger steps, but not down for smaller ones, which may take as long.
    return median(r.seconds * max(1.0, size / r.operators) for r in nearest(comparable, size))


def spare_core() -> bool:
    """Return whether this process may use more cores than torch does."""
    return cores() > torch.get_num_threads()


def read_records() -> list[CompileRecord]:
    """Return the records of this machine; none if the file is unreadable or invalid."""
    return _records().read()


def add_record(record: CompileRecord) -> None:
    """Store one more record, if the cache folder can be written."""
    _records().add(record)


def _records() -> RecordFile[CompileRecord]:
    return RecordFile(CompileRecord, "compiling", describe(torch.device("cpu")))
