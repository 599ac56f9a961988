"""Compare the speed of eager and compiled steps of an array."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.compiler.bound_program import Location
from hfusion.step.autotune import (
    COMPILED,
    EAGER,
    NotedProgram,
    VariantTimes,
    find_times,
    keep_times,
    keeps_times,
    measure,
)
from hfusion.step.compile_limits import SlowerThanEager
from hfusion.step.compile_payoff import CompileRecord, add_record
from hfusion.step.compile_request import CompileRequest
from hfusion.step.compiled_step import StepProgram
from hfusion.step.eager_step import EagerStep
from hfusion.step.parallel_blocks import ParallelBlocksStep
from hfusion.step.step_graph import StepCall
from hfusion.step.step_signatures import StepVariant, hooked

_CANDIDATES = (COMPILED, EAGER)


@dataclass(frozen=True, eq=False)
class EagerProgram:
    """An eager step with the interface of a compiled one.

    Attributes:
        autocast: the autocast that it runs in, as returned by `hfusion.device.backend.active_autocast`.
        seeds, size: the arguments of `EagerStep.run`.
    """

    fused: FusedModule
    eager: EagerStep
    autocast: Any
    seeds: bool
    size: int | None
    team = None
    how = "eager"

    def fits(self, call: StepCall) -> bool:
        return True

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""
        args, kwargs = call.inputs.args_and_kwargs()
        ((target,), _) = call.target.args_and_kwargs()
        self.fused.zero_grad()
        with ExitStack() as stack:
            for kind, dtype in self.autocast or ():
                stack.enter_context(torch.autocast(kind, dtype))
            return self.eager.run(args, kwargs, target, self.size, self.seeds)[0]


def known_times(compile_request: CompileRequest | None, threads: int) -> VariantTimes | None:
    """Return the cached times of compiled and eager steps on this processor; None if there are none."""
    if compile_request is None or not keeps_times():
        return None
    return find_times(compile_request, threads, _CANDIDATES)


def not_slower_than_eager(
    variant: StepVariant,
    call: StepCall,
    compile_request: CompileRequest | None,
    program: StepProgram,
    eager: Callable[[Any], EagerProgram],
) -> StepProgram:
    """Return ``program``, with the times of compiled and eager steps in its description if they are known.

    They are measured once per processor, without side effects, and cached. Raises SlowerThanEager if eager steps are
    clearly faster.
    """
    assert variant.partition is not None
    times = known_times(compile_request, variant.partition.threads)
    rival = eager(variant.situation)
    # Steps that only measure must not run the user's hooks.
    if times is None and not hooked(rival.fused):
        times = _measured(variant, call, compile_request, program, rival)
    if times is None:
        return program
    check_faster(times)
    return NotedProgram(program, f"measured: {times}")


def check_faster(times: VariantTimes) -> None:
    """Raise SlowerThanEager if eager steps are clearly faster than compiled ones."""
    if times.eager_wins:
        raise SlowerThanEager(f"eager steps are faster on this machine: {times}")


def _on_threads(program: StepProgram) -> StepProgram:
    """Return ``program`` without the trial of its first steps, in half of which blocks run sequentially."""
    if isinstance(program, NotedProgram):
        return _on_threads(program.program)
    return program.on_threads() if isinstance(program, ParallelBlocksStep) else program


def _measured(
    variant: StepVariant,
    call: StepCall,
    compile_request: CompileRequest | None,
    program: StepProgram,
    eager: EagerProgram,
) -> VariantTimes | None:
    assert variant.partition is not None
    modules = eager.fused.modules()
    buffers: list[Location] = [(m._buffers, name) for m in modules for name, b in m._buffers.items() if b is not None]
    times = measure({COMPILED: _on_threads(program), EAGER: eager}, call, [*variant.tensor_refs, *buffers])
    if times is not None and times.eager_wins and variant.clock.compilation is not None:
        speedup = times.seconds[EAGER] / times.seconds[COMPILED]
        add_record(CompileRecord(*variant.extent, variant.clock.behind, variant.clock.compilation, speedup))
    if compile_request is None or not keeps_times():
        return times
    return keep_times(compile_request, times, variant.partition.threads, _CANDIDATES)
