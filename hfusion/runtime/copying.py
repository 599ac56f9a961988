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
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from hfusion import native


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

# Bytes that are copied in less time than it takes to wake a thread.
_SMALL = 1 << 18


class Ticket(Protocol):
    """Copies that somebody asked for."""

    @property
    def done(self) -> bool:
        """Whether ``wait`` would not block."""

    def wait(self) -> tuple[float, float]:
        """Until all is copied; when that began and ended, as ``perf_counter`` counts. Raises what copying raised."""


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


class _Job(ctypes.Structure):
    """As in ``copier.c``."""

    _fields_ = (
        ("next", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("targets", ctypes.c_void_p),
        ("sources", ctypes.c_void_p),
        ("sizes", ctypes.c_void_p),
        ("began", ctypes.c_double),
        ("ended", ctypes.c_double),
        ("past", ctypes.c_int32),
        ("done", ctypes.c_int32),
    )


@dataclass(frozen=True)
class _Done:
    """Copies that took place at once."""

    times: tuple[float, float]
    done: bool = True

    def wait(self) -> tuple[float, float]:
        return self.times


class _NativeTicket:
    """A job in C; its thread holds it until it is done."""

    def __init__(self, thread: _NativeThread, moves: Moves, *, past: bool) -> None:
        self._thread = thread
        self._moves = moves
        count = len(moves)
        ends = [move.target.data_ptr() for move in moves] + [move.source.data_ptr() for move in moves]
        self._table = array("Q", ends + [move.size for move in moves])
        start, row = self._table.buffer_info()[0], count * self._table.itemsize
        self.job = _Job(None, count, start, start + row, start + 2 * row, 0.0, 0.0, past)

    @property
    def done(self) -> bool:
        return bool(self.job.done)

    def wait(self) -> tuple[float, float]:
        if not self.job.done:
            self._thread.wait(self.job)
        self._moves = ()
        return self.job.began + self._thread.offset, self.job.ended + self._thread.offset


class _NativeThread:
    """The thread of ``copier.c``, from the first job on. ``offset``: from its clock to ``perf_counter``."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library: Any = library
        library.copier_now.restype = ctypes.c_double
        library.copier_open.restype = ctypes.c_void_p
        for function in (library.copier_submit, library.copier_wait):
            function.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Job)]
        library.copier_close.argtypes = [ctypes.c_void_p]
        self.offset = perf_counter() - library.copier_now()
        self._tickets: deque[_NativeTicket] = deque()
        self._lock = Lock()
        self._handle: int | None = None

    @property
    def idle(self) -> bool:
        """Whether all jobs are done."""
        with self._lock:
            while self._tickets and self._tickets[0].done:
                self._tickets.popleft()
            return not self._tickets

    def submit(self, ticket: _NativeTicket) -> None:
        with self._lock:
            if self._handle is None:
                self._handle = self._library.copier_open()
            if self._handle is None:
                raise MemoryError("no thread could be started that copies")
            self._tickets.append(ticket)
            self._library.copier_submit(self._handle, ticket.job)

    def wait(self, job: _Job) -> None:
        # Once it is closed all jobs are done.
        if self._handle is not None:
            self._library.copier_wait(self._handle, job)

    def close(self) -> None:
        with self._lock:
            if self._handle is not None:
                self._library.copier_close(self._handle)
                self._handle = None


class NativeCopier:
    """Host memory to host memory, by a thread of C; ``past`` the processor's caches if nobody reads it soon."""

    def __init__(self, thread: _NativeThread, *, past: bool) -> None:
        self._thread = thread
        self._past = past

    def submit(self, moves: Moves) -> Ticket:
        if self._thread.idle and sum(move.size for move in moves) <= _SMALL:
            began = perf_counter()
            copy_now(moves)
            return _Done((began, perf_counter()))
        ticket = _NativeTicket(self._thread, moves, past=self._past)
        self._thread.submit(ticket)
        return ticket

    def close(self) -> None:
        self._thread.close()


class _FutureTicket:
    def __init__(self, future: Future[tuple[float, float]]) -> None:
        self._future = future

    @property
    def done(self) -> bool:
        return self._future.done()

    def wait(self) -> tuple[float, float]:
        return self._future.result()


class ThreadCopier:
    """Between any devices, by a thread of Python; on CUDA in a stream of its own."""

    def __init__(self, name: str, device: torch.device, threads: int) -> None:
        self._pool = ThreadPoolExecutor(1, name)
        self._threads = threads
        # Kept: torch's allocator has a pool of memory for every stream.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def submit(self, moves: Moves) -> Ticket:
        return _FutureTicket(self._pool.submit(self._copy, moves))

    def _copy(self, moves: Moves) -> tuple[float, float]:
        # A new thread begins with its own number of threads.
        if torch.get_num_threads() != self._threads:
            torch.set_num_threads(self._threads)
        began = perf_counter()
        with torch.cuda.stream(self._stream):
            copy_now(moves)
        if self._stream is not None:
            self._stream.synchronize()
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
