"""Processes that communicate by gloo, for all tests of a module: each call runs on all of them."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

# Seconds; a rank that waits longer for another never gets what it waits for.
_PATIENCE = 240.0


class Ranks:
    """Calls functions on all ranks."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of each rank, no tensors. Raises AssertionError with the traceback of a failed rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [_answer(pipe) for pipe in self._pipes]
        for right, answer in answers:
            assert right, answer
        return [answer for _, answer in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(_PATIENCE) else (False, "no answer")
    except EOFError:
        return False, "the rank has died"


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        started = [
            context.Process(target=_rank, args=(rank, world, store, child_end), daemon=True)
            for rank, (_, child_end) in enumerate(pipes)
        ]
        for process in started:
            process.start()
        # What a rank that has died held of a pipe is closed then.
        for _, child_end in pipes:
            child_end.close()
        try:
            yield Ranks([parent_end for parent_end, _ in pipes])
        finally:
            for parent_end, _ in pipes:
                with suppress(OSError):
                    parent_end.send(None)
            for process in started:
                process.join(20)
                process.kill()


def _rank(rank: int, world: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        function, args = job
        torch.manual_seed(0)
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()
