"""Whether compiling a step pays, from the times of earlier compilations and steps on this machine.

What was measured is kept in the user's cache folder, a row for each program that was compiled. On a machine that has
compiled nothing yet another process compiles, and steps do not wait, unless they end before any compilation would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import torch

from hfusion.device.calibrate import describe
from hfusion.device.measured_records import RecordFile, nearest
from hfusion.device.native import cores

# Seconds that a machine's first compilation takes, with torch's headers: 11 to 17 for the benchmark's MLP, CNN and
# transformer on two cores of a Xeon.
FIRST_COMPILATION = 10.0
# Steps that are timed: eager ones, and compiled ones after the first, which touches memory that is cold.
_TIMED = 3


@dataclass(eq=False)
class StepClock:
    """Seconds of the first steps of a kind, but for the very first, which captures, and of its compilation.

    Attributes:
        behind: whether another process compiles, and no step waits for it.
        compilation: seconds until the program was there, where it was compiled for these steps.
        expected: seconds that the compilation is expected to take, with a core to itself.
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
        """Note a compilation; return whether there are enough records."""
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
    """A step that was compiled: the operators of its members' graphs, whether the array loops over members, whether
    another process compiled it, seconds until it was there, and how much faster steps became, if that was seen."""

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


def judge(left: int, eager: float, size: int, looped: bool, records: Sequence[CompileRecord], spare: bool) -> Worth:
    """Decide about a step of ``size`` operators that runs ``left`` more times, in ``eager`` seconds each.

    ``spare``: whether there is a core that steps do not use.
    """
    known = [record for record in records if record.looped is looped]
    cost = compile_seconds(size, looped, records, spare)
    seen = [record for record in known if record.speedup is not None]
    faster = median(r.speedup or 1.0 for r in nearest(seen, size)) if seen else None
    ahead = left * eager
    told = f"{left} more steps take {ahead:.2g} s eagerly, and its compilation about {cost:.2g} s"
    if faster is not None and faster <= 1.0:
        return Worth(why=f"compiled steps like it were no faster on this machine ({faster:.2f} times as fast)")
    if spare or not known:
        # Nobody waits for it, so that all that counts is whether it is there in time.
        return Worth(behind=True) if cost < ahead else Worth(why=told)
    gain = ahead * (1.0 - 1.0 / (faster if faster is not None else float("inf")))
    return Worth() if cost < gain else Worth(why=told)


def compile_seconds(size: int, looped: bool, records: Sequence[CompileRecord], behind: bool) -> float:
    """Estimate the seconds to compile a step of ``size`` operators; ``behind``: in another process."""
    known = [record for record in records if record.looped is looped]
    alike = [record for record in known if record.behind is behind] or known
    if not alike:
        return FIRST_COMPILATION
    # A larger step may take more in proportion; that a smaller one takes less is not known.
    return median(r.seconds * max(1.0, size / r.operators) for r in nearest(alike, size))


def spare_core() -> bool:
    """Return whether this process may use more cores than torch does."""
    return cores() > torch.get_num_threads()


def read_records() -> list[CompileRecord]:
    """Return the records of this machine; none if the file is unreadable or invalid."""
    return _records().read()


def add_record(record: CompileRecord) -> None:
    """Keep a row more, if the folder takes it."""
    _records().add(record)


def _records() -> RecordFile[CompileRecord]:
    return RecordFile(CompileRecord, "compiling", describe(torch.device("cpu")))
