"""Compare a compiled step with an eager one, once per processor.

The two differ in the last bits, so the comparison is kept in the user's cache folder and is final for later processes.
The steps that are timed leave the array unchanged.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor

from hfusion.compiler.bound_program import Location
from hfusion.device.backend import random_states_kept
from hfusion.device.cache import cache_folder, lasts, number, read_sealed, write_sealed_once
from hfusion.step.compile_request import CompileRequest
from hfusion.step.program_cache import circumstances, keeping
from hfusion.step.step_graph import StepCall

Run: TypeAlias = Callable[[StepCall], Tensor]
"""Writes the gradients and buffers of a step, and returns the losses ``[B]``."""

# Ratios of times closer to 1 than this may be noise.
_CLOSE = 1.03
# Compiled and eager steps take turns: each runs up to _TURNS steps in a row, _ROWS times. The first step of a row warms
# up and does not count; a row of long steps has a single step that counts.
_TURNS, _ROWS, _LONG = 5, 2, 0.5
# The largest ratio of median to minimum of a steady measurement; on a busy machine it is several times as large.
_STEADY = 1.5
_PLAUSIBLE = (1e-9, 1e6)


@dataclass(frozen=True)
class StepTimes:
    """Seconds per step."""

    compiled: float
    eager: float

    @property
    def eager_wins(self) -> bool:
        """True if eager steps are clearly faster than compiled ones."""
        return self.compiled > _CLOSE * self.eager

    def __str__(self) -> str:
        return f"measured: compiled {1e3 * self.compiled:.3g} ms, eager {1e3 * self.eager:.3g} ms"


def compare(
    compiled: Run,
    eager: Run,
    call: StepCall,
    places: Sequence[Location],
    compile_request: CompileRequest | None,
    threads: int,
) -> StepTimes | None:
    """Time both, and keep the times; of several processes that do so, the first decides. None if times are unsteady.

    Args:
        places: where the tensors are that a step writes, which are restored.
        compile_request: what identifies the step on disk; None if it has none.
        threads: how many blocks of the compiled step run in parallel.
    """
    times = _measure(compiled, eager, call, places)
    if compile_request is None or not _keeps():
        return times
    if times is None:
        return find_times(compile_request, threads)
    try:
        content = json.dumps(asdict(times)).encode()
        first = write_sealed_once(_path(compile_request, threads), content)
    except OSError:
        return times
    return times if first else find_times(compile_request, threads)


def find_times(compile_request: CompileRequest | None, threads: int) -> StepTimes | None:
    """Return the times of an earlier comparison of a step on this processor; None if there are none."""
    if compile_request is None or not _keeps():
        return None
    try:
        kept = json.loads(read_sealed(_path(compile_request, threads)))
        return StepTimes(*(number(kept[name], *_PLAUSIBLE) for name in ("compiled", "eager")))
    except (OSError, LookupError, ValueError, TypeError, AttributeError):
        return None


def _measure(compiled: Run, eager: Run, call: StepCall, places: Sequence[Location]) -> StepTimes | None:
    """Time both. The result is the minimum, not the median: it must not depend on other load meanwhile."""
    tensors = list({id(holder[name]): holder[name] for holder, name in places}.values())
    values = [(tensor.detach().clone(), tensor.grad) for tensor in tensors]
    durations: dict[Run, list[float]] = {compiled: [], eager: []}
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.callback(_put_back, tensors, values)
        for _ in range(_ROWS):
            for run, seconds in durations.items():
                seconds += _row(run, call)
    if any(median(seconds) > _STEADY * min(seconds) for seconds in durations.values()):
        return None
    return StepTimes(*(min(seconds) for seconds in durations.values()))


def _put_back(tensors: Sequence[Tensor], values: Sequence[tuple[Tensor, Tensor | None]]) -> None:
    for tensor, (value, grad) in zip(tensors, values, strict=True):
        tensor.detach().copy_(value)
        tensor.grad = grad


def _row(run: Run, call: StepCall) -> list[float]:
    durations: list[float] = []
    while len(durations) < _TURNS and (len(durations) < 2 or sum(durations) < _LONG):
        start = time.perf_counter()
        run(call)
        durations.append(time.perf_counter() - start)
    return durations[1:]


def _keeps() -> bool:
    """Return whether times are kept for later processes."""
    return keeping() and lasts()


def _path(compile_request: CompileRequest, threads: int) -> Path:
    """Return the cache file; ``threads``: blocks that run in parallel. The request holds the threads of each block."""
    description = json.dumps([compile_request.key(circumstances()), threads])
    return cache_folder() / f"step-{hashlib.sha256(description.encode()).hexdigest()[:32]}-eager.json"
