"""Copies of memory beside the computing: whoever asks for some gets a ticket.

On a CPU a thread of C copies (``copier.c``): Python's threads share a lock, and each time one of them takes it between
two operators, the thread that computes sleeps and must be woken.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from struct import Struct
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion.device import native
from hfusion.device.backend import backend


class Move(NamedTuple):
    """``size`` bytes from one place to another: two storages, or two contiguous tensors of one dtype."""

    target: Any
    source: Any
    size: int

    @staticmethod
    def of(target: Tensor, source: Tensor) -> Move:
        """All of a tensor."""
        return Move(target, source, target.nbytes)


Moves: TypeAlias = Sequence[Move]

SOURCE = Path(__file__).with_name("copier.c")

# Bytes that are copied in less time than it takes to ask a thread, what they lie in not being in the caches.
_SMALL = 1 << 16


class Ticket(Protocol):
    """Copies that somebody asked for. ``moves``: the first so many of them; None: all."""

    def done(self, moves: int | None = None) -> bool:
        """Whether ``wait`` would not block."""

    def wait(self, moves: int | None = None) -> tuple[float, float]:
        """Until they are copied; when that began and ended, as ``perf_counter`` counts. Raises what copying raised."""


class Copier(Protocol):
    """Copies one job after the other."""

    def submit(self, moves: Moves) -> Ticket:
        """Begin to copy, after all that was asked for before. The sources must stay as they are until it is done."""

    def close(self) -> None:
        """Wait for all; no thread is left."""


def copy_now(moves: Moves) -> None:
    """Copy here and now."""
    for target, source, _ in moves:
        target.copy_(source, non_blocking=True)


# Words of a job and of a row in ``copier.c``, and where what it writes there lies.
_JOB, _MOVED, _BEGAN = 6, 3, 5
_ROW, _ENDED = 4, 3
_TIME = Struct("d")


@dataclass(frozen=True)
class _Done:
    """Copies that took place at once."""

    times: tuple[float, float]

    def done(self, moves: int | None = None) -> bool:
        return True

    def wait(self, moves: int | None = None) -> tuple[float, float]:
        return self.times


class _NativeTicket:
    """A job in C; its thread holds it until it is done."""

    def __init__(self, thread: _NativeThread, moves: Moves, *, past: bool) -> None:
        self._thread = thread
        self._moves = moves
        self._count = len(moves)
        words = [0, self._count, past, 0, 0, 0]
        for target, source, size in moves:
            words += (target.data_ptr(), source.data_ptr(), size, 0)
        self._words = array("Q", words)
        self.job = self._words.buffer_info()[0]

    def done(self, moves: int | None = None) -> bool:
        return self._words[_MOVED] >= (self._count + 1 if moves is None else moves)

    def wait(self, moves: int | None = None) -> tuple[float, float]:
        if not self.done(moves):
            self._thread.wait(self.job, self._count + 1 if moves is None else moves)
        if moves is None:
            self._moves = ()
        last = self._count if moves is None else moves
        ended = _JOB + _ROW * (last - 1) + _ENDED if last else _BEGAN
        return self._time(_BEGAN), self._time(ended)

    def _time(self, word: int) -> float:
        """A time in the job, as ``perf_counter`` counts."""
        seconds: float = _TIME.unpack_from(self._words, word * _TIME.size)[0]
        return seconds + self._thread.offset


class _NativeThread:
    """The thread of ``copier.c``, from the first job on. ``offset``: from its clock to ``perf_counter``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library: Any = library
        library.copier_now.restype = ctypes.c_double
        library.copier_open.restype = ctypes.c_void_p
        library.copier_submit.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        library.copier_wait.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
        library.copier_close.argtypes = [ctypes.c_void_p]
        self.offset: float = perf_counter() - library.copier_now()
        self._tickets: deque[_NativeTicket] = deque()
        self._lock = Lock()
        self._handle: int | None = None

    @property
    def idle(self) -> bool:
        """Whether all jobs are done."""
        with self._lock:
            self._forget()
            return not self._tickets

    def _forget(self) -> None:
        """Let go of what is done."""
        while self._tickets and self._tickets[0].done():
            self._tickets.popleft()

    def submit(self, ticket: _NativeTicket) -> None:
        with self._lock:
            if self._handle is None:
                self._handle = self._library.copier_open()
            if self._handle is None:
                raise MemoryError("no thread could be started that copies")
            self._forget()
            self._tickets.append(ticket)
            self._library.copier_submit(self._handle, ticket.job)

    def wait(self, job: int, moved: int) -> None:
        # Once it is closed all jobs are done.
        if self._handle is not None:
            self._library.copier_wait(self._handle, job, moved)

    def close(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._library.copier_close(self._handle)
                self._handle = None


class NativeCopier:
    """Host memory to host memory, by a thread of C.

    ``past``: what nobody reads soon. It is written past the processor's caches, and after all that is not.
    """

    def __init__(self, thread: _NativeThread, *, past: bool) -> None:
        self._thread = thread
        self._past = past

    def submit(self, moves: Moves) -> Ticket:
        if sum(move.size for move in moves) <= _SMALL and self._thread.idle:
            began = perf_counter()
            copy_now(moves)
            return _Done((began, perf_counter()))
        ticket = _NativeTicket(self._thread, moves, past=self._past)
        self._thread.submit(ticket)
        return ticket

    def close(self) -> None:
        self._thread.close()


class _FutureTicket:
    """Its moves are done together: a queue is awaited as a whole."""

    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    def done(self, moves: int | None = None) -> bool:
        return self._future.done()

    def wait(self, moves: int | None = None) -> tuple[float, float]:
        return self._future.result()


class ThreadCopier:
    """Between any devices, by a thread of Python, in a queue of the device for itself."""

    def __init__(self, name: str, device: torch.device, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._threads = threads
        self._queue = backend(device).queue()

    def submit(self, moves: Moves) -> Ticket:
        return _FutureTicket(self._pool.submit(self._copy, moves))

    def _copy(self, moves: Moves) -> tuple[float, float]:
        # A new thread begins with its own number of threads.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        began = perf_counter()
        self._queue.run(partial(copy_now, moves))
        self._queue.wait()
        return began, perf_counter()

    def close(self) -> None:
        self._pool.shutdown()


def copiers(name: str, device: torch.device, threads: int) -> tuple[Copier, Copier]:
    """Who copies to a device and from it: between parts of host memory one, over a bus that goes both ways two."""
    library = native.library(SOURCE) if device.type == "cpu" else ""
    if isinstance(library, ctypes.CDLL):
        thread = _NativeThread(library)
        return NativeCopier(thread, past=False), NativeCopier(thread, past=True)
    return ThreadCopier(f"{name} in", device, threads), ThreadCopier(f"{name} out", device, threads)
