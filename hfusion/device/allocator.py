"""Keep the memory of large temporaries in the process, instead of handing it back at every step.

Fused steps make temporaries B times as large as a single model's. glibc's malloc maps such blocks from the kernel and
unmaps them when they are freed, so that every step pays for its page faults again; that can cost more than fusion
gains. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html

Threads other than the first have heaps of at most 64 MiB; larger blocks are mapped again each time, whatever the
settings. If threads share the heap of the process instead, they reuse such blocks, but wait for its lock. For
parameters too large for a heap (four MLPs with layers of 2304 x 2304), `hfusion.train` takes 1.3 times as long with
separate heaps. For smaller parameters, a compiled step on two threads takes up to 1.8 times as long with a shared heap
(16 GRUs).
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
from collections.abc import Callable

# Constants of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGE = (1 << 31) - 1
_HEAP_BYTES = 64 << 20

SETTING = "HFUSION_KEEP_MEMORY"


def keep_large_blocks(largest: int) -> bool:
    """Tell glibc's malloc to reuse freed blocks of any size, for the whole process.

    The environment variable ``HFUSION_KEEP_MEMORY=0`` leaves malloc alone. Returns whether anything was set: other
    platforms and other C libraries are left as they are.

    Args:
        largest: bytes of the largest tensor that threads are known to allocate. They get heaps of their own if it fits
            there; malloc does not change that once a second thread has allocated memory.
    """
    mallopt = _mallopt()
    if os.environ.get(SETTING, "1") == "0" or mallopt is None:
        return False
    heaps = 2 * (os.cpu_count() or 1) if largest < _HEAP_BYTES else 1
    # A heap whose blocks are all free stays if it is not larger than the pad.
    options = {_MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: _LARGE, _TOP_PAD: _HEAP_BYTES, _ARENA_MAX: heaps}
    return all(bool(mallopt(option, value)) for option, value in options.items())


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    return ctypes.CDLL(None).mallopt if platform.libc_ver()[0] == "glibc" else None
