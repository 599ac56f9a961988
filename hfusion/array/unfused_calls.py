"""The loop over members: calls that programs cannot compute run the members' own code, one member after the other.

Those are calls of members that differ in modes, hooks or what they train, of code that cannot be captured, with sparse
arguments, and some inside the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from hfusion.capture.fallback_runtime import Unforeseen
from hfusion.capture.registered_tensors import holder_of, tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled, check_members
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import frozen_rows, join, running, watched
from hfusion.core.layout import Listed, member_values, values_of
from hfusion.core.member_random import member_seeds
from hfusion.core.memory import has_address, is_plain
from hfusion.core.parameter_attributes import keep_marks
from hfusion.core.ragged import Ragged
from hfusion.device.backend import random_states_kept, seed_in_use
from hfusion.passes.side_effects import FailedCheck
from hfusion.torch_private.functorch import (
    derivative_order,
    in_forward_mode,
    in_transform,
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


def run_members(fused: FusedModule, arguments: Arguments, why: str, *, writes: bool = False) -> Any:
    """Run the members' own code, with their hooks, one after the other, and join the results.

    Their parameters are rows of the array's tensors, or of those in their places, so that gradients reach the stacks.

    Args:
        why: for the report.
        writes: whether to let forward write into its parameters, which rows that were unbound together do not allow.

    Raises:
        FusionError: members give different structures, or write into an input that all see.
    """
    fused._loops[f"{fused._original}: loop over members: {why}"] = None
    check_members(len(fused), arguments)
    with outside_transforms():
        members = list(fused)
    specs: list[TreeSpec] = []

    def run() -> list[Any]:
        results = list(_results(fused, members, arguments, writes))
        leaves, spec = _joined(results, any_sizes=bool(arguments.ragged))
        specs.append(spec)
        return leaves

    return pytree.tree_unflatten(watched(run, len(members))(), specs[0])


def _results(fused: FusedModule, members: Sequence[nn.Module], arguments: Arguments, writes: bool) -> Iterator[Any]:
    stacks, watching = dict(tensors(fused)), running()
    own = {name: stack for name, stack in stacks.items() if name not in fused._array.comparison.shared}
    # The gradients of rows that are unbound are stacked at once; those of rows that are selected are summed as stacks.
    listed = {
        id(stack): Listed([stack[row] for row in range(len(members))] if writes else stack.unbind())
        for stack in own.values()
    }
    frozen = {id(stack): flags for stack in own.values() if (flags := frozen_rows(stack)) is not None}
    if watching is not None:
        for of_stack in listed.values():
            watching.took(of_stack)
    source = None if in_transform() else member_seeds()
    low, high = (None, None) if source is None else source.keys()
    inputs = [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor) and not leaf.is_inference()]
    versions = [tensor._version for tensor in inputs]
    for index, member in enumerate(members):
        rows = {key: of_stack[index] for key, of_stack in listed.items()}
        rows |= {key: rows[key].detach() for key, flags in frozen.items() if flags[index]}
        buffers = dict(member.named_buffers())
        apart = {name: _with_own_version(buffer) for name, buffer in buffers.items()}
        replacements = {name: rows.get(id(stack), stack) for name, stack in stacks.items()}
        replacements = {name: row for name, row in replacements.items() if name not in buffers or is_wrapped(row)}
        for name, parameter in member.named_parameters():
            for hook in (parameter._backward_hooks or {}).values() if replacements[name].requires_grad else ():
                replacements[name].register_hook(hook)
        for name, buffer in apart.items():
            held, leaf, _ = holder_of(member, name)
            held[leaf] = buffer
        args, kwargs = arguments.of_member(index)
        # What a member draws must not depend on the modes of others, which may draw nothing.
        with nullcontext() if low is None else random_states_kept():
            if low is not None and high is not None:
                seed_in_use((int(high[index]) << 32) | int(low[index]))
            yield torch.func.functional_call(member, replacements, args, kwargs)
        _take_back(member, buffers, apart)
        with torch.no_grad():
            for name in own.keys() & replacements.keys():
                row, target = replacements[name], own[name].detach()[index]
                if has_address(row) and row.data_ptr() != target.data_ptr():
                    # Forward has assigned other data to the parameter.
                    target.copy_(row.detach())
        if [tensor._version for tensor in inputs] != versions:
            raise FusionError(
                f"member {index} of a fused {fused._original} runs its own code, and writes into an input that all "
                "members see. Let it write into a copy, or give each its own by hf.stacked"
            )


def _take_back(member: nn.Module, buffers: Mapping[str, Tensor], apart: Mapping[str, Tensor]) -> None:
    """Put the ``buffers`` of a member in the places of those that it ran with, ``apart``, as forward left them."""
    for name, buffer in buffers.items():
        held, leaf, _ = holder_of(member, name)
        assigned = held.get(leaf)
        if assigned is None or assigned is buffer:
            continue
        if assigned is not apart[name]:
            with torch.no_grad():
                buffer.copy_(assigned)
        else:
            if assigned._version > _NEW_VERSION:
                increment_version(buffer)
            # What forward has set on it is the member's.
            keep_marks(buffer, assigned)
            if assigned.is_leaf:
                buffer.requires_grad_(assigned.requires_grad)
        held[leaf] = buffer


# The version of what `_with_own_version` has just made.
_NEW_VERSION = 1


def _with_own_version(buffer: Tensor) -> Tensor:
    """Return a tensor in the memory of ``buffer``, of whose writes autograd knows apart from those of other rows."""
    if buffer.requires_grad or not is_plain(buffer) or not has_address(buffer) or buffer.is_inference():
        return buffer
    with torch.no_grad():
        empty = torch.empty(0, dtype=buffer.dtype, device=buffer.device)
        return keep_marks(
            empty.set_(buffer.untyped_storage(), buffer.storage_offset(), buffer.size(), buffer.stride()), buffer
        )


def joined_results(results: Sequence[Any], any_sizes: bool = False) -> Any:
    """Return the members' results as one: each tensor ``[B, *S]``; see `member_values` for what is no tensor.

    Args:
        any_sizes: whether tensors may differ in sizes; they are `Ragged` then.

    Raises:
        FusionError: members give different structures, or tensors of different kinds.
    """
    return pytree.tree_unflatten(*_joined(results, any_sizes))


def _joined(results: Sequence[Any], any_sizes: bool) -> tuple[list[Any], TreeSpec]:
    flat = [pytree.tree_flatten(result) for result in results]
    kinds = [(spec, [_kind(leaf, any_sizes) for leaf in leaves]) for leaves, spec in flat]
    if (other := next((row for row, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise FusionError(
            f"model 0 gives {kinds[0]}, and model {other} {kinds[other]}, which an array cannot join. "
            "Return the same structure, shapes and dtypes from all"
        )
    return [_joined_leaves(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)], flat[0][1]


def _kind(leaf: Any, any_sizes: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    return leaf.dim() if any_sizes else leaf.shape, leaf.dtype, leaf.device, leaf.layout


def _joined_leaves(parts: Sequence[Any]) -> Any:
    if not isinstance(parts[0], Tensor):
        return member_values(parts)
    return join(parts) if len({part.shape for part in parts}) == 1 else Ragged(parts)


# Failed assertions in forward: the members are called in turn, so that one raises its own error.

REFUSALS = (Unforeseen, FailedCheck)
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


# Divide members by the sizes of their batches, and join the results of blocks in the members' order.


def check_ragged(members: int, arguments: Arguments) -> None:
    """Raise a ValueError if a ragged argument does not hold one batch per member."""
    for leaf in arguments.ragged:
        if len(leaf) != members:
            raise ValueError(
                f"hf.stacked input holds {len(leaf)} batches, of sizes {list(leaf.sizes)}, but the array has {members} "
                "members; give it one batch per member"
            )


def call_by_size(arguments: Arguments, rows: Sequence[int], call: Callable[[list[int], Arguments], Any]) -> Any:
    """Call ``call`` with the members among ``rows`` of each size and their arguments, and join the results."""
    groups: dict[Any, list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(leaf[row].shape for leaf in arguments.ragged), []).append(row)
    results: dict[int, Any] = {}
    for group in groups.values():
        try:
            leaves, spec = pytree.tree_flatten(call(group, arguments.of_rows(group)))
        except Exception as error:
            sizes = [list(leaf[group[0]].shape) for leaf in arguments.ragged]
            error.add_note(f"This is of members {group}, whose tensors have the sizes {sizes}.")
            raise
        columns = [[*leaf] if isinstance(leaf, Tensor | Ragged) else values_of(leaf, len(group)) for leaf in leaves]
        for index, row in enumerate(group):
            results[row] = pytree.tree_unflatten([column[index] for column in columns], spec)
    return joined_results([results[row] for row in rows], any_sizes=True)
