"""Parameters of one member of an array: leaves in the memory of a stack's row, whose gradient is a row of the stack's.

The stack's ``grad`` holds all gradients. If a member has none (never computed, or cleared by zero_grad), its row is
zero and marked, see `absent_rows`.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.gradient_usage import absent_rows, mark_absent_until_next
from hfusion.core.membership import own_hook
from hfusion.core.parameter_attributes import keep_marks

# The descriptor of torch, which stores what autograd accumulates in a leaf.
_LEAF_GRAD: Any = Tensor.grad


class RowParameter(nn.Parameter):
    """A member's parameter. A copy, by deepcopy or pickle, is a parameter by itself."""

    # The class of the parameter where it is by itself: nn.Parameter, or one that a user has derived from it.
    _hfusion_kind: type[nn.Parameter] = nn.Parameter
    _hfusion_row: tuple[Tensor, int]

    @property
    def grad(self) -> Tensor | None:
        """The row of the stack's gradient, a view; None if the member has no gradient."""
        stack, row = self._hfusion_row
        whole = stack.grad
        absent = None if whole is None else absent_rows(whole)
        return None if whole is None or (absent is not None and absent[row]) else whole.detach()[row]

    @grad.setter
    @torch.no_grad()
    def grad(self, value: Tensor | None) -> None:
        stack, row = self._hfusion_row
        if value is not None:
            # Torch checks the shape, dtype and device.
            _LEAF_GRAD.__set__(self, value)
            _LEAF_GRAD.__set__(self, None)
        if stack.grad is None:
            if value is None:
                return
            stack.grad = torch.zeros_like(stack)
            absent = torch.ones(len(stack), dtype=torch.bool, device="cpu")
        else:
            before = absent_rows(stack.grad)
            absent = torch.zeros(len(stack), dtype=torch.bool, device="cpu") if before is None else before.clone()
            if stack.grad.layout is not torch.strided:
                stack.grad = stack.grad.to_dense()
        target = stack.grad.detach()[row]
        absent[row] = value is None
        if value is None:
            target.zero_()
        elif value.data_ptr() != target.data_ptr():
            target.copy_(value.to_dense() if value.layout is not torch.strided else value)
        if absent.all():
            stack.grad = None
            return
        mark_absent_until_next(stack, absent)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            memo[id(self)] = _alone(self, self.detach().clone(memory_format=torch.preserve_format))
        copied: nn.Parameter = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        alone = keep_marks(_alone(self, self.detach()), self)
        return alone.__reduce_ex__(protocol)


def tie(parameter: Any, stack: Tensor, row: int) -> None:
    """Make ``parameter``, which lies in the memory of a row of ``stack``, that member's parameter."""
    if not isinstance(parameter, RowParameter):
        kind: Any = type(parameter)
        parameter.__class__ = _row_class(kind)
        if (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference():
            trained = parameter.requires_grad
            # A hook can be registered only where a gradient is required, and stays when it is not.
            parameter.requires_grad_().register_post_accumulate_grad_hook(_add_to_row)
            parameter.requires_grad_(trained)
    parameter._hfusion_row = stack, row


def untie(parameter: Any) -> None:
    """Make a member's parameter one by itself, without a gradient."""
    if not hasattr(parameter, "_hfusion_row"):
        return
    del parameter._hfusion_row
    parameter.__class__ = parameter._hfusion_kind
    hooks = parameter._post_accumulate_grad_hooks
    for key in [key for key, hook in (hooks or {}).items() if hook is _add_to_row]:
        del hooks[key]


@functools.cache
def _row_class(kind: Any) -> type[RowParameter]:
    """Return the class for parameters of a class that users have derived from nn.Parameter."""
    own = {"__module__": kind.__module__, "_hfusion_kind": kind}
    return RowParameter if kind is nn.Parameter else type(kind.__name__, (RowParameter, kind), own)


def _alone(parameter: RowParameter, values: Tensor) -> nn.Parameter:
    copied = nn.Parameter(values, requires_grad=parameter.requires_grad)
    copied.__class__ = parameter._hfusion_kind
    return copied


def lies_in(tensor: Tensor, stack: Tensor, row: int) -> bool:
    """Return whether a member's ``tensor`` lies in its row of ``stack``."""
    kinds = tensor.dtype == stack.dtype and tensor.device == stack.device and tensor.shape == stack.shape[1:]
    address = stack.data_ptr() + row * stack.stride(0) * stack.element_size()
    return kinds and (tensor.data_ptr() == address or not tensor.numel()) and tensor.stride() == stack.stride()[1:]


@own_hook
def _add_to_row(parameter: RowParameter) -> None:
    """Add what autograd has accumulated in a member's parameter to its row of the stack's gradient."""
    new, before = _LEAF_GRAD.__get__(parameter), parameter.grad
    _LEAF_GRAD.__set__(parameter, None)
    parameter.grad = new if before is None else before + new
