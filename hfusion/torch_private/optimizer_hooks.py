"""Hooks of the steps of optimizers, and calls of optimizers and of `clip_grad_norm_` for which torch has no hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` itself has hooks of its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def count_global_step_hooks() -> int:
    """Return the number of hooks that run at the steps of all optimizers."""
    return len(_optimizers._global_optimizer_pre_hooks) + len(_optimizers._global_optimizer_post_hooks)


def wrap_optimizer_methods(add_param_group: Wrap, zero_grad: Wrap) -> None:
    """Wrap two methods of all optimizers, for the rest of the process."""
    methods: Any = Optimizer
    methods.add_param_group = add_param_group(methods.add_param_group)
    methods.zero_grad = zero_grad(methods.zero_grad)


def wrap_norm(wrap: Wrap) -> None:
    """Wrap the function by which `torch.nn.utils.get_total_norm` groups its tensors, for the rest of the process.

    It is the one that is looked up at each call: code that clips has imported the public functions before.
    """
    clip: Any = clip_grad
    if hasattr(clip, "_group_tensors_by_device_and_dtype"):
        clip._group_tensors_by_device_and_dtype = wrap(clip._group_tensors_by_device_and_dtype)
