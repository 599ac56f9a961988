"""Find or compile the programs of a step: in this process, or in another one while steps run eagerly.

On a CPU, ``compile=None`` compares a compiled step with an eager one, once per processor. The two differ in the last
bits, so the comparison is kept in the user's cache folder and is final for later processes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.compiler.compiled_program import Location
from hfusion.core.exclusive import compiling, tracing
from hfusion.core.stages import BrokenProgram
from hfusion.device.backend import random_states_kept
from hfusion.device.cache import cache_folder
from hfusion.step import program_cache
from hfusion.step.compile_mode import Compile
from hfusion.step.compile_request import CompileRequest, write_request
from hfusion.step.compile_worker import BackgroundJob, error_text
from hfusion.step.compiled_step import StepBlocks, StepProgram, Unprofitable, compile_program
from hfusion.step.parallel_blocks import BlockPartition
from hfusion.step.program_cache import BlockProgram, NoProgram, StepTimes
from hfusion.step.step_graph import ProgramMismatch, StepCall, StepSource
from hfusion.step.step_signatures import Compiling, Eager, InUse, Refused, StepVariant, hooked
from hfusion.torch_private.cpp_entry import CannotPartition

# Compiled programs that are worth their time; a step that would need more runs eagerly from there on.
MAX_PROGRAMS = 16
# Seconds that eager steps of a kind have taken before ``compile=None`` compiles it.
PATIENCE = 2.0


class ProgramMaker:
    """Finds or compiles the programs of a step.

    Args:
        compile, parts: the arguments of `hfusion.train_step`.
        variants_by_kind: the variants of the step.
        fused: the array.
        by_autograd: writes gradients and buffers of a step in a situation eagerly, and returns the losses.
    """

    def __init__(
        self,
        compile: Compile,
        parts: int | str,
        variants_by_kind: Mapping[Any, list[StepVariant]],
        fused: FusedModule,
        by_autograd: Callable[[Any, StepCall], Tensor],
    ) -> None:
        self.compile, self.parts = compile, parts
        # How many programs were compiled for this step.
        self.count = 0
        # The programs of this step by their requests, for arrays with other numbers of members, too.
        self._programs: dict[str, BlockProgram | NoProgram] = {}
        self._variants_by_kind = variants_by_kind
        self._fused, self._by_autograd = fused, by_autograd

    def prepare(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any) -> None:
        """Advance ``variant`` before a step: find, request, compile or take its program, or note why there is none.

        ``size``: members that one call of the program computes; None for all. Raises ProgramMismatch if the captured
        programs do not hold for the sizes of ``call``.
        """
        if self._take_fitting(variant, call):
            return
        if isinstance(variant.state, Compiling):
            if self.compile or variant.state.job.ready():
                self._take(variant, variant.state, size, autocast)
            return
        # A program that was compiled before costs nothing, so it is looked for at once.
        due = self.compile or variant.seconds >= PATIENCE
        if (due or not variant.seconds) and not any(
            isinstance(other.state, Compiling) for other in self._like(variant)
        ):
            self._make(variant, call, size, autocast, find_only=not due)

    def _variants(self) -> Iterator[StepVariant]:
        return (variant for variants in self._variants_by_kind.values() for variant in variants)

    def _like(self, variant: StepVariant) -> Iterator[StepVariant]:
        """Yield the variants whose program may serve ``variant``, except for the number of samples."""
        return (other for other in self._variants() if other is not variant and other.like(variant))

    def programs(self) -> list[StepProgram]:
        return list(dict.fromkeys(variant.program for variant in self._variants() if variant.program is not None))

    def release(self) -> None:
        """Let all variants drop their references to tensors until their next step."""
        for variant in self._variants():
            variant.release()

    def close(self) -> None:
        """End the processes that compile. Later steps request the programs again if they need them."""
        for variant in self._variants():
            variant.cancel()

    def _take_fitting(self, variant: StepVariant, call: StepCall) -> bool:
        """Reuse a program of calls that differ only in the number of samples, if it is valid for this number."""
        for other in self._like(variant):
            if other.program is not None and other.program.fits(call):
                variant.cancel()
                variant.state, variant.note = InUse(other.program), other.note
                return True
        return False

    def _take(self, variant: StepVariant, pending: Compiling, size: int | None, autocast: Any) -> None:
        """Use the program that another process has compiled for ``variant``."""
        variant.state, partition = Eager(), variant.partition
        why = pending.job.result()
        if not why:
            self._make(variant, pending.call, size, autocast, find_only=True)
            why = "the compiled program cannot be read"
        # With another partition, the next call requests other programs.
        if isinstance(variant.state, Eager) and variant.partition is partition:
            variant.state = Refused(f"its compilation in the background failed: {why}")

    def _make(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any, *, find_only: bool) -> None:
        """Find or compile the program of ``variant``, or let another process compile it.

        If there is none, the state of ``variant`` holds the reason. ``find_only``: compile nothing.
        """
        assert variant.sources is not None
        if self.count >= MAX_PROGRAMS and not find_only:
            variant.state = Refused(
                f"{MAX_PROGRAMS} other programs were compiled already; call it with fewer kinds of inputs"
            )
            return
        if variant.partition is None:
            variant.partition = BlockPartition.of(self.parts, *variant.sources, size, variant.most)
        try:
            with variant.partition.set_threads():
                blocks = StepBlocks.of(*variant.sources, call, variant.partition.size)
                requests = [write_request(source, autocast) for source in blocks.sources]
                on_cpu = all(tensor.is_cpu for tensor in blocks.sources[0].values)
                kept = on_cpu and program_cache.keeping() and None not in requests
                here = not find_only and not (kept and self.compile is None)
                pairs = zip(blocks.sources, requests, strict=True)
                programs = [self._program(source, request, kept=kept, here=here) for source, request in pairs]
            refused = next((program.why for program in programs if isinstance(program, NoProgram)), "")
            if refused and blocks.loops:
                # Some calls are many operators, such as a recurrent layer's.
                variant.partition = replace(variant.partition, size=1)
                self._make(variant, call, size, autocast, find_only=find_only)
            elif refused:
                variant.state = Refused(refused)
            elif len(ready := [program for program in programs if isinstance(program, BlockProgram)]) == len(programs):
                self._use(variant, call, blocks, ready, requests)
            elif not find_only:
                missing = [
                    r for r, program in zip(requests, programs, strict=True) if r is not None and program is None
                ]
                self.count += len(missing)
                variant.state = Compiling(BackgroundJob(missing, cache_folder(), variant), call)
        except CannotPartition as error:
            variant.partition = BlockPartition(variant.most if size is None else size, why=str(error))
            self._make(variant, call, size, autocast, find_only=find_only)
        except Unprofitable as error:
            variant.state = Refused(str(error))
        except (ProgramMismatch, BrokenProgram):
            raise
        except Exception as error:
            # Only tracing and compiling can fail here: errors of the user's code were raised as the call ran eagerly.
            variant.state = Refused(f"compilation failed: {error_text(error)}")

    def _program(
        self, source: StepSource, request: CompileRequest | None, *, kept: bool, here: bool
    ) -> BlockProgram | NoProgram | None:
        """Return the program of ``source``; None if there is none yet, and it is not to be compiled ``here``.

        ``kept``: whether programs are kept on disk.
        """
        program = None if request is None else self._programs.get(request.digest)
        if program is None and request is not None and kept:
            with tracing:
                program = program_cache.find(request)
        if program is None and here:
            with compiling():
                program = compile_program(source)
            self.count += isinstance(program, BlockProgram)
            if request is not None and kept:
                program_cache.keep(request, program)
        if program is not None and request is not None:
            self._programs[request.digest] = program
        return program

    def _use(
        self,
        variant: StepVariant,
        call: StepCall,
        blocks: StepBlocks,
        programs: Sequence[BlockProgram],
        requests: Sequence[CompileRequest | None],
    ) -> None:
        """Let ``variant`` use the programs unless eager steps are faster."""
        assert variant.partition is not None
        program = variant.partition.applied(blocks.step(programs, variant.tensor_refs))
        variant.note = f"in one part: {variant.partition.why}" if variant.partition.why else ""
        # Steps that only measure must not run the user's hooks.
        if self.compile is None and all(holder[name].is_cpu for holder, name in variant.tensor_refs):
            times = self._times(variant, call, program, requests)
            if times is not None and times.eager_wins:
                why = f"eager steps are faster on this machine, {times}"
                variant.state = Refused(why, by_choice=True)
                return
            variant.note = ", ".join(filter(None, (variant.note, str(times or ""))))
        variant.state = InUse(program)

    def _times(
        self, variant: StepVariant, call: StepCall, program: StepProgram, requests: Sequence[CompileRequest | None]
    ) -> StepTimes | None:
        """Return the times of ``program`` and of eager steps. They are measured unless they are known."""
        assert variant.partition is not None
        key = None
        if program_cache.keeping() and None not in requests:
            key = [*(request.digest for request in requests if request is not None), variant.partition.threads]
            if (times := program_cache.find_times(key)) is not None:
                return times
        if hooked(self._fused):
            return None
        tables = [module._buffers for module in self._fused.modules()]
        buffers: list[Location] = [(table, name) for table in tables for name, b in table.items() if b is not None]
        times = compare(
            program.step, partial(self._by_autograd, variant.situation), call, [*variant.tensor_refs, *buffers]
        )
        if key is not None and times is not None:
            program_cache.keep_times(key, times)
        return times


Run: TypeAlias = Callable[[StepCall], Tensor]
"""Writes the gradients and buffers of a step, and returns the losses ``[B]``."""

# Compiled and eager steps take turns: each runs up to _TURNS steps in a row, _ROWS times. The first step of a row warms
# up and does not count; a row of long steps has a single step that counts.
_TURNS, _ROWS, _LONG = 5, 2, 0.5
# The largest ratio of median to minimum of a steady measurement; on a busy machine it is several times as large.
_STEADY = 1.5


def compare(compiled: Run, eager: Run, call: StepCall, places: Sequence[Location]) -> StepTimes | None:
    """Time both; None if times are unsteady. The array is left unchanged.

    The result is the minimum, not the median: it must not depend on other load meanwhile.

    Args:
        places: where the tensors are that a step writes, which are restored.
    """
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
