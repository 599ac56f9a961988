"""The fused module under `torch.export`: its program is looked up with example tensors, then traced."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.bound_program import bind
from hfusion.compiler.compiled_program import Compiled
from hfusion.compiler.sandbox import apart
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import FusionError
from hfusion.ops.rule import hint
from hfusion.torch_private.export_state import outside_export


def exported(
    owner: nn.Module, find: Callable[[Arguments], Compiled], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call of ``owner`` during an export, with dynamic sizes.

    The program's assumptions about sizes are guarded.
    """
    arguments = Arguments.of(args, kwargs)
    with outside_export(), apart():
        stand_ins = Arguments(tuple(map(_stand_in, arguments.leaves)), arguments.spec)
        try:
            compiled = find(stand_ins)
        except FusionError as error:
            raise FusionError(f"torch.export cannot take what runs member by member: {error}") from error
    for call in compiled.opaque:
        raise FusionError(f"torch.export cannot take {call.path or 'forward'}, which runs member by member: {call.why}")
    if compiled.program.gives_member_values:
        raise FusionError(
            "torch.export cannot take results that are no tensors and differ between members. Return tensors, or "
            "export the members: fused[i]"
        )
    if not compiled.guards(arguments.shapes):
        raise FusionError("torch.export was given sizes that the array's program does not hold for")
    return bind(compiled, owner)(arguments.values)


def _stand_in(leaf: Any) -> Any:
    if is_stacked(leaf):
        return StackedInput(_stand_in(leaf.tensor))
    if not isinstance(leaf, Tensor):
        return leaf
    sizes = [hint(size) for size in leaf.shape]
    if any(size is None for size in sizes):
        raise FusionError(f"torch.export was given a tensor of unknown size, {tuple(leaf.shape)}; give it an example")
    return torch.zeros(sizes, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad)  # type: ignore[arg-type]
