"""The transforms of torch.func that a thread is in, and forward-mode derivatives, which they take, too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad

_functorch: Any = torch._C._functorch
_autograd: Any = torch._C._autograd


def in_transform() -> bool:
    """Return whether this thread is in a transform of torch.func, or in a `torch.autograd.forward_ad.dual_level`.

    False while `torch.compile` traces, which handles both.
    """
    return not torch.compiler.is_compiling() and (has_transforms_active() or in_forward_mode())


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


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform of torch.func has wrapped ``tensor``."""
    return bool(_functorch.is_functorch_wrapped_tensor(tensor))


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
