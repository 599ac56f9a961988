"""Who exports: torch tells it to the whole process, where only one thread does.

Private to torch, tried on 2.11 and 2.13: the two flags behind `torch.compiler.is_compiling` and `is_exporting`, and
the function that sets them for an export.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._guards import detect_fake_mode

_FLAGS = ("_is_compiling_flag", "_is_exporting_flag")


class _InThisThread:
    """True in the thread that made it; elsewhere what was true before."""

    def __init__(self, before: object) -> None:
        self._thread = threading.get_ident()
        self._before = before

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread or bool(self._before)


@contextmanager
def _state() -> Iterator[None]:
    before = {name: getattr(torch.compiler, name) for name in _FLAGS}
    for name, flag in before.items():
        setattr(torch.compiler, name, _InThisThread(flag))
    try:
        yield
    finally:
        for name, flag in before.items():
            setattr(torch.compiler, name, flag)


@contextmanager
def told_here_only() -> Iterator[None]:
    """While active, an export is one for its own thread only: others train, and draw, as without it."""
    # Imported late: it imports Dynamo.
    from torch.export import _trace as trace

    place: Any = trace

    before = place._compiling_state_context
    place._compiling_state_context = _state
    try:
        yield
    finally:
        place._compiling_state_context = before


def exporting() -> bool:
    """Whether this thread is in an export; that of another thread sets the flag, too, but no mode of fake tensors."""
    return bool(torch.compiler.is_exporting()) and detect_fake_mode() is not None
