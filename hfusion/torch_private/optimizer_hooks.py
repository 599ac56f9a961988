"""Hooks of the steps of optimizers, and calls of optimizers and of `clip_grad_norm_` for which torch has no hook."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim import optimizer as _optimizers

from hfusion.torch_private.autograd_engine import is_profiling
from hfusion.torch_private.unimported_dynamo import is_dynamo_imported, without_dynamo

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


def has_step_hooks(optimizer: Optimizer) -> bool:
    """Return whether ``optimizer`` itself has hooks of its steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def count_global_step_hooks() -> int:
    """Return the number of hooks that run at the steps of all optimizers."""
    return len(_optimizers._global_optimizer_pre_hooks) + len(_optimizers._global_optimizer_post_hooks)


@cache
def spare_dynamo() -> None:
    """Let methods of all optimizers not import Dynamo, for the rest of the process."""
    methods: Any = Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        setattr(methods, name, without_dynamo(getattr(methods, name)))


def step_alone(optimizer: Optimizer) -> None:
    """Make a step of one of torch's optimizers without importing Dynamo, unless anybody else sees the step: hooks, the
    profiler, or what somebody has put in the place of ``optimizer.step``.
    """
    # Torch's schedules put there what counts steps.
    replaced = "step" in vars(optimizer) and not hasattr(optimizer.step, "_wrapped_by_lr_sched")
    if is_dynamo_imported() or is_profiling() or has_step_hooks(optimizer) or replaced:
        optimizer.step()
        return
    with torch.no_grad():
        inspect.unwrap(type(optimizer).step)(optimizer)


def wrap_optimizer_methods(add_param_group: Wrap, zero_grad: Wrap) -> None:
    """Wrap two methods of all optimizers, for the rest of the process."""
    # What is wrapped later does not see what is wrapped now.
    spare_dynamo()
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
