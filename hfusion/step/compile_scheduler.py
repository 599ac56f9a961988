"""Find or compile the programs of a step: in this process, or in another one while steps run eagerly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.compiler.bound_program import Location
from hfusion.core.claimed_folder import run_folder
from hfusion.core.exclusive import compiling, tracing
from hfusion.core.stages import BrokenProgram
from hfusion.device.cache import cache_folder
from hfusion.step import program_cache
from hfusion.step.block_partition import BlockPartition
from hfusion.step.compile_limits import Unprofitable
from hfusion.step.compile_mode import CompileMode
from hfusion.step.compile_request import CompileRequest
from hfusion.step.compile_worker import BackgroundJob, error_text
from hfusion.step.compiled_step import Library, StepProgram, compile_programs, compile_request_for, step_of
from hfusion.step.eager_comparison import StepTimes, compare, find_times
from hfusion.step.program_cache import NoProgram, StepPrograms
from hfusion.step.step_graph import ProgramMismatch, StepCall
from hfusion.step.step_signatures import Compiling, Deferred, Eager, InUse, Refused, StepVariant, hooked
from hfusion.torch_private.cpp_block_entry import CannotPartition

# Compiled programs that are worth their time; a step that would need more runs eagerly from there on.
MAX_PROGRAMS = 16
# Seconds that eager steps of a kind have taken before ``compile=None`` compiles it.
PATIENCE = 2.0


@dataclass(frozen=True, eq=False)
class MakeRequest:
    """A request for the program of a variant.

    Attributes:
        call: a call that the program must serve.
        size: members that one call of the program computes; None for all.
        due: whether the next step may use the program; otherwise it is kept until steps of its kind are due.
        wait: whether to wait for the process that compiles it.
        find_only: whether to use a cached program only, and compile nothing.
    """

    call: StepCall
    size: int | None
    autocast: Any
    due: bool = True
    wait: bool = False
    find_only: bool = False


class ProgramMaker:
    """Finds or compiles the programs of a step.

    Args:
        mode: when and by which process steps are compiled.
        variants_by_kind: the variants of the step.
        fused: the array.
        by_autograd: writes gradients and buffers of a step in a situation eagerly, and returns the losses.
    """

    def __init__(
        self,
        mode: CompileMode,
        variants_by_kind: Mapping[Any, list[StepVariant]],
        fused: FusedModule,
        by_autograd: Callable[[Any, StepCall], Tensor],
    ) -> None:
        self.mode = mode
        self.library = Library()
        self._variants_by_kind = variants_by_kind
        self._fused, self._by_autograd = fused, by_autograd

    def prepare(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any) -> None:
        """Advance ``variant`` before a step: find, request, compile or take its program, or note why there is none.

        Raises ProgramMismatch if the captured programs do not hold for the sizes of ``call``.
        """
        steps, variant.steps = variant.steps, variant.steps + 1
        request = MakeRequest(call, size, autocast, wait=self.mode.due(steps))
        if self.mode.eager(steps):
            # Start compiling early: the first step after the eager ones will wait for the program.
            if isinstance(variant.state, Eager) and not any(o.pending and o.like(variant) for o in self._variants()):
                self._make(variant, replace(request, due=False, wait=False))
            return
        if isinstance(variant.state, Deferred):
            variant.state = InUse(variant.state.program)
            return
        if self._take_fitting(variant, call) or self._waits(variant, call, steps):
            return
        if isinstance(variant.state, Compiling):
            if request.wait or variant.state.job.ready():
                self._guarded(variant, request, self._take)
        elif not self.mode.patient or variant.seconds >= PATIENCE:
            self._make(variant, request)
        elif not variant.seconds:
            # A program that was compiled before costs nothing.
            self._make(variant, replace(request, find_only=True))

    def _variants(self) -> Iterator[StepVariant]:
        return (variant for variants in self._variants_by_kind.values() for variant in variants)

    def programs(self) -> list[StepProgram]:
        return list(dict.fromkeys(variant.program for variant in self._variants() if variant.program is not None))

    def release(self) -> None:
        """Let all variants drop their references to tensors until their next step."""
        for variant in self._variants():
            variant.release()

    def _take_fitting(self, variant: StepVariant, call: StepCall) -> bool:
        """Reuse a program of calls that differ only in the number of samples, if it is valid for this number."""
        for other in self._variants():
            if other.program is not None and other.like(variant) and other.program.fits(call):
                if variant.pending is not None:
                    variant.pending.cancel()
                variant.state, variant.note = InUse(other.program), other.note
                return True
        return False

    def _waits(self, variant: StepVariant, call: StepCall, steps: int) -> bool:
        """Return True if a similar variant's pending program decides this step: eager, or by that program."""
        for other in self._variants():
            if other is not variant and isinstance(other.state, Compiling) and other.like(variant):
                if not self.mode.due(steps):
                    return True
                self._take(other)
                return self._take_fitting(variant, call)
        return False

    def _make(self, variant: StepVariant, request: MakeRequest) -> None:
        """Find or compile the program of ``variant``, or let another process compile it."""
        if self.library.count >= MAX_PROGRAMS:
            variant.state = Refused(
                f"{MAX_PROGRAMS} other programs were compiled already; call it with fewer kinds of inputs"
            )
            return
        self._guarded(variant, request, lambda target: self._find_or_compile(target, request))

    def _guarded(self, variant: StepVariant, request: MakeRequest, work: Callable[[StepVariant], None]) -> None:
        """Call ``work(variant)``; if it fails, note the reason in the state of ``variant``."""
        try:
            work(variant)
        except CannotPartition as error:
            variant.partition = BlockPartition(variant.most if request.size is None else request.size, why=str(error))
            self._make(variant, request)
        except (ProgramMismatch, BrokenProgram):
            raise
        except Unprofitable as error:
            variant.state = Refused(str(error))
        except Exception as error:
            # Only tracing and compiling can fail here: errors of the user's code were raised as the call ran eagerly.
            variant.state = Refused(f"compilation failed: {error_text(error)}")

    def _find_or_compile(self, variant: StepVariant, request: MakeRequest) -> None:
        assert variant.sources is not None
        if variant.partition is None:
            variant.partition = BlockPartition.of(self.mode.parts, *variant.sources, request.size, variant.most)
        partition = variant.partition
        with partition.set_threads():
            compile_request = compile_request_for(
                *variant.sources, request.call, partition.size, request.autocast, always=self.mode.background
            )
        times = find_times(compile_request, partition.threads) if self.mode.patient else None
        if times is not None and times.eager_wins:
            variant.state = _eager_by_choice(times)
            return
        programs = self._load_or_compile(variant, request, compile_request)
        if programs is not None:
            self._use(variant, request.call, compile_request, programs, request.due)
        elif not request.find_only:
            assert compile_request is not None
            variant.state = Compiling(BackgroundJob(compile_request, self._folder, self), compile_request, request.call)
            if request.wait:
                self._take(variant)

    def _load_or_compile(
        self, variant: StepVariant, request: MakeRequest, compile_request: CompileRequest | None
    ) -> StepPrograms | NoProgram | None:
        """Return cached programs, or compile them here; None if another process must, or nothing may be compiled."""
        assert variant.sources is not None
        assert variant.partition is not None
        keep = compile_request if program_cache.keeping() else None
        with variant.partition.set_threads():
            with tracing:
                programs = None if keep is None else program_cache.find(keep)
            elsewhere = self.mode.background and compile_request is not None
            if programs is None and not request.find_only and not elsewhere:
                with compiling():
                    kind, size = _kind(variant, request.call), variant.partition.size
                    programs = compile_programs(*variant.sources, request.call, self.library, kind, size, keep)
        return programs

    def _take(self, variant: StepVariant) -> None:
        """Wait for the program that another process compiles for ``variant``, and use it."""
        assert isinstance(variant.state, Compiling)
        pending, variant.state = variant.state, Eager()
        trouble = pending.job.result()
        if pending.job.cancelled:
            # Its owner is gone; the next call requests the program again.
            return
        programs = None if trouble else program_cache.find(pending.compile_request, self._folder)
        if programs is None:
            why = trouble or "the compiled program cannot be read"
            variant.state = Refused(f"its compilation in the background failed: {why}")
            return
        self.library.count += 0 if isinstance(programs, NoProgram) else len(programs.runs)
        try:
            self._use(variant, pending.call, pending.compile_request, programs)
        except CannotPartition as error:
            # The next call requests a program that runs in one part.
            variant.partition = BlockPartition(variant.most, why=str(error))
        except Unprofitable as error:
            variant.state = Refused(str(error))

    def _use(
        self,
        variant: StepVariant,
        call: StepCall,
        compile_request: CompileRequest | None,
        programs: StepPrograms | NoProgram,
        due: bool = True,
    ) -> None:
        """Let ``variant`` use the program unless eager steps are faster. Raises Unprofitable if there is none."""
        if isinstance(programs, NoProgram):
            raise Unprofitable(programs.why)
        assert variant.sources is not None
        assert variant.partition is not None
        kind = _kind(variant, call)
        step = step_of(programs, *variant.sources, call, variant.tensor_refs, self.library, kind)
        program = variant.partition.applied(step)
        variant.note = f"in one part: {variant.partition.why}" if variant.partition.why else ""
        if self.mode.patient and all(holder[name].device.type == "cpu" for holder, name in variant.tensor_refs):
            times = self._times(variant, call, compile_request, program)
            if times is not None and times.eager_wins:
                variant.state = _eager_by_choice(times)
                return
            variant.note = ", ".join(filter(None, (variant.note, str(times or ""))))
        variant.state = InUse(program) if due else Deferred(program)

    def _times(
        self, variant: StepVariant, call: StepCall, compile_request: CompileRequest | None, program: StepProgram
    ) -> StepTimes | None:
        """Return the times of ``program`` and of eager steps. They are measured unless they are known."""
        assert variant.partition is not None
        times = find_times(compile_request, variant.partition.threads)
        # Steps that only measure must not run the user's hooks.
        if times is not None or hooked(self._fused):
            return times
        tables = [module._buffers for module in self._fused.modules()]
        buffers: list[Location] = [(table, name) for table in tables for name, b in table.items() if b is not None]
        return compare(
            program.step,
            partial(self._by_autograd, variant.situation),
            call,
            [*variant.tensor_refs, *buffers],
            compile_request,
            variant.partition.threads,
        )

    @cached_property
    def _folder(self) -> Path:
        """Folder in which the other process stores programs."""
        if program_cache.keeping():
            return cache_folder()
        private = run_folder()
        weakref.finalize(self, private.remove)
        return private.path

    def close(self) -> None:
        """End the processes that compile. Later steps request the programs again if they need them."""
        for variant in self._variants():
            if variant.pending is not None:
                variant.pending.cancel()


def _eager_by_choice(times: StepTimes) -> Refused:
    return Refused(f"eager steps are faster on this machine, {times}", by_choice=True)


def _kind(variant: StepVariant, call: StepCall) -> Any:
    """Return what a program depends on in addition to forward and loss, except sizes and the array's arrangement."""
    (*modes, _), *others = variant.situation
    threads = variant.partition.inner if variant.partition is not None and variant.partition.threads > 1 else None
    return (tuple(modes), *others, call.inputs.loose_key, call.target.loose_key, threads)
