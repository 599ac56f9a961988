"""Threads of OpenMP by which torch computes one operator on several cores.

GNU's runtime keeps a team for every thread that has ever computed so. Where all teams together have more threads than
there are processors, none of them looks for its next work before it sleeps, and each operator pays for waking them.
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
    """Operators that this thread calls compute with so many of torch's threads."""
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
    """omp_pause_resource_all of the library that torch is linked to."""
    if sys.platform != "linux":
        return _nothing
    try:
        found = torch_library().omp_pause_resource_all
        symbol = _Symbol()
        known = ctypes.CDLL(None).dladdr(ctypes.cast(found, ctypes.c_void_p), ctypes.byref(symbol))
    except (OSError, AttributeError):
        return _nothing
    return found if known and b"libgomp" in (symbol.file or b"") else _nothing


def _nothing(kind: int) -> None:
    return
