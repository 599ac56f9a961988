"""Members' own code twice with one result: what it draws at random depends, while `repeatable`, on its place alone."""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from hfusion.device.backend import random_states_kept

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
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        # What is called inside is a part of this call.
        _active.count = None
        try:
            yield
        finally:
            _active.count = call + 1


def repeat(model: nn.Module, methods: Sequence[tuple[str, str]], member: int) -> None:
    """Let ``methods`` of ``model``, pairs of a module's path and a name, run as the array runs them for ``member``."""
    for path, name in dict.fromkeys(methods):
        module = model.get_submodule(path)
        vars(module)[name] = _repeated(getattr(module, name), member)


def _repeated(original: Any, member: int) -> Any:
    @functools.wraps(original)
    def method(*args: Any, **kwargs: Any) -> Any:
        call = next_call()
        if call is None:
            return original(*args, **kwargs)
        # Not to be told what to draw, as the rest of the member is.
        with _disable_current_modes(), seeded(call, member):
            return original(*args, **kwargs)

    return method
