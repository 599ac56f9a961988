"""Members as modules: strip the tensors from a model, and rebuild the model around other tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import dlpack

from hfusion.capture.attribute_fingerprint import copied_result, results
from hfusion.capture.eager_runs import twin
from hfusion.capture.hooks import is_recipe, recompute, recomputed
from hfusion.capture.registered_tensors import RESTRIDED, tensors
from hfusion.core.membership import TAKE_BEFORE, check_whole_stack
from hfusion.core.memory import module_copy
from hfusion.device.backend import backend


def skeleton(index: int, model: nn.Module) -> nn.Module:
    """Return a deep copy of ``model`` whose parameters and buffers are ``meta`` tensors; ``index`` is for errors."""
    memo: dict[int, Any] = {id(tensor): _empty(tensor) for _, tensor in tensors(model)}
    memo |= {id(tensor): copied_result(tensor) for tensor in results(model).values()}
    memo |= {id(vars(part).get(name)): None for part in model.modules() for name in recomputed(part)}
    # A copy would be closed over modules of the model all the same.
    memo |= {id(value): value for part in model.modules() for value in vars(part).values() if is_recipe(value)}
    return twin(model, memo, f"model {index} ({type(model).__name__})")


def materialize(skeleton: nn.Module, rows: Mapping[str, Tensor], training: Mapping[str, bool]) -> nn.Module:
    """Return the module of ``skeleton`` with the tensors ``rows``, by key, and ``training`` flags, by module path."""
    memo = {}
    for name, empty in tensors(skeleton):
        row = rows[name]
        memo[id(empty)] = row
        if not empty.is_contiguous() and row.is_contiguous():
            setattr(row, RESTRIDED, True)
    model = module_copy(skeleton, memo)
    for path, module in model.named_modules():
        module.training = training[path]
    recompute(model)
    return model


def live_rows(stack: Tensor, rows: int | slice | None) -> Tensor:
    """Return a live view of ``rows`` of a stack, or of the whole stack for None; a parameter if the stack is one.

    If possible, its storage holds only these rows, so that saving it writes no more; writes count as writes to the
    stack.
    """
    if rows is not None:
        check_whole_stack(stack, TAKE_BEFORE)
    view = stack.detach()
    if rows is not None:
        view = view[rows]
        if view.is_contiguous() and view.numel() > 0 and type(view) is Tensor and backend(view.device).hands_over:
            with torch.inference_mode(False):
                # Export an alias: the new memory keeps the exported tensor alive, so the view would keep itself.
                view.data = dlpack.from_dlpack(view.detach())
    return nn.Parameter(view, requires_grad=stack.requires_grad) if isinstance(stack, nn.Parameter) else view


def _empty(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
