"""Run other people's code without a trace: with the process as it was before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode

from hfusion.core.member_random import seeded
from hfusion.device.generators import draws_kept, python_draws_kept
from hfusion.torch_private.autograd_engine import without_saved_tensor_hooks
from hfusion.torch_private.dispatch_modes import disable_current_modes, function_modes, replace_function_modes
from hfusion.torch_private.module_hooks import without_cached_parametrizations
from hfusion.torch_private.tracer_warnings import silence_tracers


@contextmanager
def without_trace() -> Iterator[None]:
    """Gradients are on inside; random states and the default dtype are afterwards as before.

    Warnings are not shown. Nothing is drawn from members' seeds: a step draws the same with and without a self-check.
    """
    dtype = torch.get_default_dtype()
    try:
        with silence_tracers(), draws_kept(), seeded(None), torch.enable_grad(), apart():
            yield
    finally:
        torch.set_default_dtype(dtype)


@contextmanager
def apart() -> Iterator[None]:
    """Context manager: hide computations from an outer checkpoint, export, dispatch mode or `parametrize.cached`.

    Python's and numpy's random states are afterwards as before.
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
def _outside_export() -> Iterator[None]:
    """Hide computations from the mode by which an outer `torch.export` records autocast and grad mode.

    It would record those of a capture, without a tensor in them: a program that `torch.export.load` refuses.
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
