"""Programs that another process makes while steps run eagerly."""

from __future__ import annotations

from dataclasses import dataclass

from hfusion.step.compile_request import CompileRequest
from hfusion.step.compile_worker import BackgroundJob
from hfusion.step.step_graph import StepCall


@dataclass(frozen=True, eq=False)
class PendingProgram:
    """A program that another process compiles for calls like ``call``; without ``job`` it is in the cache already."""

    job: BackgroundJob | None
    compile_request: CompileRequest
    call: StepCall
    rival: Rival | None = None

    @property
    def age(self) -> float:
        """Seconds since its compilation started."""
        return 0.0 if self.job is None else self.job.age

    def ready(self) -> bool:
        pending = self if self.rival is None else self.rival.pending
        return all(program.job is None or program.job.ready() for program in (self, pending))

    def cancel(self) -> None:
        for program in (self, None if self.rival is None else self.rival.pending):
            if program is not None and program.job is not None:
                program.job.cancel()


@dataclass(frozen=True, eq=False)
class Rival:
    """A program of all members in one block, to be compared with the program of the order ``parts``."""

    pending: PendingProgram
    parts: CompileRequest
