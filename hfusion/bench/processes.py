"""Worker processes, one for each core or a few on an accelerator, that train members one by one on one thread."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from multiprocessing.connection import Connection

import torch
from torch import Tensor

from hfusion.bench.serial import SerialLoop, check_convolutions
from hfusion.bench.workload import Running, Unavailable, Workload, error_line
from hfusion.device.native import cores

_ON_ACCELERATOR = 4
"""Processes that share an accelerator: each has a context there of some 500 MB, and they take turns without MPS."""


def _work(pipe: Connection, workload: Workload, first: int, last: int, compiled: bool, channels_last: bool) -> None:
    """Train members ``first`` to ``last - 1``: one step and a reply for each message, until it is False.

    An error is the last reply.
    """
    torch.set_num_threads(1)
    try:
        chosen = workload.functional() if compiled else workload
        loop = SerialLoop.of(chosen, range(first, last), fused=compiled, channels_last=channels_last)
        if compiled:
            loop = replace(loop, loss_of=torch.compile(loop.loss_of))
        pipe.send([])
        while pipe.recv():
            pipe.send([loss.item() for loss in loop.step()])
    except Exception as error:
        pipe.send(error_line(error))


class _Workers:
    """The processes, started once; a step is one message to each and one reply from each."""

    def __init__(self, workload: Workload, workers: int, *loop: bool) -> None:
        context = multiprocessing.get_context("spawn")
        bounds = [workload.members * i // workers for i in range(workers + 1)]
        self.pipes: list[Connection] = []
        self.processes = []
        for first, last in pairwise(bounds):
            parent_end, worker_end = context.Pipe()
            process = context.Process(target=_work, args=(worker_end, workload, first, last, *loop), daemon=True)
            process.start()
            # Only the worker may hold its end, else its death would leave recv waiting for ever.
            worker_end.close()
            self.pipes.append(parent_end)
            self.processes.append(process)
        try:
            for pipe in self.pipes:
                self._receive(pipe)
        except RuntimeError:
            self.close()
            raise

    def _receive(self, pipe: Connection) -> list[float]:
        try:
            reply: list[float] | str = pipe.recv()
        except EOFError:
            raise RuntimeError("a worker process ended early; see its error above") from None
        if isinstance(reply, str):
            raise RuntimeError(f"in a worker process: {reply}")
        return reply

    def step(self) -> Tensor:
        for pipe in self.pipes:
            pipe.send(True)
        return torch.tensor([loss for pipe in self.pipes for loss in self._receive(pipe)])

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            with suppress(BrokenPipeError):
                pipe.send(False)
            process.join()
            pipe.close()


def start(
    workload: Workload, compiled: bool = False, channels_last: bool = False, most: int = _ON_ACCELERATOR
) -> Running:
    """Start the workers and wait until they are ready. Raises Unavailable where there is work for one only.

    ``compiled``: forward and loss under torch.compile, and torch's fused Adam. ``channels_last``: of convolutions.
    ``most``: workers on an accelerator.
    """
    workers = min(cores(), workload.members, most if workload.device.type != "cpu" else workload.members)
    if workers == 1:
        raise Unavailable("needs at least 2 members and 2 cores")
    if channels_last:
        check_convolutions(workload.models([0])[0])
    started = _Workers(workload, workers, compiled, channels_last)
    return Running(started.step, started.close, cores=workers)


def start_compiled(workload: Workload) -> Running:
    """The workers with all that torch has."""
    return start(workload, compiled=True)


def start_channels_last(workload: Workload) -> Running:
    """The eager workers, convolutions in channels_last."""
    return start(workload, channels_last=True)


def start_compiled_channels_last(workload: Workload) -> Running:
    """The compiled workers, convolutions in channels_last."""
    return start(workload, compiled=True, channels_last=True)
