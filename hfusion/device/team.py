"""A team of threads of this process, one per core, that run the parts of one job in parallel (``team.c``).

The calling thread may be one of them. While they work they do not hold Python's lock; between jobs they spin for a
while, and then sleep. Steps with the same number of threads share a team; it ends with the last of them. In a forked
process, which has only one thread, a team starts its threads again.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import copy_context
from functools import cache
from pathlib import Path
from threading import Event, Lock, Thread, local
from weakref import WeakValueDictionary, finalize

import torch

from hfusion.device import native
from hfusion.torch_private.replaced_functions import replaced

SOURCE = Path(__file__).with_name("team.c")

# Size of the buffer for the text of an error, in bytes.
_ROOM = 2048

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Setting(ctypes.Structure):
    """The struct of the same layout in `team.c`."""

    _fields_ = (("threads", _POINTER), ("set_threads", _POINTER), ("set_mkl", _POINTER))


class PieceError(RuntimeError):
    """Piece number ``piece`` of a job failed; the message gives the reason."""

    def __init__(self, piece: int, why: str) -> None:
        super().__init__(why)
        self.piece = piece


@cache
def _functions() -> ctypes.CDLL:
    handle = native.library(SOURCE)
    assert not isinstance(handle, str), handle
    handle.team_make.argtypes, handle.team_make.restype = [_INTEGER, _INTEGER, ctypes.POINTER(_Setting)], _POINTER
    for function in (handle.team_work, handle.team_close):
        function.argtypes, function.restype = [_POINTER], None
    handle.team_run.argtypes = [_POINTER, _POINTER, _POINTER, _INTEGER, ctypes.c_int, ctypes.c_char_p, _INTEGER]
    handle.team_run.restype = _INTEGER
    return handle


@cache
def _setting() -> _Setting:
    """Return functions by which a thread sets its own number of torch threads, as `torch.set_num_threads` does.

    Each call drops oneDNN's caches, so it must not happen at each step. Empty if the functions are not found.
    """
    try:
        shared_library = torch_library()
        functions = [shared_library.omp_get_max_threads, shared_library.omp_set_num_threads]
        if torch.backends.mkl.is_available():
            functions.append(shared_library.MKL_Set_Num_Threads_Local)
    except (OSError, AttributeError):
        return _Setting()
    return _Setting(*(ctypes.cast(function, _POINTER).value for function in functions))


class Team:
    """A team of ``threads`` threads, each of which computes with ``inner`` torch threads.

    ``joined``: the calling thread is one of them, if that is possible.
    """

    def __init__(self, threads: int, inner: int, joined: bool) -> None:
        self.threads, self._inner = threads, inner
        self._joins = joined and bool(_setting().threads)
        self._start()

    def _start(self) -> None:
        functions, threads = _functions(), self.threads - self._joins
        address = functions.team_make(threads, self._inner, _setting())
        if not address:
            raise MemoryError("no memory for a team of threads")
        self._process, self._address, self._lock, self._run = os.getpid(), address, Lock(), functions.team_run
        ready = [Event() for _ in range(threads)]
        before = torch.get_num_threads()
        for number, event in enumerate(ready):
            # The threads hold no reference to the team, so that it can be freed.
            Thread(target=stay, args=(address, self._inner, event), name=f"hfusion-{number}", daemon=True).start()
        for event in ready:
            event.wait()
        # Each thread has set its own number of torch threads, and also the default of later threads.
        torch.set_num_threads(before)
        finalize(self, _close, address, self._process)

    def run(self, piece: int, work: int, pieces: int) -> None:
        """Run a job of ``pieces`` pieces. ``piece``: address of a `team.c` function for a piece; ``work``: of its data.

        Returns or raises after all threads have finished. Raises PieceError if a piece failed.
        """
        message = ctypes.create_string_buffer(_ROOM)
        if self._process != os.getpid():
            self._start()
        with self._lock:
            failed = self._run(self._address, piece, work, pieces, self._joins, message, _ROOM)
        if failed >= 0:
            raise PieceError(failed, message.value.decode(errors="replace"))


def stay(address: int, inner: int, ready: Event) -> None:
    """Run the parts that a thread of a team is given. It holds no lock while its team has no job."""
    # The first read initializes the number of this thread to the last one set in any thread, so read before setting.
    torch.get_num_threads()
    torch.set_num_threads(inner)
    torch.set_grad_enabled(False)
    ready.set()
    _functions().team_work(address)


def _close(address: int, process: int) -> None:
    # A forked child has the team's memory, but none of its threads, one of which may have held the lock.
    if os.getpid() == process:
        _functions().team_close(address)


_teams: WeakValueDictionary[tuple[int, int, bool], Team] = WeakValueDictionary()


def team(threads: int, inner: int = 1, joined: bool = False) -> Team:
    """Return the shared team of this process with these numbers of threads. It lives as long as callers hold it."""
    key = threads, inner, joined
    shared_team = _teams.get(key)
    if shared_team is None:
        shared_team = _teams[key] = Team(threads, inner, joined)
    return shared_team


@cache
def address_of(function: str) -> int:
    """Return the address of a function of `team.c`."""
    return ctypes.cast(getattr(_functions(), function), _POINTER).value or 0


_active = local()


def active_team() -> Team | None:
    """Return the team that currently helps this thread; None if there is none."""
    return getattr(_active, "team", None)


def helped_by(team: Team | None) -> AbstractContextManager[None]:
    """Context manager: kernels that this thread calls may run on the threads of ``team``."""
    return replaced(_active, {"team": team})


# OpenMP threads, with which torch computes an operator on several cores.
#
# GNU's runtime keeps a team of threads for each thread that has ever computed in parallel. If all teams together have
# more threads than there are processors, threads sleep immediately after their work, and each operator has to wake
# them.

# omp_pause_soft of OpenMP 5.0: released resources are restored when needed.
_SOFT = 1


def as_caller(run: Callable[[], object]) -> Callable[[], object]:
    """Return ``run`` for a new thread: with the context variables, default device and torch threads of this thread."""
    context, device, threads = copy_context(), torch.get_default_device(), torch.get_num_threads()

    def called() -> None:
        # A new thread begins with its own number of threads, and kernels may round by it.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.get_default_device() != device:
            torch.set_default_device(device)
        context.run(run)

    return called


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Context manager: set the number of torch threads for operators that this thread calls."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def release_team() -> None:
    """End the team of this thread, which is about to wait; a new one starts when needed.

    Does nothing with runtimes other than GNU's, whose threads belong to no single thread.
    """
    if (pause := _pause()) is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], object] | None:
    """Return omp_pause_resource_all of GNU's runtime; None if torch uses another one."""
    try:
        runtime = torch_library()
        # The runtimes of LLVM and Intel have this function besides those of OpenMP.
        return None if hasattr(runtime, "kmp_set_defaults") else runtime.omp_pause_resource_all
    except (OSError, AttributeError):
        return None


# Torch's shared library for CPUs.


def torch_library() -> ctypes.CDLL:
    """Load torch's CPU library, which also gives access to OpenMP and MKL. Raises OSError."""
    return ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
