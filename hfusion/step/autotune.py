"""Measured choice between several programs of one step; results are cached for this machine.

The programs may differ in the last bits, since they group members into blocks differently. The first choice is
therefore final for all later processes, and the timed steps leave the array unchanged.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from hfusion.compiler.bound_program import Location
from hfusion.device.backend import random_states_kept
from hfusion.device.cache import cache_folder, lasts, number, read_sealed, write_sealed_once
from hfusion.device.team import Team
from hfusion.step.compile_request import CompileRequest
from hfusion.step.compiled_step import StepProgram
from hfusion.step.program_cache import circumstances, keeping
from hfusion.step.step_graph import StepCall

ONE_PART, PARTS = "in one part", "in parts"
COMPILED, EAGER = "compiled", "eager"
# Ratios of times closer to 1 than this may be noise.
_CLOSE = 1.03

# Programs take turns: each runs up to TURNS steps in a row, ROWS times. The first step of a row warms up and does not
# count. A row of long steps has a single step that counts; there are then _ROWS_IF_CLOSE rows if the times are close,
# and one row otherwise.
TURNS = 5
ROWS = 2
_LONG = 0.5
_ROWS_IF_CLOSE = 3
# A program that takes longer than the fastest by this factor is clearly slower.
FAR = 1.5
# The largest ratio of median to minimum of a steady measurement; on a busy machine it is several times as large.
_STEADY = 1.5
_PLAUSIBLE = (1e-9, 1e6)


@dataclass(frozen=True)
class VariantTimes:
    """Seconds per step of each program, by the name of the program."""

    seconds: Mapping[str, float]

    @property
    def fastest(self) -> str:
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def eager_wins(self) -> bool:
        """True if eager steps are clearly faster than compiled ones."""
        return self.seconds[COMPILED] > _CLOSE * self.seconds[EAGER]

    def __str__(self) -> str:
        ordered = sorted(self.seconds, key=lambda name: self.seconds[name])
        return ", ".join(f"{name} {1e3 * self.seconds[name]:.3g} ms" for name in ordered)


@dataclass(frozen=True, eq=False)
class NotedProgram:
    """``program`` with a note that its description ends with."""

    program: StepProgram
    note: str

    @property
    def team(self) -> Team | None:
        """The threads that the program runs on, besides torch's."""
        return self.program.team

    @property
    def how(self) -> str:
        """The description of the program, followed by the note."""
        return f"{self.program.how}, {self.note}"

    def fits(self, call: StepCall) -> bool:
        return self.program.fits(call)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""
        return self.program.step(call)


def measure(programs: Mapping[str, StepProgram], call: StepCall, places: Sequence[Location]) -> VariantTimes | None:
    """Time steps of each program, and restore the tensors at ``places`` afterwards. Return None if times are unsteady.

    The result is the minimum, not the median: it is cached, and must not depend on other load during the measurement.
    """
    tensors = list({id(holder[name]): holder[name] for holder, name in places}.values())
    values = [(tensor.detach().clone(), tensor.grad) for tensor in tensors]
    durations: dict[str, list[float]] = {candidate: [] for candidate in programs}
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(_put_back, tensors, values)
        for row in range(_ROWS_IF_CLOSE):
            if row and row >= _rows([min(seconds) for seconds in durations.values()]):
                break
            for candidate, program in programs.items():
                durations[candidate] += _row(program, call)
    if any(median(seconds) > _STEADY * min(seconds) for seconds in durations.values()):
        return None
    return VariantTimes({candidate: min(seconds) for candidate, seconds in durations.items()})


def _rows(shortest: Sequence[float]) -> int:
    """Return how many rows of each program are timed, from the shortest step of each so far."""
    if max(shortest) <= _LONG / TURNS:
        return ROWS
    return _ROWS_IF_CLOSE if max(shortest) < FAR * min(shortest) else 1


def _put_back(tensors: Sequence[Tensor], values: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    for tensor, (value, grad) in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)
        tensor.grad = grad


def _row(program: StepProgram, call: StepCall) -> list[float]:
    durations: list[float] = []
    while len(durations) < TURNS and (len(durations) < 2 or sum(durations) < _LONG):
        start = time.perf_counter()
        program.step(call)
        durations.append(time.perf_counter() - start)
    return durations[1:]


def keeps_times() -> bool:
    """Return whether measured times are kept for later processes."""
    return keeping() and lasts()


def find_times(compile_request: CompileRequest, threads: int, names: tuple[str, str]) -> VariantTimes | None:
    """Return earlier measurements of a step that may run in parts on several threads, by its request."""
    try:
        seconds: Mapping[str, Any] = json.loads(read_sealed(_path(compile_request, threads, names)))["seconds"]
        return VariantTimes({name: number(seconds[name], *_PLAUSIBLE) for name in names})
    except (OSError, LookupError, ValueError, TypeError, AttributeError):
        return None


def keep_times(
    compile_request: CompileRequest, times: VariantTimes | None, threads: int, names: tuple[str, str]
) -> VariantTimes | None:
    """Cache ``times``. Return the cached times, which another process may have stored first; None if there are none."""
    if times is None:
        return find_times(compile_request, threads, names)
    content = json.dumps({"seconds": dict(times.seconds)}).encode()
    try:
        return (
            times
            if write_sealed_once(_path(compile_request, threads, names), content)
            else find_times(compile_request, threads, names)
        )
    except OSError:
        return None


def _path(compile_request: CompileRequest, threads: int, names: tuple[str, str]) -> Path:
    """Return the cache file; ``threads``: blocks that run in parallel. The order holds the threads of each block."""
    description = json.dumps([compile_request.key(circumstances()), threads])
    name = "choice" if names == (ONE_PART, PARTS) else "eager"
    return cache_folder() / f"step-{hashlib.sha256(description.encode()).hexdigest()[:32]}-{name}.json"
