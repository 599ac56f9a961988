"""Models that join an array: what they must have in common with its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hfusion.capture.compare_models import Sharing, check_alone, check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.array.array_editing import Source
    from hfusion.array.module import FusedModule


def check_joining(fused: FusedModule, sources: Sequence[Source]) -> dict[int, nn.Module]:
    """Check joining models against the members, and return them by their new rows. Raises FusionError."""
    joining = {index: source for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    stranger = next((s for s in sources if not isinstance(s, int | nn.Module)), None)
    if stranger is not None:
        raise FusionError(f"only torch.nn.Modules can join an array, got {type(stranger).__name__}")
    if not joining:
        return joining
    stacks = dict(tensors(fused))
    for index, model in joining.items():
        check_alone(index, model)
    first = fused._member(0)
    for index, model in joining.items():
        check_pair(first, index, model)
    for index, model in joining.items():
        for name in fused._array.comparison.shared:
            _check_shared(name, stacks[name], index, dict(tensors(model)).get(name))
    return joining


def _check_shared(name: str, array_tensor: Tensor, index: int, model_tensor: Tensor | None) -> None:
    if model_tensor is None:
        raise FusionError(
            f"{name} is one tensor for all members of the array, and model {index} has none; fuse a new array in "
            "which members have their own"
        )
    if array_tensor.data_ptr() == model_tensor.data_ptr() and array_tensor.stride() == model_tensor.stride():
        return
    if not torch.equal(array_tensor.detach(), model_tensor.detach()):
        raise FusionError(
            f"{name} is one tensor for all members of the array, and model {index} has another value there; give it "
            f"the array's own, fused[0].{name}, or fuse a new array in which members have their own"
        )


def partly_shared(joining: Mapping[int, nn.Module]) -> frozenset[str]:
    """Return the keys of tensors that joining models share. Raises FusionError for a shared trained parameter."""
    sharing = Sharing()
    for index, model in enumerate(joining.values()):
        sharing.add(index, model)
    if len(joining) > 1:
        named = dict(next(iter(joining.values())).named_parameters(remove_duplicate=False))
        for name in sorted(sharing.keys):
            if name in named and named[name].requires_grad:
                raise FusionError(
                    f"{name} is one object in all models that join, and is trained; give each its own, by copy.deepcopy"
                )
    return sharing.partly | (sharing.keys if len(joining) > 1 else frozenset())
