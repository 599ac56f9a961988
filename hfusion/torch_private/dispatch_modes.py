"""The modes and the transforms of torch.func that a call of a thread passes through, and tensors without values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, overrides
from torch._C import DisableTorchFunction as DisableTorchFunction
from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
from torch._dispatch.python import enable_python_dispatcher as enable_python_dispatcher
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._guards import detect_fake_mode as detect_fake_mode
from torch._subclasses.fake_tensor import DataDependentOutputException as DataDependentOutputException
from torch._subclasses.fake_tensor import DynamicOutputShapeException as DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedFakeTensorException as UnsupportedFakeTensorException
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.amp.autocast_mode import _enter_autocast as enter_autocast
from torch.amp.autocast_mode import _exit_autocast as exit_autocast
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch as no_dispatch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes

# What is imported here for other files, under other names than torch's.
__all__ = ["disable_current_modes", "enter_autocast", "exit_autocast"]


class PreDispatchMode(SchemaCheckMode):
    """A `TorchDispatchMode` that sees operators before torch decomposes them, as `torch.export` does.

    Of the modes that torch accepts there, the one that checks schemas is the base class that adds nothing else.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)


def in_dispatch_mode() -> bool:
    """Return whether a `TorchDispatchMode` is active in this thread."""
    return torch._C._len_torch_dispatch_stack() > 0


# Returns the active `TorchFunctionMode` objects of this thread, the outermost first.
function_modes: Callable[[], list[TorchFunctionMode]] = overrides._get_current_function_mode_stack


def replace_function_modes(modes: list[TorchFunctionMode]) -> None:
    """Make ``modes`` the active `TorchFunctionMode` objects of this thread."""
    for _ in function_modes():
        overrides._pop_mode()
    for mode in modes:
        overrides._push_mode(mode)


# Autocast: whether it is on for any device, and the calls that enter and leave it in exported graphs.


# Returns whether autocast is on for devices of any type in this thread.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled


# Tensors without values, by which torch infers shapes.


def with_dynamic_dims(mode: FakeTensorMode, tensor: Tensor, dynamic: Sequence[bool], name: str) -> Tensor:
    """Return the fake tensor of ``tensor``, whose sizes are symbols at the dims that are ``dynamic``.

    Args:
        mode: the mode of the fake tensor, which has a ``shape_env``.
        tensor: a tensor with values, whose sizes are the hints of the symbols.
        dynamic: for each dim, whether its size is a symbol.
        name: the source of the symbols in guards.
    """
    # Imported late: the first import of Dynamo takes a second.
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    sizes = [DimDynamic.DYNAMIC if is_dynamic else DimDynamic.STATIC for is_dynamic in dynamic]
    context: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(tensor, symbolic_context=context, source=ConstantSource(name))


# The transforms of torch.func that a thread is in, and forward-mode derivatives, which they take, too.

_functorch: Any = torch._C._functorch
_autograd: Any = torch._C._autograd


def in_transform() -> bool:
    """Return whether this thread is in a transform of torch.func, or in a `torch.autograd.forward_ad.dual_level`.

    False while `torch.compile` traces, which handles both.
    """
    active = _functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return active and not torch.compiler.is_compiling()


def has_transforms_active() -> bool:
    """Return whether this thread is in a transform of torch.func, also while `torch.compile` traces."""
    return _functorch.peek_interpreter_stack() is not None


def in_forward_mode() -> bool:
    """Return whether forward-mode derivatives may flow."""
    return bool(forward_ad._current_level >= 0)


def derivative_order() -> int:
    """Return how many transforms of torch.func around this call take derivatives, of either mode."""
    return _count(_functorch.TransformType.Grad, _functorch.TransformType.Jvp)


def in_vmap() -> bool:
    """Return whether `torch.vmap` is around this call."""
    return _count(_functorch.TransformType.Vmap) > 0


def _count(*kinds: Any) -> int:
    return sum(transform.key() in kinds for transform in _functorch.get_interpreter_stack() or ())


@contextmanager
def outside_transforms() -> Iterator[None]:
    """Context manager: hide outer transforms of torch.func and every outer `torch.autograd.forward_ad.dual_level`."""
    refusal = _autograd._saved_tensors_hooks_get_disabled_error_message()
    # Of `torch.autograd.functional.jacobian(vectorize=True)`.
    depth = torch._C._vmapmode_increment_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    with temporarily_clear_interpreter_stack(), forward_ad._set_fwd_grad_enabled(False):
        if refusal is not None:
            _autograd._saved_tensors_hooks_enable()
        try:
            yield
        finally:
            for _ in range(depth - 1):
                torch._C._vmapmode_increment_nesting()
            if refusal is not None:
                _autograd._saved_tensors_hooks_disable(refusal)


@contextmanager
def vmap_fallback_refused() -> Iterator[None]:
    """Context manager: `torch.vmap` raises for operators that it would run in a loop over samples."""
    before = _functorch._is_vmap_fallback_enabled()
    _functorch._set_vmap_fallback_enabled(False)
    try:
        yield
    finally:
        _functorch._set_vmap_fallback_enabled(before)


# Returns whether a transform of torch.func has wrapped a tensor.
is_wrapped: Callable[[Tensor], bool] = _functorch.is_functorch_wrapped_tensor


def unwrapped(tensor: Tensor) -> Tensor:
    """Return the plain tensor inside ``tensor``, as a leaf; for a tensor that `torch.vmap` batches, its first sample.

    Return ``tensor`` itself if no transform has wrapped it.
    """
    if not is_wrapped(tensor):
        return tensor
    plain, batch_dims = tensor, []
    while is_wrapped(plain):
        if _functorch.is_batchedtensor(plain):
            batch_dims.append(_functorch.maybe_get_bdim(plain))
        plain = _functorch.get_unwrapped(plain)
    for dim in reversed(batch_dims):
        plain = plain.select(dim, 0)
    return plain.detach().requires_grad_(tensor.requires_grad)
