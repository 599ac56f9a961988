"""Context managers that set the state of torch, the thread and the module while members' code is traced or checked.

Captures are made without autocast, which applies when their program runs; `told_autocast` shows forward the autocast
state of the caller. Buffers that forward assigns (``self.mean = ...``) are written instead: torch.export sees such
assignments in the root module only (2.11 to 2.15).
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.utils import _pytree as pytree

from hfusion.capture.registered_tensors import holder_of
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import is_user_code
from hfusion.core.member_random import seeded
from hfusion.device.backend import AUTOCAST_QUESTIONS, draws_kept, python_draws_kept
from hfusion.torch_private.autograd_engine import without_saved_tensor_hooks
from hfusion.torch_private.dispatch_modes import disable_current_modes, function_modes, replace_function_modes
from hfusion.torch_private.module_hooks import without_cached_parametrizations
from hfusion.torch_private.replaced_functions import silence_tracers, torch_functions_replaced


@contextmanager
def told_autocast(active: Collection[str]) -> Iterator[None]:
    """Context manager: user code in this thread sees autocast as enabled for the device types ``active``.

    Inside autocast regions of its own, the code sees their real state.

    Raises:
        FusionError: the code fails because of that.
    """
    was_asked = False
    thread_id, outer = threading.get_ident(), _nesting()

    def answering(name: str, original: Callable[..., bool]) -> Callable[..., bool]:
        def answer(*args: Any) -> bool:
            nonlocal was_asked
            asks = is_user_code(sys._getframe(1).f_globals.get("__name__", ""))
            if asks and threading.get_ident() == thread_id and _nesting() == outer + 1:
                is_active = (args[0] if args else AUTOCAST_QUESTIONS[name]) in active
                was_asked |= is_active
                return is_active
            return original(*args)

        return answer

    try:
        with torch_functions_replaced(tuple(AUTOCAST_QUESTIONS), answering):
            yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not was_asked:
            raise
        raise FusionError(
            f"forward checks whether autocast is on, and then runs code that fails without it ({error}); let "
            "autocast cast what torch's operators take, or switch it on inside forward"
        ) from error


def _nesting() -> int:
    """Return the number of nested autocast regions of this thread."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


@contextmanager
def assigned_as_writes(module: nn.Module) -> Iterator[None]:
    """Context manager: at the end of each call of ``module``, copy assigned buffers into the original ones."""
    saved_buffers: list[dict[str, Tensor]] = []

    def save_buffers(module: nn.Module, args: Any) -> None:
        saved_buffers.append(dict(module.named_buffers(remove_duplicate=False)))

    def copy_assigned_buffers(module: nn.Module, args: Any, output: Any) -> Any:
        buffers = saved_buffers.pop()
        new_buffers = dict(module.named_buffers(remove_duplicate=False))
        changed = [key for key, tensor in buffers.items() if new_buffers.get(key) is not tensor]
        # Outputs that share memory with an old buffer must keep the old values.
        memory = {buffers[key].untyped_storage()._cdata for key in changed}
        output = pytree.tree_map_only(
            Tensor,
            lambda x: x.clone() if x.layout is torch.strided and x.untyped_storage()._cdata in memory else x,
            output,
        )
        for key in changed:
            old, new = buffers[key], new_buffers.get(key)
            if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
                raise FusionError(
                    f"forward assigns {key}, but not a tensor of the same shape, dtype and device; write into the "
                    "buffer"
                )
            old.copy_(new.detach())
            holder, name, _ = holder_of(module, key)
            holder[name] = old
        return output

    handles = [module.register_forward_pre_hook(save_buffers), module.register_forward_hook(copy_assigned_buffers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


# Run members' code without side effects on the state of the process.


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
