"""OpenMP threads, with which torch computes an operator on several cores.

GNU's runtime keeps a team of threads for each thread that has ever computed in parallel. If all teams together have
more threads than there are processors, threads sleep immediately after their work, and each operator has to wake them.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

from hfusion.torch_private.shared_library import torch_library

# omp_pause_soft of OpenMP 5.0: released resources are restored when needed.
_SOFT = 1


class _Symbol(ctypes.Structure):
    """Dl_info of dladdr(3)."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


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
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    """Return omp_pause_resource_all of GNU's runtime; a function that does nothing if torch uses another one."""
    if sys.platform != "linux":
        return _nothing
    try:
        pause = torch_library().omp_pause_resource_all
        symbol = _Symbol()
        status = ctypes.CDLL(None).dladdr(ctypes.cast(pause, ctypes.c_void_p), ctypes.byref(symbol))
    except (OSError, AttributeError):
        return _nothing
    return pause if status and b"libgomp" in (symbol.file or b"") else _nothing


def _nothing(kind: int) -> None:
    return
