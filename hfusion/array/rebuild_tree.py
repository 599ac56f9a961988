"""Rebuild the tree of a fused module after members with other modules have joined or left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hfusion.array.module_tree import Branch, Tree, grow
from hfusion.capture.variant_structures import union_of_modules
from hfusion.core.membership import membership

if TYPE_CHECKING:
    from hfusion.array.array_description import Array
    from hfusion.array.module import FusedModule


def regrow(fused: FusedModule, array: Array, stacks: Mapping[str, Tensor]) -> None:
    """Rebuild the tree of a fused module from the skeletons of ``array``, with the tensors ``stacks``.

    The branch of a path stays the same object, even while no member has it, as programs look up their tensors in it.
    """
    _regrow(fused, array.skeletons, stacks, fused._cut)
    fused._branches = [module for _, module in fused.named_modules()]
    fused._own_branches(array)


def _regrow(root: Tree, skeletons: Sequence[nn.Module], stacks: Mapping[str, Tensor], cut: dict[str, Branch]) -> None:
    named = root.named_modules(remove_duplicate=False)
    branches = cut | {path: tree for path, tree in named if isinstance(tree, Branch)}
    extra = {name: tensor for name, tensor in root._buffers.items() if _is_extra(name, tensor, stacks)}
    for tree in (root, *branches.values()):
        for table in (tree._modules, tree._parameters, tree._buffers):
            table.clear()
        tree._tied = {}
    grow(root, skeletons, stacks, branches)
    root._buffers.update(extra)
    modules = union_of_modules(skeletons)
    for path in cut.keys() & modules.keys():
        root.get_submodule(path).training = modules[path][0].training
    cut.clear()
    cut.update({path: tree for path, tree in branches.items() if path not in modules})


def _is_extra(name: str, tensor: Tensor | None, stacks: Mapping[str, Tensor]) -> bool:
    """Return whether a buffer was registered on the array by the user, so that no member has it."""
    tensor_mark = None if tensor is None else membership(tensor)
    return tensor is not None and name not in stacks and not (tensor_mark is not None and tensor_mark.is_unused)
