"""What forward asks of the thread that calls it: whether autocast is on. A graph has the answer in it.

Captures are made without autocast, which acts when their program runs; what forward is told meanwhile is what holds
outside of the capture.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import is_installed
from hfusion.device.backend import AUTOCAST_QUESTIONS


@contextmanager
def told_autocast(active: Collection[str]) -> Iterator[None]:
    """While active, this thread's code is told that autocast is on for devices of the types ``active``.

    But in regions of its own: those within the one that a capture is made in.

    Raises:
        FusionError: code that was told so fails.
    """
    asked = False
    here, outer = threading.get_ident(), _nesting()
    originals = {name: getattr(torch, name) for name in AUTOCAST_QUESTIONS if hasattr(torch, name)}

    def told(name: str, original: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            nonlocal asked
            of_us = threading.get_ident() == here and not is_installed(sys._getframe(1).f_globals.get("__name__"))
            if of_us and _nesting() == outer + 1:
                found = (args[0] if args else AUTOCAST_QUESTIONS[name]) in active
                asked |= found
                return found
            return original(*args)

        return answer

    for name, original in originals.items():
        setattr(torch, name, told(name, original))
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not asked:
            raise
        raise FusionError(
            f"forward asks torch whether autocast is on, and then computes what fails without it ({error}); let "
            "autocast cast what torch's operators take, or switch it on inside forward"
        ) from error
    finally:
        for name, original in originals.items():
            setattr(torch, name, original)


def _nesting() -> int:
    """How many regions of autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
