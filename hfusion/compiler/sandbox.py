"""Run users' code without side effects on the state of the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from hfusion.core.member_random import seeded
from hfusion.device.backend import draws_kept, python_draws_kept
from hfusion.torch_private.autograd_engine import without_saved_tensor_hooks
from hfusion.torch_private.dispatch_modes import disable_current_modes, function_modes, replace_function_modes
from hfusion.torch_private.module_hooks import without_cached_parametrizations
from hfusion.torch_private.replaced_functions import silence_tracers


@contextmanager
def without_trace() -> Iterator[None]:
    """Context manager: run code with gradients on; random states and the default dtype are restored afterwards.

    Warnings are not shown. Nothing is drawn from members' seeds: a step draws the same with and without a self-check.
    """
    dtype = torch.get_default_dtype()
    try:
        with draws_kept(), silence_tracers(), seeded(None), torch.enable_grad(), apart():
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def apart() -> Iterator[None]:
    """Context manager: hide computations from an outer checkpoint, export, dispatch mode or `parametrize.cached`.

    Python's and numpy's random states are restored afterwards.
    """
    with (
        python_draws_kept(),
        without_cached_parametrizations(),
        without_saved_tensor_hooks(),
        _outside_export(),
        disable_current_modes(),
    ):
        yield


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Context manager: search for reference cycles after more allocations, for one thread at a time.

    A capture creates millions of small objects. The searches took half of its time where large packages are loaded.
    """
    first, *others = gc.get_threshold()
    # 0 turns them off.
    gc.set_threshold(first and max(first, 100_000), *others)
    try:
        yield
    finally:
        gc.set_threshold(first, *others)


@contextmanager
def _outside_export() -> Iterator[None]:
    """Context manager: hide computations from the mode in which an outer `torch.export` records autocast and grad mode.

    It would record changes by a capture without any tensor in them, and `torch.export.load` refuses such a program.
    """
    modes = function_modes()
    others = [mode for mode in modes if not isinstance(mode, PreDispatchTorchFunctionMode)]
    if len(others) == len(modes):
        yield
        return
    replace_function_modes(others)
    try:
        yield
    finally:
        replace_function_modes(modes)
