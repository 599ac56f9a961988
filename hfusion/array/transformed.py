"""A call inside torch.func's transforms that the array's program does not serve: members' own code, one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.named import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled import Compiled
from hfusion.core.functorch import derivative_order, in_forward_mode, in_vmap, is_wrapped, outside_transforms, unwrapped

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

aten = torch.ops.aten


def unserved(compiled: Compiled) -> str:
    """Say why a program does not serve the transforms that this thread is in; empty if it does."""
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

    Those of ``originals`` that were parameters are so again, trained or frozen, and none is wrapped by a transform.
    """
    once: dict[int, Tensor] = {}
    stacks = {name: once.setdefault(id(t), unwrapped(t)) for name, t in tensors(owner)}
    for name, given in owner.named_parameters(remove_duplicate=False):
        if not isinstance(given, nn.Parameter):
            trained = originals.get(name, given).requires_grad
            if not isinstance(once[id(given)], nn.Parameter):
                once[id(given)] = nn.Parameter(once[id(given)].detach(), trained)
            stacks[name] = once[id(given)]
    return stacks


def run_members(fused: FusedModule, arguments: Arguments) -> Any:
    """Call every member with its rows of the array's tensors, or of those in their place, and stack what they give."""
    shared, results, stacks = fused._array.comparison.shared, [], dict(tensors(fused))
    with outside_transforms():
        members = list(fused)
    for index, member in enumerate(members):
        buffers = dict(member.named_buffers())
        rows = {
            name: stack if name in shared else stack[index]
            for name, stack in stacks.items()
            if name not in buffers or is_wrapped(stack)
        }
        args, kwargs = arguments.of_member(index)
        results.append(torch.func.functional_call(member, rows, args, kwargs))
        for name, buffer in member.named_buffers():
            if name in buffers and buffer is not buffers[name]:
                buffers[name].copy_(buffer)
    return stacked_results(results)


def stacked_results(results: Sequence[Any]) -> Any:
    """Return the members' results as one, each tensor ``[B, *S]``."""
    flat = [pytree.tree_flatten(result) for result in results]
    leaves = [
        torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(leaves for leaves, _ in flat), strict=True)
    ]
    return pytree.tree_unflatten(leaves, flat[0][1])
