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
from hfusion.device.cache import cache_folder, lasts
from hfusion.device.openmp import torch_threads
from hfusion.step import program_cache
from hfusion.step.autotune import (
    ONE_PART,
    PARTS,
    NotedProgram,
    find_times,
    keep_times,
    measure,
)
from hfusion.step.block_partition import Parting
from hfusion.step.compile_limits import SlowerThanEager, Unprofitable
from hfusion.step.compile_mode import CompileMode
from hfusion.step.compile_payoff import CompileRecord, add_record, compile_seconds, judge, read_records, spare_core
from hfusion.step.compile_request import Order
from hfusion.step.compile_worker import BackgroundJob, error_text
from hfusion.step.compiled_step import (
    FusedStep,
    Library,
    PerMemberStep,
    StepProgram,
    compile_programs,
    order_for,
    step_of,
)
from hfusion.step.eager_comparison import EagerProgram, check_faster, known_times, not_slower_than_eager
from hfusion.step.pending_program import PendingProgram, Rival
from hfusion.step.program_cache import NoProgram, StepPrograms
from hfusion.step.program_lifecycle import Compiling, Deferred, Due, Eager, Ended, Failed, Made, Postponed, Requested
from hfusion.step.step_graph import ProgramMismatch, StepCall
from hfusion.step.step_signatures import StepVariant
from hfusion.torch_private.cpp_block_entry import Unparted

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
    """Finds or compiles the programs of a step. ``ways``: the variants of the step."""

    def __init__(
        self, mode: CompileMode, ways: Mapping[Any, list[StepVariant]], eager: Callable[[Any], EagerProgram]
    ) -> None:
        self.mode = mode
        self._eager = eager
        self.library = Library()
        self._ways = ways

    def prepare(self, way: StepVariant, call: StepCall, size: int | None, autocast: Any) -> None:
        """Advance ``way`` before a step: find, request, compile or take its program, or note why there is none.

        Raises ProgramMismatch if the captured programs do not hold for the sizes of ``call``.
        """
        steps, way.steps = way.steps, way.steps + 1
        request = MakeRequest(call, size, autocast, self.mode.background, wait=self.mode.due(steps))
        if self.mode.eager(steps):
            # Start compiling early: the first step after the eager ones will wait for the program.
            if isinstance(way.state, Eager) and not any(o.pending and o.like(way) for o in self._variants()):
                self._make(way, replace(request, due=False, wait=False))
            return
        if isinstance(way.state, Deferred):
            way.note(Due())
            return
        if self._take_fitting(way, call) or self._waits(way, call, steps):
            return
        if isinstance(way.state, Compiling):
            if (request.wait and not way.state.behind) or way.state.pending.ready():
                self._guarded(way, request, self._take)
            return
        if not self.mode.judged or self._pays(way, request, steps):
            self._make(way, replace(request, behind=request.behind or way.clock.behind))

    def _pays(self, way: StepVariant, request: MakeRequest, steps: int) -> bool:
        """Return whether compiling ``way`` pays after ``steps`` steps of its kind; always True on an accelerator.

        Before the first timed step, only a cached program is taken.
        """
        if any(holder[name].device.type != "cpu" for holder, name in way.places):
            # On an accelerator, calls return before the work is done, so they cannot be timed here.
            return True
        if not way.clock.eager:
            # A cached program costs nothing.
            self._make(way, replace(request, wait=False, find_only=True))
            return False
        left = self.mode.left(steps)
        if left is None:
            return False
        operators, looped = way.extent
        found = judge(left, median(way.clock.eager), operators, looped, read_records(), spare_core())
        way.clock.behind = found.behind
        final = bool(found.why) and self.mode.steps is not None
        way.note(Failed(found.why, by_choice=True) if final else Postponed(found.why))
        return not found.why

    def eager_threads(self, way: StepVariant) -> AbstractContextManager[None]:
        """Context manager: run an eager step of ``way`` with one torch thread fewer if a compilation needs the core.

        This applies if the compiling process has no core of its own, and once it has run for longer than the
        compilation would take with one. Until then, steps keep all threads.
        """
        count = torch.get_num_threads()
        pending = way.pending
        if pending is None or self.mode.eager_steps is not None or count == 1 or spare_core():
            return nullcontext()
        if way.clock.expected is None:
            way.clock.expected = compile_seconds(*way.extent, read_records(), behind=False)
        return torch_threads(count - 1) if pending.age > way.clock.expected else nullcontext()

    def remember(self, way: StepVariant) -> None:
        """Store the measured times of ``way`` for later decisions."""
        clock = way.clock
        if clock.compilation is not None:
            behind = clock.behind or self.mode.background
            add_record(CompileRecord(*way.extent, behind, clock.compilation, clock.speedup))

    def _variants(self) -> Iterator[StepVariant]:
        return (way for ways in self._ways.values() for way in ways)

    def programs(self) -> list[StepProgram]:
        return list(dict.fromkeys(way.program for way in self._variants() if way.program is not None))

    def release(self) -> None:
        """Let all variants drop their references to tensors until their next step."""
        for way in self._variants():
            way.release()

    def _take_fitting(self, way: StepVariant, call: StepCall) -> bool:
        """Reuse a program of calls that differ only in the number of samples, if it is valid for this number."""
        for other in self._variants():
            if other.program is not None and other.like(way) and other.program.fits(call):
                if way.pending is not None:
                    way.pending.cancel()
                    way.note(Ended())
                way.note(Made(other.program))
                return True
        return False

    def _waits(self, way: StepVariant, call: StepCall, steps: int) -> bool:
        """Return True if a similar variant's pending program decides this step: eager, or by that program."""
        for other in self._variants():
            if other is not way and isinstance(other.state, Compiling) and other.like(way):
                if other.state.behind or not self.mode.due(steps):
                    return True
                self._take(other)
                return self._take_fitting(way, call)
        return False

    def _make(self, way: StepVariant, request: MakeRequest) -> None:
        """Find or compile the program of ``way``, or let another process compile it."""
        if self.library.count >= MAX_PROGRAMS:
            way.note(Failed(f"{MAX_PROGRAMS} other programs were compiled already; call it with fewer kinds of inputs"))
            return
        self._guarded(way, request, lambda of: self._find_or_compile(of, request))

    def _guarded(self, way: StepVariant, request: MakeRequest, work: Callable[[StepVariant], None]) -> None:
        """Call ``work(way)``; if it fails, note the reason in the state of ``way``."""
        try:
            work(way)
        except Unparted as error:
            way.parting = Parting(way.most if request.size is None else request.size, why=str(error))
            self._make(way, request)
        except (ProgramMismatch, BrokenProgram):
            raise
        except Unprofitable as error:
            way.note(Failed(str(error), by_choice=isinstance(error, SlowerThanEager)))
        except Exception as error:
            # Only tracing and compiling can fail here: errors of the user's code were raised as the call ran eagerly.
            way.note(Failed(f"compilation failed: {error_text(error)}"))

    def _find_or_compile(self, way: StepVariant, request: MakeRequest) -> None:
        assert way.sources is not None
        if way.parting is None:
            way.parting = Parting.of(self.mode.parts, *way.sources, request.size, way.most)
        parting, began = way.parting, perf_counter()
        with parting.set_threads():
            order = order_for(*way.sources, request.call, parting.size, request.autocast, always=request.behind)
        if self.mode.judged and (known_eager := known_times(order, parting.threads)) is not None:
            check_faster(known_eager)
        rival = None
        # The two differ in last bits: time decides once for all, or not at all.
        if parting.rival and order is not None and program_cache.keeping() and lasts():
            times = find_times(order, parting.threads, (ONE_PART, PARTS))
            if times is not None:
                way.parting = parting = parting.chosen(times)
                if times.fastest == ONE_PART:
                    self._find_or_compile(way, request)
                    return
            elif request.find_only:
                return
            else:
                rival = self._rival(way, request.call, order, request.autocast)
        known = self._known(way, request, order)
        if known is not None and (rival is None or not request.behind):
            self._use(way, request.call, order, known, rival, request.due)
            if way.clock.compilation is not None:
                way.clock.compilation = perf_counter() - began
        elif not request.find_only:
            assert order is not None
            job = BackgroundJob(order, self._folder, self) if known is None else None
            way.note(Requested(PendingProgram(job, order, request.call, rival), way.clock.behind))
            if request.wait and not way.clock.behind:
                self._take(way)

    def _known(self, way: StepVariant, request: MakeRequest, order: Order | None) -> StepPrograms | NoProgram | None:
        """Return cached programs, or compile them here; None if another process must, or nothing may be compiled."""
        assert way.sources is not None
        assert way.parting is not None
        began = perf_counter()
        keep = order if program_cache.keeping() else None
        with way.parting.set_threads():
            with tracing:
                known = None if keep is None else program_cache.find(keep)
            if known is None and not request.find_only and not (request.behind and order is not None):
                with compiling():
                    kind, size = _kind(way, request.call), way.parting.size
                    known = compile_programs(*way.sources, request.call, self.library, kind, size, keep)
                    way.clock.compilation = perf_counter() - began
        return known

    def _rival(self, way: StepVariant, call: StepCall, parts: Order, autocast: Any) -> Rival | None:
        """Request the program of all members in one block, to be compared with the blocks of the order ``parts``.

        Another process compiles it unless it is cached. None if there can be no such program.
        """
        assert way.sources is not None
        order = order_for(*way.sources, call, None, autocast, always=True)
        if order is None:
            return None
        with tracing:
            known = program_cache.find(order)
        try:
            job = None if known is not None else BackgroundJob(order, self._folder, self)
        except OSError:
            return None
        return Rival(PendingProgram(job, order, call), parts)

    def _take(self, way: StepVariant) -> None:
        """Wait for the program that another process compiles for ``way``, and use it."""
        pending = way.pending
        assert pending is not None
        way.note(Ended())
        found = self._result(pending)
        if found is None:
            # The job was cancelled because its owner is gone; the next call requests the program again.
            return
        if isinstance(found, str):
            way.note(Failed(f"its compilation in the background failed: {found}"))
            return
        if pending.job is not None:
            way.clock.compilation = pending.job.seconds
            self.library.count += 0 if isinstance(found, NoProgram) else len(found.runs)
        try:
            self._use(way, pending.call, pending.order, found, pending.rival)
        except Unparted as error:
            # The next call requests a program that runs in one part.
            way.parting = Parting(way.most, why=str(error))
        except Unprofitable as error:
            way.note(Failed(str(error), by_choice=isinstance(error, SlowerThanEager)))

    def _result(self, pending: PendingProgram) -> StepPrograms | NoProgram | str | None:
        """Wait for a request and return its programs; the reason if there are none, None if it was cancelled."""
        trouble = "" if pending.job is None else pending.job.result()
        if pending.job is not None and pending.job.cancelled:
            return None
        found = None if trouble else program_cache.find(pending.order, self._folder)
        return (trouble or "the compiled program cannot be read") if found is None else found

    def _use(
        self,
        way: StepVariant,
        call: StepCall,
        order: Order | None,
        found: StepPrograms | NoProgram,
        rival: Rival | None = None,
        due: bool = True,
    ) -> None:
        """Let ``way`` use the program. Raises Unprofitable if eager steps are faster, or if there is none."""
        if isinstance(found, NoProgram):
            raise Unprofitable(found.why)
        assert way.parting is not None
        parts = self._step(way, call, found)
        program = way.parting.applied(parts)
        other = None if rival is None else self._result(rival.pending)
        if rival is not None and isinstance(other, StepPrograms):
            program = self._faster(way, call, program, parts, other, rival.parts)
        if way.parting.times is not None:
            program = NotedProgram(program, f"chosen: {way.parting.times}")
        if self.mode.judged and all(holder[name].device.type == "cpu" for holder, name in way.places):
            program = not_slower_than_eager(way, call, order, program, self._eager)
        way.note(Made(program, due))

    def _faster(
        self,
        way: StepVariant,
        call: StepCall,
        applied: StepProgram,
        parts: FusedStep | PerMemberStep,
        found: StepPrograms,
        order: Order,
    ) -> StepProgram:
        """Measure the step in blocks and in one block, and return the faster; ``applied``: the step in blocks."""
        assert way.parting is not None
        parting, way.parting = way.parting, Parting(None)
        one = self._step(way, call, found)
        ways: dict[str, StepProgram] = {
            ONE_PART: way.parting.applied(one),
            PARTS: replace(parting, measured=False).applied(parts),
        }
        times = keep_times(order, measure(ways, call, way.places), parting.threads, (ONE_PART, PARTS))
        way.parting = parting if times is None else parting.chosen(times)
        return ways[ONE_PART] if times is not None and times.fastest == ONE_PART else applied

    def _step(self, way: StepVariant, call: StepCall, found: StepPrograms) -> FusedStep | PerMemberStep:
        assert way.sources is not None
        return step_of(found, *way.sources, call, way.places, self.library, _kind(way, call))

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
        for way in self._variants():
            if way.pending is not None:
                way.pending.cancel()


def _kind(way: StepVariant, call: StepCall) -> Any:
    """Return what a program depends on in addition to forward and loss, except sizes and the array's arrangement."""
    (*modes, _), *others = way.situation
    threads = way.parting.inner if way.parting is not None and way.parting.threads > 1 else None
    return (tuple(modes), *others, call.inputs.loose_key, call.target.loose_key, threads)
