"""Calls that programs cannot compute: they run the members' own code, one member after the other.

Those are calls with sparse arguments, and some inside the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from hfusion.capture.fallback_runtime import OtherSizes
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import join, running, watched
from hfusion.core.layout import Listed, member_values
from hfusion.passes.expected_checks import FailedCheck
from hfusion.torch_private.functorch import (
    derivative_order,
    in_forward_mode,
    in_vmap,
    is_wrapped,
    outside_transforms,
    unwrapped,
)

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


aten = torch.ops.aten


def unserved(compiled: Compiled) -> str:
    """Return why a program cannot run inside the torch.func transforms of this thread; empty if it can."""
    if compiled.opaque:
        call = compiled.opaque[0]
        return f"{call.path or 'forward'} runs member by member: {call.why}"
    if in_vmap() and compiled.checks:
        return f"{compiled.checks[0]} checks values, of which torch.vmap knows none"
    if in_forward_mode() and compiled.graph.find_nodes(op="call_function", target=aten.detach.default):
        return "forward-mode derivatives flow through torch.no_grad(), where a graph cuts off gradients of both modes"
    attention = compiled.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    again = in_forward_mode() or derivative_order() > 1 or in_vmap()
    if again and any(node.args[0].meta["val"].dim() < 4 for node in attention):
        return "torch batches attention of three dims, and takes its second derivative, but not that of a stack of such"
    return ""


def plain_stacks(owner: nn.Module, originals: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of an array by key, also while `torch.func.functional_call` has put others in their place.

    Parameters are parameters again, with requires_grad as in ``originals``, and no tensor is wrapped by a transform.
    """
    plain_by_id: dict[int, Tensor] = {}
    stacks = {name: plain_by_id.setdefault(id(t), unwrapped(t)) for name, t in tensors(owner)}
    for name, tensor in owner.named_parameters(remove_duplicate=False):
        if not isinstance(tensor, nn.Parameter):
            trained = originals.get(name, tensor).requires_grad
            if not isinstance(plain_by_id[id(tensor)], nn.Parameter):
                plain_by_id[id(tensor)] = nn.Parameter(plain_by_id[id(tensor)].detach(), trained)
            stacks[name] = plain_by_id[id(tensor)]
    return stacks


def run_members(fused: FusedModule, arguments: Arguments) -> Any:
    """Call every member with its rows of the array's tensors, or of their replacements, and stack the results."""
    with outside_transforms():
        members = list(fused)
    specs: list[TreeSpec] = []

    def run() -> list[Any]:
        leaves, spec = _stacked(list(_results(fused, members, arguments)))
        specs.append(spec)
        return leaves

    return pytree.tree_unflatten(watched(run, len(members))(), specs[0])


def _results(fused: FusedModule, members: Sequence[nn.Module], arguments: Arguments) -> Iterator[Any]:
    shared, watching = fused._array.comparison.shared, running()
    rows = {name: Listed(stack.unbind()) for name, stack in tensors(fused) if name not in shared}
    for listed in {id(stack): rows[name] for name, stack in tensors(fused) if name in rows}.values():
        if watching is not None:
            watching.took(listed)
    for index, member in enumerate(members):
        buffers = dict(member.named_buffers())
        member_tensors = {name: rows[name][index] if name in rows else stack for name, stack in tensors(fused)}
        replacements = {name: row for name, row in member_tensors.items() if name not in buffers or is_wrapped(row)}
        args, kwargs = arguments.of_member(index)
        yield torch.func.functional_call(member, replacements, args, kwargs)
        for name, buffer in member.named_buffers():
            if name in buffers and buffer is not buffers[name]:
                buffers[name].copy_(buffer)


def stacked_results(results: Sequence[Any]) -> Any:
    """Return the members' results as one, each tensor ``[B, *S]``; see `member_values` for what is no tensor.

    Raises:
        FusionError: members give different structures, or tensors of different kinds.
    """
    return pytree.tree_unflatten(*_stacked(results))


def _stacked(results: Sequence[Any]) -> tuple[list[Any], TreeSpec]:
    flat = [pytree.tree_flatten(result) for result in results]
    kinds = [(spec, list(map(_kind, leaves))) for leaves, spec in flat]
    if (other := next((row for row, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise FusionError(
            f"model 0 gives {kinds[0]}, and model {other} {kinds[other]}, which an array cannot stack. "
            "Return the same structure, shapes and dtypes from all"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return [join(parts) if isinstance(parts[0], Tensor) else member_values(parts) for parts in columns], flat[0][1]


def _kind(leaf: Any) -> Any:
    return (leaf.shape, leaf.dtype, leaf.device, leaf.layout) if isinstance(leaf, Tensor) else None


# Failed assertions in forward: the members are called in turn, so that one raises its own error.

REFUSALS = (OtherSizes, FailedCheck)
"""Errors raised by a program that is not valid for its inputs, so that another has to be compiled."""


def call_members(array: Iterable[nn.Module], arguments: Arguments, refusal: FusionError) -> None:
    """After a failed check, call the members of ``array`` in turn, so that one raises its own error.

    If none does, because the caller of a submodule catches the error, parameters and buffers are restored.
    """
    if not isinstance(refusal, FailedCheck):
        return
    members = list(array)
    saved_values: list[tuple[Tensor, Tensor]] = []
    for index, member in enumerate(members):
        args, kwargs = arguments.of_member(index)
        saved_values += [(tensor, tensor.detach().clone()) for _, tensor in tensors(member)]
        member(*args, **kwargs)
    with torch.no_grad():
        for tensor, value in saved_values:
            tensor.copy_(value)
