"""Run other people's code without a trace: with the process as it was before."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import overrides
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.nn.utils import parametrize
from torch.utils._python_dispatch import _disable_current_modes

from hfusion.core.member_random import seeded
from hfusion.device.generators import draws_kept
from hfusion.torch_private.tracer_warnings import silence_tracers


@contextmanager
def without_trace() -> Iterator[None]:
    """Gradients are on inside; random states and the default dtype are afterwards as before.

    Warnings are not shown. Nothing is drawn from members' seeds: a step draws the same with and without a self-check.
    """
    dtype, python, numpy = torch.get_default_dtype(), random.getstate(), np.random.get_state()
    try:
        with silence_tracers(), draws_kept(), seeded(None), torch.enable_grad(), apart():
            yield
    finally:
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def apart() -> Iterator[None]:
    """Context manager: hide computations from an outer checkpoint, export, dispatch mode or `parametrize.cached`.

    Tried on torch 2.11 and 2.13.
    """
    cached = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = 0, {}
    graph = torch._C._autograd
    outer = []
    while (hooks := graph._top_saved_tensors_default_hooks(True)) is not None:
        outer.append(hooks)
        graph._pop_saved_tensors_default_hooks()
    try:
        with _outside_export(), _disable_current_modes():
            yield
    finally:
        parametrize._cache_enabled, parametrize._cache = cached
        for pack, unpack in reversed(outer):
            graph._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def _outside_export() -> Iterator[None]:
    """Hide computations from the mode by which an outer `torch.export` records autocast and grad mode.

    It would record those of a capture, without a tensor in them: a program that `torch.export.load` refuses.
    """
    modes = overrides._get_current_function_mode_stack()
    others = [mode for mode in modes if not isinstance(mode, PreDispatchTorchFunctionMode)]
    if len(others) == len(modes):
        yield
        return
    _replace_function_modes(others)
    try:
        yield
    finally:
        _replace_function_modes(modes)


def _replace_function_modes(modes: list[overrides.TorchFunctionMode]) -> None:
    for _ in overrides._get_current_function_mode_stack():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)
