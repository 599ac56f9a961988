"""Adapter layers of one size for all members: smaller ranks are padded with zeros, and cut again for peft.

The padding stays zero: in ``x A^T B^T``, the gradient of a row of A is a product with the matching column of B, and
vice versa. A zero with a zero gradient stays zero in every optimizer of hf.optim except Muon, whose step depends on the
whole matrix, and adds nothing to a norm. So a member of rank 4 in layers of rank 16 trains as it does alone.

The scale of an adapter becomes a buffer, so that one program serves all members, including those that join later. Its
rank and alpha become buffers too, so that they move with a member's row.

Private attributes of peft's layers that are used, tested with 0.21: ``scaling``, ``r`` and ``lora_alpha``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.core.errors import FusionError

NAME = "default"
"""The name of each member's adapter in peft."""

# The dim of the rank, by the name of the tensor within its layer.
_RANK_DIMS = {
    f"lora_A.{NAME}.weight": 0,
    f"lora_B.{NAME}.weight": 1,
    f"lora_embedding_A.{NAME}": 0,
    f"lora_embedding_B.{NAME}": 1,
}
_SIZES = ("in_features", "in_channels", "out_features", "out_channels")


def layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapter layers of a peft model by path. Raises FusionError if one has no array form."""
    from peft.tuners.lora import layer as kinds
    from peft.tuners.tuners_utils import BaseTunerLayer

    supported = (kinds.Linear, kinds.Embedding, kinds.Conv1d, kinds.Conv2d, kinds.Conv3d)
    adapter_layers = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if type(module) not in supported:
            raise FusionError(
                f"{path} is adapted by {type(module).__module__}.{type(module).__name__}, which has no array form: "
                "hf.lora adapts dense Linear, Conv1D, Embedding and convolution layers; choose target_modules without "
                "it, or a base that is not quantized"
            )
        adapter_layers[path] = module
    return adapter_layers


def rank(layer: Any) -> int:
    """Return the rank of an original peft layer."""
    return int(layer.r[NAME])


def settle(layer: Any) -> None:
    """Turn the scale, rank and alpha of a layer into buffers."""
    from peft.tuners._buffer_dict import BufferDict

    device = next(layer.parameters()).device
    layer.scaling = BufferDict({NAME: torch.zeros((), dtype=torch.float64, device=device)}, persistent=True)
    layer.register_buffer("rank", torch.zeros((), dtype=torch.int64, device=device))
    layer.register_buffer("alpha", torch.zeros((), dtype=torch.float64, device=device))


@torch.no_grad()
def fill(layer: Any, source: Any, where: str) -> None:
    """Copy peft's layer ``source`` into ``layer``, which `settle` has prepared. None: no adapter, rank 0.

    Raises:
        FusionError: ``source`` does not fit, for example as its rank is larger.
    """
    parameters = {} if source is None else dict(source.named_parameters())
    for name, dim in _RANK_DIMS.items():
        room = _tensor(layer, name)
        if room is None:
            continue
        room.zero_()
        if source is not None:
            _check_room(where, rank(source), room.shape[dim], layer)
            room.narrow(dim, 0, rank(source)).copy_(parameters[name])
    layer.rank.fill_(0 if source is None else rank(source))
    layer.alpha.fill_(0.0 if source is None else source.lora_alpha[NAME])
    layer.scaling[NAME].fill_(0.0 if source is None else source.scaling[NAME])
    if source is not None:
        _fill_dropout(layer, source, where)


def _check_room(where: str, member_rank: int, largest_rank: int, layer: Any) -> None:
    if member_rank > largest_rank:
        raise FusionError(
            f"{where}: an adapter of rank {member_rank} does not fit an array whose largest rank is {largest_rank} "
            f"there; make the array with room for it, hf.lora(..., max_rank={member_rank})"
        )
    if member_rank < largest_rank and getattr(layer.get_base_layer(), "groups", 1) > 1:
        raise FusionError(
            f"{where} is a convolution in groups, in each of which the rank is split: ranks {member_rank} and "
            f"{largest_rank} cannot be padded to one; give all members one rank there (rank_pattern)"
        )


def _fill_dropout(layer: Any, source: Any, where: str) -> None:
    room, p = layer.lora_dropout[NAME], dropout(source)
    if isinstance(room, nn.Dropout):
        room.p = p
    elif p:
        raise FusionError(
            f"{where}: lora_dropout={p}, and the array was made without any; make it with a member that has dropout"
        )


def dropout(layer: Any) -> float:
    return float(getattr(layer.lora_dropout[NAME], "p", 0.0))


def lora_names(adapter_layers: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the tensors that `fill` writes, including the buffers that `settle` adds."""
    names = (*_RANK_DIMS, "rank", "alpha", f"scaling.{NAME}")
    return frozenset(f"{path}.{name}" for path in adapter_layers for name in names)


def cut(layer: Any) -> tuple[int, float]:
    """Turn a layer that `settle` has prepared back into a peft layer of its own rank. Return its rank and alpha."""
    size, alpha = int(layer.rank), float(layer.alpha)
    for name, dim in _RANK_DIMS.items():
        room = _tensor(layer, name)
        if room is None:
            continue
        holder, key = _holder(layer, name)
        part = room.detach().narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
        setattr(holder, key, nn.Parameter(part, requires_grad=room.requires_grad))
        for attribute in _size_names(holder, dim):
            setattr(holder, attribute, size)
    scale = float(layer.scaling[NAME])
    del layer.rank, layer.alpha, layer.scaling
    alpha = int(alpha) if alpha == int(alpha) else alpha
    layer.r, layer.lora_alpha, layer.scaling = {NAME: size}, {NAME: alpha}, {NAME: scale}
    if not dropout(layer):
        layer.lora_dropout[NAME] = nn.Identity()
    return size, alpha


def _size_names(holder: nn.Module, dim: int) -> Iterator[str]:
    """Yield the attributes that hold the rank: output sizes of A (dim 0), input sizes of B (dim 1)."""
    half = _SIZES[2:] if dim == 0 else _SIZES[:2]
    return (name for name in half if hasattr(holder, name))


def _holder(layer: Any, name: str) -> tuple[Any, str]:
    path, _, key = name.rpartition(".")
    return layer.get_submodule(path), key


def _tensor(layer: Any, name: str) -> Tensor | None:
    path, _, key = name.rpartition(".")
    holder: Any = layer
    for part in path.split("."):
        holder = holder._modules.get(part)
        if holder is None:
            return None
    tensor: Tensor | None = holder._parameters.get(key)
    return tensor
