"""Run programs in a separate process: kernels of torch, and ours, may crash it where they should raise."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType

import torch

from tests.fuzz.compare import Outcome, Verdict, outcome, outcome_alone
from tests.fuzz.program import Program


class Worker:
    """A process that runs programs, and is restarted after a crash. Use it in a with block."""

    def __enter__(self) -> Worker:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def outcome(self, program: Program) -> Outcome:
        """As `compare.outcome`; a process that ended is a fault, unless it ends with the members alone, too."""
        result = self._ask(program, alone=False)
        if result is not None:
            return result
        words = f"the process ended with the status {self._process.exitcode}"
        self._begin()
        if self._ask(program, alone=True) is not None:
            return Outcome(Verdict.RAW, words)
        self._begin()
        return Outcome(Verdict.INVALID, words)

    def _ask(self, program: Program, *, alone: bool) -> Outcome | None:
        """Return the outcome, or None if the process ended."""
        try:
            self._pipe.send((program, alone))
            result: Outcome = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end()
            return None
        return result

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_answer, args=(worker_pipe,), daemon=True)
        self._process.start()
        worker_pipe.close()

    def _end(self) -> None:
        self._pipe.close()
        self._process.join()


def _answer(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            program, alone = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(outcome_alone(program) if alone else outcome(program))
