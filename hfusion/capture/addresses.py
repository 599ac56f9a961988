"""Code that addresses the memory below a tensor: in an array this is the memory of all members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

# What reads or writes at places that are counted from the start of a tensor's memory, with the number of the argument
# that tells the place; without it the place is the tensor's own.
_PLACED: Mapping[str, int] = {
    "as_strided": 3,
    "as_strided_": 3,
    "as_strided_copy": 3,
    "as_strided_scatter": 4,
}
# What gives the memory itself, or where in it the tensor begins.
_MEMORY = frozenset({"storage", "untyped_storage", "storage_offset", "set_"})


class AddressWatch(TorchFunctionMode):
    """While active, ``met`` is called for what addresses memory."""

    def __init__(self, met: Callable[[], None]) -> None:
        super().__init__()
        self._met = met

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]
        place = _PLACED.get(name)
        placed = place is not None and (len(args) > place or kwargs.get("storage_offset") is not None)
        if placed or name in _MEMORY:
            self._met()
        return func(*args, **kwargs)


class _Own(torch.autograd.Function):
    """The same values in a memory of their own; so are the gradients, which torch's derivatives address, too."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.clone()


def own_memory(tensor: Tensor) -> Tensor:
    """``tensor`` copied to a memory that holds nothing else."""
    found: Tensor = _Own.apply(tensor)  # type: ignore[no-untyped-call]
    return found


def fills_memory(tensor: Tensor) -> bool:
    """Whether nothing but ``tensor`` lies in its memory."""
    return (
        tensor.layout is torch.strided and tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    )
