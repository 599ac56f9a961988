"""Buffers that forward assigns anew, ``self.mean = ...``: torch.export sees those of the root only (2.11 to 2.15)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.core.errors import FusionError


@contextmanager
def assigned_as_writes(module: nn.Module) -> Iterator[None]:
    """While active, each call of ``module`` ends by writing what its buffers have become into what they were."""
    before: list[dict[tuple[str, str], Tensor]] = []

    def begin(module: nn.Module, args: Any) -> None:
        before.append(dict(_buffers(module)))

    def end(module: nn.Module, args: Any, output: Any) -> Any:
        own = before.pop()
        now = dict(_buffers(module))
        changed = [key for key, tensor in own.items() if now.get(key) is not tensor]
        # What forward hands back of an old buffer keeps the old values.
        memory = {own[key].untyped_storage()._cdata for key in changed}
        output = pytree.tree_map_only(Tensor, lambda x: x.clone() if _in(x, memory) else x, output)
        for path, name in changed:
            _write(module, path, name, own[path, name], now.get((path, name)))
        return output

    handles = [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _buffers(module: nn.Module) -> Iterator[tuple[tuple[str, str], Tensor]]:
    for path, part in module.named_modules():
        yield from (((path, name), tensor) for name, tensor in part._buffers.items() if tensor is not None)


def _in(tensor: Tensor, memory: set[int]) -> bool:
    return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in memory


def _write(module: nn.Module, path: str, name: str, old: Tensor, new: Tensor | None) -> None:
    full = f"{path}.{name}" if path else name
    if new is None or (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise FusionError(
            f"forward assigns {full} anew, as something else than a tensor of the same shape, dtype and device; "
            "write into the buffer"
        )
    old.copy_(new.detach())
    module.get_submodule(path)._buffers[name] = old
