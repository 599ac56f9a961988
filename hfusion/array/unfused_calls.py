"""The loop over members: calls that programs cannot compute run the members' own code, one member after the other.

Those are calls of members that differ in modes, hooks or what they train, of code that cannot be captured, with sparse
arguments, with batches of different sizes that cannot be padded, and some inside the transforms of torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from hfusion.array.variable_states import check_cached
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled, check_members
from hfusion.core.calls import Ragged, StackedInput
from hfusion.core.errors import FusionError, NotCaptured, noting
from hfusion.core.gradient_usage import frozen_rows, join, running, watched
from hfusion.core.layout import Listed, member_values
from hfusion.core.member_random import member_seeds
from hfusion.core.membership import keep_marks
from hfusion.core.memory import has_address, version_of
from hfusion.core.program import Kind
from hfusion.device.backend import random_states_kept, seed_in_use
from hfusion.torch_private.dispatch_modes import (
    derivative_order,
    in_forward_mode,
    in_transform,
    in_vmap,
    is_wrapped,
    outside_transforms,
    unwrapped,
)
from hfusion.torch_private.module_hooks import caches_parametrizations, without_cached_parametrizations

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


aten = torch.ops.aten


def unserved(compiled: Compiled) -> str:
    """Return why a program cannot run inside the torch.func transforms of this thread; empty if it can."""
    if compiled.opaque:
        call = compiled.opaque[0]
        return f"{call.path or 'forward'} runs member by member: {call.why}"
    if in_forward_mode() and compiled.graph.find_nodes(op="call_function", target=aten.detach.default):
        return "forward-mode derivatives flow through torch.no_grad(), where a graph cuts off gradients of both modes"
    # What the derivative needs is refused after the call, in the backward.
    if derivative_order() > 0 and compiled.graph.find_nodes(op="call_function", target=aten.slice_scatter.default):
        return "torch.vmap has no rule for the derivative of slice_scatter"
    attention = compiled.graph.find_nodes(op="call_function", target=aten.scaled_dot_product_attention.default)
    again = in_forward_mode() or derivative_order() > 1 or in_vmap()
    if again and any(node.args[0].meta["val"].dim() < 4 for node in attention):
        return "torch batches attention of three dims, and takes its second derivative, but not that of a stack of such"
    return ""


def run_transformed(
    compiled: Compiled, run: Callable[[list[Any]], Any], arguments: Arguments, loop: Callable[[str], Any]
) -> Any:
    """Run a program inside transforms of torch.func; where they refuse it, call ``loop`` with the reason."""
    why = unserved(compiled)
    if not why:
        try:
            return run(arguments.values)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return loop(f"inside torch.func, {why}")


def untraced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function outside of the trace that Dynamo makes."""
    return function(*args, **kwargs)


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


def run_members(fused: FusedModule, arguments: Arguments, why: str, method: str = "forward") -> Any:
    """Run the members' own code, with their hooks, one after the other, and join the results.

    Their parameters are rows of the array's tensors, or of those in their places, so that gradients reach the stacks.

    Args:
        why: for the report.
        method: the method of the members to run.

    Raises:
        FusionError: members give different structures, or write into an input that all see.
    """
    check_members(len(fused), arguments)
    views = fused._views
    with outside_transforms():
        members = [views.get(fused, row) for row in range(len(fused))]
        views.watch()
    specs: list[TreeSpec] = []
    active = active_rows(len(fused), fused._idle)

    def run() -> list[Any]:
        results = filled(len(fused), zip(active, _results(fused, members, active, arguments, method), strict=True))
        leaves, spec = joined_results(results, any_sizes=bool(arguments.ragged))
        specs.append(spec)
        return leaves

    # torch caches weights by the model of which members are copies.
    if caches_parametrizations():
        check_cached(fused._array.skeletons)
    try:
        with without_cached_parametrizations():
            output = pytree.tree_unflatten(watched(run, len(members))(), specs[0])
        fused._loops.pop(why, None)
        fused._loops[why] = None  # The latest is the last.
        return output
    finally:
        # Members that nobody else holds and that forward left alone are not compared at later calls.
        views.exposed = views.exposed or not views.are_unchanged()


def active_rows(members: int, idle: Set[int]) -> list[int]:
    """Return the rows of members that are not ``idle``; all rows if every member is."""
    return [row for row in range(members) if row not in idle] or list(range(members))


def filled(members: int, results: Iterable[tuple[int, Any]]) -> list[Any]:
    """Return the result of each of ``members`` from those by row; the first, without gradient, where there is none."""
    by_row = dict(results)
    if len(by_row) == members:
        return list(by_row.values())
    first = pytree.tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, next(iter(by_row.values())))
    return [by_row.get(row, first) for row in range(members)]


def _results(
    fused: FusedModule, members: Sequence[nn.Module], rows: Sequence[int], arguments: Arguments, method: str
) -> Iterator[Any]:
    """Yield the results of the members in ``rows``, one after the other."""
    stacks, watching = dict(tensors(fused)), running()
    own = {name: stack for name, stack in stacks.items() if name not in fused._array.comparison.shared}
    split: Any = Tensor.unbind if in_transform() else _RowsOfStack.apply
    listed = {id(stack): Listed(split(stack)) for stack in own.values()}
    frozen = {id(stack): flags for stack in own.values() if (flags := frozen_rows(stack)) is not None}
    if watching is not None:
        for of_stack in listed.values():
            watching.took(of_stack)
    source = None if in_transform() else member_seeds()
    low, high = (None, None) if source is None else source.keys()
    inputs = [leaf for leaf in arguments.leaves if isinstance(leaf, Tensor)]
    versions = list(map(version_of, inputs))
    for index in rows:
        member, own_rows = members[index], {key: of_stack[index] for key, of_stack in listed.items()}
        own_rows |= {key: own_rows[key].detach() for key, flags in frozen.items() if flags[index]}
        given = {name: own_rows.get(id(stack), stack) for name, stack in stacks.items()}
        named_buffers = member.named_buffers(remove_duplicate=False)
        buffers = {name: buffer for name, buffer in named_buffers if not is_wrapped(given[name])}
        aliases = {id(buffer): _with_own_version(buffer) for buffer in buffers.values()}
        given |= {name: aliases[id(buffer)] for name, buffer in buffers.items()}
        for name, parameter in member.named_parameters():
            for hook in (parameter._backward_hooks or {}).values() if given[name].requires_grad else ():
                given[name].register_hook(hook)
        module, prefix = (member, "") if method == "forward" else (_MethodAsForward(member, method), "member.")
        left = {prefix + name: tensor for name, tensor in given.items()}
        before = list(map(version_of, given.values()))
        args, kwargs = arguments.of_member(index)
        # What a member draws must not depend on the modes of others, which may draw nothing.
        with noting(f"This is of member {index}."), nullcontext() if low is None else random_states_kept():
            if low is not None and high is not None:
                seed_in_use((int(high[index]) << 32) | int(low[index]))
            # Replaces the tensors in `left` by those that forward assigns.
            yield torch.func.functional_call(module, left, args, kwargs)
        with torch.no_grad():
            for (name, tensor), version in zip(given.items(), before, strict=True):
                if name in own or name in buffers:
                    held = buffers[name] if name in buffers else own[name].detach()[index]
                    _take_back(held, tensor, left[prefix + name], version, name in buffers)
        if list(map(version_of, inputs)) != versions:
            raise FusionError(
                f"member {index} of a fused {fused._original} runs its own code, and writes into an input that all "
                "members see. Let it write into a copy, or give each its own by hf.stacked"
            )
    for stack in () if in_transform() else own.values():
        node: Any = listed[id(stack)][0].grad_fn
        if node is not None:
            # What members have assigned is in the stack now.
            node.version = version_of(stack)


class _RowsOfStack(torch.autograd.Function):
    """The rows of a stack in its memory, each with a version of its own, of which forward may write into each.

    Raises:
        RuntimeError: at the backward, if the stack was changed since the call.
    """

    @staticmethod
    def forward(ctx: Any, stack: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.stack = stack.detach()
        # With a common version, autograd would take a write into one row for a write into what others have saved.
        return tuple(row.data for row in stack.unbind())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        if version_of(ctx.stack) != ctx.version:
            raise RuntimeError(
                f"a parameter of shape {list(ctx.stack.shape)}, needed for the gradients of members that run their own "
                "code, has been modified by an inplace operation since they were called: call backward before "
                "optimizer.step()"
            )
        present = next((grad for grad in grads if grad is not None), None)
        if present is None:
            return None
        return torch.stack([torch.zeros_like(present) if grad is None else grad for grad in grads])


class _MethodAsForward(nn.Module):
    """A method of ``member`` as the forward of a module."""

    def __init__(self, member: nn.Module, name: str) -> None:
        super().__init__()
        self.member, self.name = member, name

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.member, self.name)(*args, **kwargs)


def _take_back(held: Tensor, given: Tensor, left: Tensor, version: int, is_buffer: bool) -> None:
    """Let ``held``, a member's tensor, be what forward has left of it, which ran with ``given`` of a ``version``."""
    if not has_address(left):
        return
    if left.data_ptr() != held.data_ptr():
        # Forward has assigned another tensor or its data.
        held.copy_(left.detach())
    elif left is given is not held and is_buffer:
        if version_of(left) != version:
            increment_version(held)
        # What forward has set on it is the member's.
        keep_marks(held, left)
        if left.is_leaf and left.requires_grad != held.requires_grad:
            held.requires_grad_(left.requires_grad)


def _with_own_version(buffer: Tensor) -> Tensor:
    """Return a tensor in the memory of ``buffer``, of whose writes autograd knows apart from those of other rows."""
    if buffer.requires_grad or buffer.is_inference():
        return buffer
    return keep_marks(buffer.data, buffer)


def joined_results(results: Sequence[Any], any_sizes: bool) -> tuple[list[Any], TreeSpec]:
    """Return the members' results as one, flat: each tensor ``[B, *S]``; see `member_values` for what is no tensor.

    Args:
        any_sizes: whether tensors may differ in sizes; they are `Ragged` then.

    Raises:
        FusionError: members give different structures, or tensors of different kinds.
    """
    flat = [pytree.tree_flatten(result) for result in results]
    kinds = [(spec, [_kind(leaf, any_sizes) for leaf in leaves]) for leaves, spec in flat]
    if (other := next((row for row, kind in enumerate(kinds) if kind != kinds[0]), None)) is not None:
        raise FusionError(
            f"model 0 gives {kinds[0]}, and model {other} {kinds[other]}, which an array cannot join. "
            "Return the same structure, shapes and dtypes from all"
        )
    joined: list[Any] = []
    for parts in zip(*(leaves for leaves, _ in flat), strict=True):
        if not isinstance(parts[0], Tensor):
            joined.append(member_values(parts))
        else:
            joined.append(join(parts) if len({part.shape for part in parts}) == 1 else Ragged(parts))
    return joined, flat[0][1]


def _kind(leaf: Any, any_sizes: bool) -> Any:
    if not isinstance(leaf, Tensor):
        return None
    return leaf.dim() if any_sizes else leaf.shape, leaf.dtype, leaf.device, leaf.layout


# Batches of different sizes: in one call, padded to the largest size, or member by member.

# How many times the members' own samples a padded batch may have. Small models take the time of their calls, not of
# their samples, and would gain beyond that; large ones would lose.
MOST_SAMPLES = 2


def check_ragged(members: int, arguments: Arguments) -> None:
    """Raise a ValueError if a ragged argument does not hold one batch per member."""
    for leaf in arguments.ragged:
        if len(leaf) != members:
            raise ValueError(
                f"hf.stacked input holds {len(leaf)} batches, of sizes {list(leaf.sizes)}, but the array has {members} "
                "members; give it one batch per member"
            )


def run_ragged(fused: FusedModule, arguments: Arguments) -> Any:
    """Return the outputs of all members for batches of different sizes.

    Batches are padded to the largest if that at most doubles the samples, and if forward provably computes each sample
    independently (`hfusion.passes.sample_dims`). A batch is padded with its own last sample, so that no new values
    arise, and the results are cut to the members' own. Otherwise the members run their own code.

    Raises:
        FusionError: inside of torch.func, or forward changes Python state of members that are computed for a step of
            some rows.
    """
    check_ragged(len(fused), arguments)
    if in_transform():
        raise FusionError(
            f"a fused {fused._original} is called inside of torch.func with batches of different sizes "
            f"({arguments.ragged[0]}), which no transform takes; give batches of one size, or transform the members"
        )
    sizes = _sizes(arguments)
    if sizes is None:
        why = "inputs differ in other sizes than the number of samples"
    elif min(sizes) == 0 or len(sizes) * max(sizes) > MOST_SAMPLES * sum(sizes):
        why = "padding would more than double the samples"
    else:
        filled = Arguments(tuple(_filled(leaf, sizes) for leaf in arguments.leaves), arguments.spec)
        dims = _padding(fused, arguments, filled, sizes)
        if not isinstance(dims, str):
            args, kwargs = filled.args_and_kwargs()
            leaves, spec = pytree.tree_flatten(fused.forward(*args, **kwargs))
            fused._has_padded = True
            return pytree.tree_unflatten([_cut(leaf, dim, sizes) for leaf, dim in zip(leaves, dims, strict=True)], spec)
        why = dims
    outputs = run_members(fused, arguments, f"batches of different sizes, {why}")
    if fused._is_part and not fused._views.are_unchanged():
        raise FusionError(
            f"forward of {fused._original} changes attributes of members, which a step of some rows cannot keep. Step "
            "all rows"
        )
    return outputs


def _padding(
    fused: FusedModule, arguments: Arguments, filled: Arguments, sizes: Sequence[int]
) -> tuple[int | None, ...] | str:
    """Return the dim of samples of each output, None if it depends on no sample; or why no padded call is exact."""
    kind = fused._modes(filled), filled.loose_key
    if kind not in fused._refusals:
        try:
            compiled = fused._program(filled)
        except NotCaptured:
            raise
        except FusionError as error:
            fused._refusals[kind] = str(error)
        else:
            if compiled.found.samples is None:
                compiled.found.samples = _sample_dims(compiled, arguments)
            pairs = list(zip(arguments.leaves, filled.shapes, strict=True))
            rows = {size: row for row, size in enumerate(sizes)}.values()
            shapes = [[leaf[row].shape if isinstance(leaf, Ragged) else shape for leaf, shape in pairs] for row in rows]
            if not all(map(compiled.guards, shapes)):
                return "forward depends on the number of samples"
            return compiled.found.samples
    return fused._refusals[kind]


def _sample_dims(compiled: Compiled, arguments: Arguments) -> tuple[int | None, ...] | str:
    if compiled.opaque:
        return f"{compiled.opaque[0].path or 'forward'} runs as the members' own code"
    if compiled.written or compiled.modes:
        return f"forward changes {min(compiled.written, default='its modes')}"
    if compiled.checks:
        return f"forward checks values at {compiled.checks[0]}"
    if compiled.memory_orders is not None:
        return "forward depends on the strides of its inputs"
    # Only here is sympy needed, which takes long to import.
    from hfusion.passes.sample_dims import output_samples

    slots = zip(compiled.graph.find_nodes(op="placeholder"), compiled.program.slots, strict=True)
    inputs = [(node, int(slot.name)) for node, slot in slots if slot.kind is Kind.INPUT]
    batches = [node for node, position in inputs if isinstance(arguments.leaves[position], Ragged)]
    return output_samples(compiled.graph, batches)


def _sizes(arguments: Arguments) -> tuple[int, ...] | None:
    """Return each member's number of samples; None if ragged arguments disagree on it, or differ in other sizes."""
    sizes = {leaf.sizes for leaf in arguments.ragged}
    alike = all(len({tensor.shape[1:] for tensor in leaf}) == 1 for leaf in arguments.ragged)
    return sizes.pop() if alike and len(sizes) == 1 else None


def _filled(leaf: Any, sizes: Sequence[int]) -> Any:
    """Pad a ragged argument to ``[B, N, ...]`` by repeating each last sample. Other leaves are returned unchanged."""
    if not isinstance(leaf, Ragged):
        return leaf
    device = leaf[0].device
    counts = torch.tensor(sizes, device=device).unsqueeze(1)
    positions = torch.arange(max(sizes), device=device).minimum(counts - 1)
    return StackedInput(torch.cat(tuple(leaf))[counts.cumsum(0) - counts + positions])


def _cut(leaf: Any, dim: int | None, sizes: Sequence[int]) -> Any:
    if dim is None:
        return leaf
    return Ragged(row.narrow(dim, 0, size) for row, size in zip(leaf.unbind(), sizes, strict=True))
