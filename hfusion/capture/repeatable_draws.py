"""Repeat the draws of eager fallbacks: inside `repeatable`, they depend only on the number of a call and its member."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import nn

from hfusion.capture.method_interception import Island, Method, intercepted
from hfusion.device.backend import random_states_kept, seed_in_use
from hfusion.torch_private.dispatch_modes import disable_current_modes

_active = threading.local()


@contextmanager
def repeatable() -> Iterator[None]:
    """Context manager: number the calls of one run from 0, so that `seeded` seeds each of them."""
    before = getattr(_active, "count", None)
    _active.count = 0
    try:
        yield
    finally:
        _active.count = before


def next_call() -> int | None:
    """Return the number of a new call; None if it need not be repeatable."""
    count: int | None = getattr(_active, "count", None)
    if count is not None:
        _active.count = count + 1
    return count


@contextmanager
def seeded(call: int | None, member: int) -> Iterator[None]:
    """Context manager: seed random numbers by the call and the member; torch's states are restored at the end."""
    if call is None:
        yield
        return
    seed = 1 + call * 100_003 + member
    with random_states_kept():
        seed_in_use(seed)
        random.seed(seed)
        np.random.seed(seed)
        # Calls inside this one are not numbered.
        _active.count = None
        try:
            yield
        finally:
            _active.count = call + 1


@contextmanager
def repeating(model: nn.Module, islands: Iterable[Island], member: int) -> Iterator[None]:
    """Context manager: let ``islands`` of ``model`` draw the same numbers as in the array for ``member``."""

    def call(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = next_call()
        if number is None:
            return method.original(*args, **kwargs)
        # Active modes may replace the draws of the rest of the member, but not these.
        with disable_current_modes(), seeded(number, member):
            return method.original(*args, **kwargs)

    with intercepted(model, dict.fromkeys(islands), call):
        yield
