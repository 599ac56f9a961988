"""Run members' own code twice with the same result: inside `repeatable`, its draws depend only on its place."""

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
    """While active, `seeded` numbers the calls of one run, and seeds each of them."""
    before = getattr(_active, "count", None)
    _active.count = 0
    try:
        yield
    finally:
        _active.count = before


def next_call() -> int | None:
    """The number of a call that begins; None where it need not be repeatable."""
    count: int | None = getattr(_active, "count", None)
    if count is not None:
        _active.count = count + 1
    return count


@contextmanager
def seeded(call: int | None, member: int) -> Iterator[None]:
    """Random numbers that follow from the call and the member; afterwards torch's are as before."""
    if call is None:
        yield
        return
    seed = 1 + call * 100_003 + member
    with random_states_kept():
        seed_in_use(seed)
        random.seed(seed)
        np.random.seed(seed)
        # What is called inside is a part of this call.
        _active.count = None
        try:
            yield
        finally:
            _active.count = call + 1


@contextmanager
def repeating(model: nn.Module, islands: Iterable[Island], member: int) -> Iterator[None]:
    """While active, ``islands`` of ``model`` run as the array runs them for ``member``."""

    def call(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        number = next_call()
        if number is None:
            return method.original(*args, **kwargs)
        # Its draws must not be replaced, as those of the rest of the member are.
        with disable_current_modes(), seeded(number, member):
            return method.original(*args, **kwargs)

    with intercepted(model, dict.fromkeys(islands), call):
        yield
