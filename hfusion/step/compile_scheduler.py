"""Find or compile the programs of a step: in this process, or in another one while steps run eagerly.

On a CPU, ``compile=None`` compares compiled steps with eager ones, once per processor. The two differ in the last bits,
so the comparison is kept in the user's cache folder and is final for later processes.
"""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import nn

from hfusion.core.exclusive import compiling, tracing
from hfusion.core.stages import BrokenProgram
from hfusion.device.cache import cache_folder
from hfusion.device.team import torch_threads
from hfusion.step import program_cache
from hfusion.step.compile_request import BackgroundJob, error_text, write_request
from hfusion.step.compiled_step import BlocksStep, Unprofitable, block_sources, compile_program
from hfusion.step.parallel_blocks import BlockPartition
from hfusion.step.program_cache import BlockProgram, NoProgram, Result, StepTimes
from hfusion.step.step_graph import ProgramMismatch, StepCall, StepSource
from hfusion.step.step_signatures import StepVariant, Trial
from hfusion.torch_private.inductor import CannotPartition

# Compiled programs that are worth their time; a step that would need more runs eagerly from there on.
MAX_PROGRAMS = 16
# Seconds that eager steps of a kind have taken before ``compile=None`` compiles it.
PATIENCE = 5.0


class ProgramMaker:
    """Finds or compiles the programs of a step.

    Args:
        compile, parts: the arguments of `hfusion.train_step`.
    """

    def __init__(self, compile: bool | None, parts: int | str) -> None:
        self.compile, self.parts = compile, parts
        # How many programs were compiled for this step.
        self.count = 0
        # The programs of this step by their requests, for arrays with other numbers of members, too.
        self._programs: dict[str, Result] = {}

    def prepare(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any) -> None:
        """Advance ``variant`` before a step: find, request, compile or take its program, or note why there is none.

        ``size``: members that one call of the program computes; None for all. Raises ProgramMismatch if the captured
        programs do not hold for the sizes of ``call``.
        """
        if (job := variant.job) is not None:
            if self.compile or job.ready():
                variant.job, partition = None, variant.partition
                why = job.result()
                if not why:
                    self._make(variant, job.call, size, autocast, find_only=True)
                    why = "the compiled program cannot be read"
                # With another partition, the next call requests other programs.
                if variant.program is None and not variant.why and variant.partition is partition:
                    variant.why = f"its compilation in the background failed: {why}"
            return
        # A program that was compiled before costs nothing, so it is looked for at once.
        due = self.compile or variant.seconds >= PATIENCE
        if due or not variant.seconds:
            self._make(variant, call, size, autocast, find_only=not due)

    def note_seconds(self, variant: StepVariant, seconds: float) -> None:
        """Note the time of a step of the trial of ``variant``. After the last one, keep to the faster way."""
        trial = variant.trial
        assert trial is not None
        if not trial.add(seconds):
            return
        variant.trial, times = None, trial.times()
        if times is not None:
            variant.decide(times)
            if trial.key is not None:
                program_cache.keep(trial.key, times, program_cache.TIMES)

    def _make(self, variant: StepVariant, call: StepCall, size: int | None, autocast: Any, *, find_only: bool) -> None:
        """Find or compile the program of ``variant``, or let another process compile it.

        If there is none, ``variant.why`` holds the reason. ``find_only``: compile nothing.
        """
        assert variant.sources is not None
        if self.count >= MAX_PROGRAMS and not find_only:
            variant.why = f"{MAX_PROGRAMS} other programs were compiled already; call it with fewer kinds of inputs"
            return
        if variant.partition is None:
            variant.partition = BlockPartition.of(self.parts, *variant.sources, size, variant.most)
        try:
            # Inductor generates code for the current number of threads.
            with torch_threads(variant.partition.inner) if variant.partition.threads > 1 else nullcontext():
                sources, kinds, block = block_sources(*variant.sources, call, variant.partition.size)
                requests = [write_request(source, autocast) for source in sources]
                on_cpu = all(tensor.is_cpu for tensor in sources[0].values)
                kept = on_cpu and program_cache.keeping() and None not in requests
                here = not find_only and not (kept and self.compile is None)
                pairs = list(zip(sources, requests, strict=True))
                programs = [self._program(source, request, kept=kept, here=here) for source, request in pairs]
            refused = next((program.why for program in programs if isinstance(program, NoProgram)), "")
            ready = [program for program in programs if isinstance(program, BlockProgram)]
            if refused and block > 1 and sources[0].forward.looped_calls:
                # A program of several members calls operators of single members, some of which are many operators, as
                # a recurrent layer's.
                variant.partition = replace(variant.partition, size=1)
                self._make(variant, call, size, autocast, find_only=find_only)
            elif refused:
                variant.why = refused
            elif len(ready) == len(programs):
                params = [(held, name) for held, name in variant.tensor_refs if isinstance(held[name], nn.Parameter)]
                whole = BlocksStep(tuple(ready), tuple(kinds), block, sources[0].tensors, tuple(params))
                variant.program = variant.partition.applied(whole)
                if self.compile is None and on_cpu:
                    # Times that were kept decide whether the program is used, else a trial does.
                    key = json.dumps([*requests, variant.partition.threads]) if kept else None
                    times = None if key is None else program_cache.find(key, program_cache.TIMES)
                    if isinstance(times, StepTimes):
                        variant.decide(times)
                    else:
                        variant.trial = Trial(key)
            elif not find_only:
                missing = [r for (_, r), program in zip(pairs, programs, strict=True) if r and program is None]
                self.count += len(missing)
                variant.job = BackgroundJob(missing, cache_folder(), call, variant)
        except CannotPartition as error:
            variant.partition = BlockPartition(variant.most if size is None else size, why=str(error))
            self._make(variant, call, size, autocast, find_only=find_only)
        except Unprofitable as error:
            variant.why = str(error)
        except (ProgramMismatch, BrokenProgram):
            raise
        except Exception as error:
            # Only tracing and compiling can fail here: errors of the user's code were raised as the call ran eagerly.
            variant.why = f"compilation failed: {error_text(error)}"

    def _program(self, source: StepSource, request: str | None, *, kept: bool, here: bool) -> Result | None:
        """Return the program of ``source``; None if there is none yet, and it is not to be compiled ``here``.

        ``kept``: whether programs are kept on disk.
        """
        program = None if request is None else self._programs.get(request)
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
            self._programs[request] = program
        return program
