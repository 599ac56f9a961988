"""Schedule the compilation of a step's programs: in this process, or in another one while steps run eagerly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from hfusion.core.claimed_folder import run_folder
from hfusion.core.exclusive import compiling, tracing
from hfusion.core.stages import BrokenProgram
from hfusion.device.cache import cache_folder
from hfusion.device.openmp import torch_threads
from hfusion.step import program_cache
from hfusion.step.autotune import (
    ONE_PART,
    PARTS,
    NotedProgram,
    find_times,
    keep_times,
    keeps_times,
    measure,
)
from hfusion.step.block_partition import BlockPartition
from hfusion.step.compile_limits import SlowerThanEager, Unprofitable
from hfusion.step.compile_mode import CompileMode
from hfusion.step.compile_payoff import CompileRecord, add_record, compile_seconds, judge, read_records, spare_core
from hfusion.step.compile_request import CompileRequest
from hfusion.step.compile_worker import BackgroundJob, error_text
from hfusion.step.compiled_step import (
    FusedStep,
    Library,
    PerMemberStep,
    StepProgram,
    compile_programs,
    compile_request_for,
    step_of,
)
from hfusion.step.eager_comparison import EagerProgram, check_faster, known_times, not_slower_than_eager
from hfusion.step.pending_program import PendingProgram, Rival
from hfusion.step.program_cache import NoProgram, StepPrograms
from hfusion.step.program_lifecycle import (
    Compiling,
    Deferred,
    Due,
    Eager,
    Ended,
    Failed,
    Postponed,
    ProgramReady,
    Requested,
)
from hfusion.step.step_graph import ProgramMismatch, StepCall
from hfusion.step.step_signatures import StepVariant
from hfusion.torch_private.cpp_block_entry import CannotPartition

# Compiled programs that are worth their time; a step that would need more runs eagerly from there on.
MAX_PROGRAMS = 16


@dataclass(frozen=True, eq=False)
class MakeRequest:
    """A request for the program of a variant.

    Attributes:
        call: a call that the program must serve.
        size: members that one call of the program computes; None for all.
        behind: whether another process compiles it.
        due: whether the next step may use the program; otherwise it is kept until steps of its kind are due.
        wait: whether to wait for the other process.
        find_only: whether to use a cached program only, and compile nothing.
    """

    call: StepCall
    size: int | None
    autocast: Any
    behind: bool
    due: bool = True
    wait: bool = False
    find_only: bool = False


class ProgramMaker:
    """Finds or compiles the programs of a step. ``variants_by_kind``: the variants of the step."""

    def __init__(
        self, mode: CompileMode, variants_by_kind: Mapping[Any, list[StepVariant]], eager: Callable[[Any], EagerProgram]
    ) -> None:
        self.mode = mode
        self._eager = eager
        self.library = Library()
        self._variants_by_kind = variants_by_kind

    def prepare(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any) -> None:
        """Advance ``variant`` before a step: find, request, compile or take its program, or note why there is none.

        Raises ProgramMismatch if the captured programs do not hold for the sizes of ``call``.
        """
        steps, variant.steps = variant.steps, variant.steps + 1
        request = MakeRequest(call, size, autocast, self.mode.background, wait=self.mode.due(steps))
        if self.mode.eager(steps):
            # Start compiling early: the first step after the eager ones will wait for the program.
            if isinstance(variant.state, Eager) and not any(o.pending and o.like(variant) for o in self._variants()):
                self._make(variant, replace(request, due=False, wait=False))
            return
        if isinstance(variant.state, Deferred):
            variant.note(Due())
            return
        if self._take_fitting(variant, call) or self._waits(variant, call, steps):
            return
        if isinstance(variant.state, Compiling):
            if (request.wait and not variant.state.behind) or variant.state.pending.ready():
                self._guarded(variant, request, self._take)
            return
        if not self.mode.judged or self._pays(variant, request, steps):
            self._make(variant, replace(request, behind=request.behind or variant.clock.behind))

    def _pays(self, variant: StepVariant, request: MakeRequest, steps: int) -> bool:
        """Return whether compiling ``variant`` pays after ``steps`` steps of its kind; always True on an accelerator.

        Before the first timed step, only a cached program is taken.
        """
        if any(holder[name].device.type != "cpu" for holder, name in variant.tensor_refs):
            # On an accelerator, calls return before the work is done, so they cannot be timed here.
            return True
        if not variant.clock.eager:
            # A cached program costs nothing.
            self._make(variant, replace(request, wait=False, find_only=True))
            return False
        remaining = self.mode.remaining_steps(steps)
        if remaining is None:
            return False
        operators, looped = variant.extent
        decision = judge(remaining, median(variant.clock.eager), operators, looped, read_records(), spare_core())
        variant.clock.behind = decision.behind
        final = bool(decision.why) and self.mode.steps is not None
        variant.note(Failed(decision.why, by_choice=True) if final else Postponed(decision.why))
        return not decision.why

    def eager_threads(self, variant: StepVariant) -> AbstractContextManager[None]:
        """Context manager: run an eager step of ``variant`` with one torch thread fewer if a compilation needs a core.

        This applies if the compiling process has no core of its own, and once it has run for longer than the
        compilation would take with one. Until then, steps keep all threads.
        """
        count = torch.get_num_threads()
        pending = variant.pending
        if pending is None or self.mode.eager_steps is not None or count == 1 or spare_core():
            return nullcontext()
        if variant.clock.expected is None:
            variant.clock.expected = compile_seconds(*variant.extent, read_records(), behind=False)
        return torch_threads(count - 1) if pending.age > variant.clock.expected else nullcontext()

    def remember(self, variant: StepVariant) -> None:
        """Store the measured times of ``variant`` for later decisions."""
        clock = variant.clock
        if clock.compilation is not None:
            behind = clock.behind or self.mode.background
            add_record(CompileRecord(*variant.extent, behind, clock.compilation, clock.speedup))

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
                    variant.note(Ended())
                variant.note(ProgramReady(other.program))
                return True
        return False

    def _waits(self, variant: StepVariant, call: StepCall, steps: int) -> bool:
        """Return True if a similar variant's pending program decides this step: eager, or by that program."""
        for other in self._variants():
            if other is not variant and isinstance(other.state, Compiling) and other.like(variant):
                if other.state.behind or not self.mode.due(steps):
                    return True
                self._take(other)
                return self._take_fitting(variant, call)
        return False

    def _make(self, variant: StepVariant, request: MakeRequest) -> None:
        """Find or compile the program of ``variant``, or let another process compile it."""
        if self.library.count >= MAX_PROGRAMS:
            variant.note(
                Failed(f"{MAX_PROGRAMS} other programs were compiled already; call it with fewer kinds of inputs")
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
            variant.note(Failed(str(error), by_choice=isinstance(error, SlowerThanEager)))
        except Exception as error:
            # Only tracing and compiling can fail here: errors of the user's code were raised as the call ran eagerly.
            variant.note(Failed(f"compilation failed: {error_text(error)}"))

    def _find_or_compile(self, variant: StepVariant, request: MakeRequest) -> None:
        assert variant.sources is not None
        if variant.partition is None:
            variant.partition = BlockPartition.of(self.mode.parts, *variant.sources, request.size, variant.most)
        partition, began = variant.partition, perf_counter()
        with partition.set_threads():
            compile_request = compile_request_for(
                *variant.sources, request.call, partition.size, request.autocast, always=request.behind
            )
        if self.mode.judged and (eager_times := known_times(compile_request, partition.threads)) is not None:
            check_faster(eager_times)
        rival = None
        # The two differ in last bits: time decides once for all, or not at all.
        if partition.rival and compile_request is not None and keeps_times():
            times = find_times(compile_request, partition.threads, (ONE_PART, PARTS))
            if times is not None:
                variant.partition = partition = partition.chosen(times)
                if times.fastest == ONE_PART:
                    self._find_or_compile(variant, request)
                    return
            elif request.find_only:
                return
            else:
                rival = self._rival(variant, request.call, compile_request, request.autocast)
        programs = self._load_or_compile(variant, request, compile_request)
        if programs is not None and (rival is None or not request.behind):
            self._use(variant, request.call, compile_request, programs, rival, request.due)
            if variant.clock.compilation is not None:
                variant.clock.compilation = perf_counter() - began
        elif not request.find_only:
            assert compile_request is not None
            job = BackgroundJob(compile_request, self._folder, self) if programs is None else None
            variant.note(Requested(PendingProgram(job, compile_request, request.call, rival), variant.clock.behind))
            if request.wait and not variant.clock.behind:
                self._take(variant)

    def _load_or_compile(
        self, variant: StepVariant, request: MakeRequest, compile_request: CompileRequest | None
    ) -> StepPrograms | NoProgram | None:
        """Return cached programs, or compile them here; None if another process must, or nothing may be compiled."""
        assert variant.sources is not None
        assert variant.partition is not None
        began = perf_counter()
        keep = compile_request if program_cache.keeping() else None
        with variant.partition.set_threads():
            with tracing:
                programs = None if keep is None else program_cache.find(keep)
            if programs is None and not request.find_only and not (request.behind and compile_request is not None):
                with compiling():
                    kind, size = _kind(variant, request.call), variant.partition.size
                    programs = compile_programs(*variant.sources, request.call, self.library, kind, size, keep)
                    variant.clock.compilation = perf_counter() - began
        return programs

    def _rival(self, variant: StepVariant, call: StepCall, parts: CompileRequest, autocast: Any) -> Rival | None:
        """Request the program of all members in one block, to be compared with the blocks of the order ``parts``.

        Another process compiles it unless it is cached. None if there can be no such program.
        """
        assert variant.sources is not None
        compile_request = compile_request_for(*variant.sources, call, None, autocast, always=True)
        if compile_request is None:
            return None
        with tracing:
            cached = program_cache.find(compile_request)
        try:
            job = None if cached is not None else BackgroundJob(compile_request, self._folder, self)
        except OSError:
            return None
        return Rival(PendingProgram(job, compile_request, call), parts)

    def _take(self, variant: StepVariant) -> None:
        """Wait for the program that another process compiles for ``variant``, and use it."""
        pending = variant.pending
        assert pending is not None
        variant.note(Ended())
        result = self._result(pending)
        if result is None:
            # The job was cancelled because its owner is gone; the next call requests the program again.
            return
        if isinstance(result, str):
            variant.note(Failed(f"its compilation in the background failed: {result}"))
            return
        if pending.job is not None:
            variant.clock.compilation = pending.job.seconds
            self.library.count += 0 if isinstance(result, NoProgram) else len(result.runs)
        try:
            self._use(variant, pending.call, pending.compile_request, result, pending.rival)
        except CannotPartition as error:
            # The next call requests a program that runs in one part.
            variant.partition = BlockPartition(variant.most, why=str(error))
        except Unprofitable as error:
            variant.note(Failed(str(error), by_choice=isinstance(error, SlowerThanEager)))

    def _result(self, pending: PendingProgram) -> StepPrograms | NoProgram | str | None:
        """Wait for a request and return its programs; the reason if there are none, None if it was cancelled."""
        trouble = "" if pending.job is None else pending.job.result()
        if pending.job is not None and pending.job.cancelled:
            return None
        programs = None if trouble else program_cache.find(pending.compile_request, self._folder)
        return (trouble or "the compiled program cannot be read") if programs is None else programs

    def _use(
        self,
        variant: StepVariant,
        call: StepCall,
        compile_request: CompileRequest | None,
        programs: StepPrograms | NoProgram,
        rival: Rival | None = None,
        due: bool = True,
    ) -> None:
        """Let ``variant`` use the program. Raises Unprofitable if eager steps are faster, or if there is none."""
        if isinstance(programs, NoProgram):
            raise Unprofitable(programs.why)
        assert variant.partition is not None
        parts = self._step(variant, call, programs)
        program = variant.partition.applied(parts)
        rival_programs = None if rival is None else self._result(rival.pending)
        if rival is not None and isinstance(rival_programs, StepPrograms):
            program = self._faster(variant, call, program, parts, rival_programs, rival.parts)
        if variant.partition.times is not None:
            program = NotedProgram(program, f"chosen: {variant.partition.times}")
        if self.mode.judged and all(holder[name].device.type == "cpu" for holder, name in variant.tensor_refs):
            program = not_slower_than_eager(variant, call, compile_request, program, self._eager)
        variant.note(ProgramReady(program, due))

    def _faster(
        self,
        variant: StepVariant,
        call: StepCall,
        applied: StepProgram,
        parts: FusedStep | PerMemberStep,
        rival_programs: StepPrograms,
        compile_request: CompileRequest,
    ) -> StepProgram:
        """Measure the step in blocks and in one block, and return the faster; ``applied``: the step in blocks."""
        assert variant.partition is not None
        partition, variant.partition = variant.partition, BlockPartition(None)
        single_block = self._step(variant, call, rival_programs)
        steps: dict[str, StepProgram] = {
            ONE_PART: variant.partition.applied(single_block),
            PARTS: replace(partition, measured=False).applied(parts),
        }
        times = keep_times(
            compile_request, measure(steps, call, variant.tensor_refs), partition.threads, (ONE_PART, PARTS)
        )
        variant.partition = partition if times is None else partition.chosen(times)
        return steps[ONE_PART] if times is not None and times.fastest == ONE_PART else applied

    def _step(self, variant: StepVariant, call: StepCall, programs: StepPrograms) -> FusedStep | PerMemberStep:
        assert variant.sources is not None
        return step_of(programs, *variant.sources, call, variant.tensor_refs, self.library, _kind(variant, call))

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


def _kind(variant: StepVariant, call: StepCall) -> Any:
    """Return what a program depends on in addition to forward and loss, except sizes and the array's arrangement."""
    (*modes, _), *others = variant.situation
    threads = variant.partition.inner if variant.partition is not None and variant.partition.threads > 1 else None
    return (tuple(modes), *others, call.inputs.loose_key, call.target.loose_key, threads)
