"""Rewrite in-place operators to functional ones, so that batching rules never meet a write.

A write to a tensor is a new value for that tensor, for every tensor it is a view of, and for every other view of
those. Writes to buffers stay, as one ``copy_`` of the new value into the buffer after the write. So do writes to
parameters, which autograd does not see: later reads of the parameter read its memory, and contribute to its gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.passes.candidates import Unbatchable
from hfusion.passes.side_effects import RUNNING_STATISTICS, remove_dead
from hfusion.passes.views import (
    IDENTITY,
    LISTS,
    RESHAPES,
    SCATTERS,
    Rewriting,
    emit,
    infer,
    location,
    scattered,
    shows_all,
    sizes_of,
    viewed,
    writes,
)

aten = torch.ops.aten

BITWISE = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}

RENAMED = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.zero_.default: aten.zero.default,
}


def functional(graph: fx.Graph, writable: frozenset[str], parameters: frozenset[str] = frozenset()) -> fx.Graph:
    """``graph`` without in-place operators, except ``copy_`` into placeholders.

    Args:
        writable: names of the placeholders that are buffers.
        parameters: names of those that are parameters.

    Raises:
        FusionError: a write to any other placeholder, or a write that has no functional form.
    """
    positions = {node: k for k, node in enumerate(graph.nodes)}
    state = Rewriting(fx.Graph(), positions, differentiable(graph, writable), parameters)
    for node in graph.nodes:
        try:
            _rewrite(state, node, writable)
        except FusionError as error:
            raise Unbatchable(node, str(error)) from error
    remove_dead(state.graph)
    keep_old_values(state.graph, writable, parameters)
    return state.graph


def _rewrite(state: Rewriting, node: fx.Node, writable: frozenset[str]) -> None:
    if node.target is OPAQUE:
        _call_members(state, node)
        return
    if node.target is aten.detach_.default and node.args[0] not in state.differentiable:
        # As of torch.tensor(x.shape[0]): no gradient is cut off.
        written: fx.Node = node.args[0]  # type: ignore[assignment]
        state.current[node], state.parent[node] = state.current[written], written
        return
    if writes(node):
        _write(state, node, writable)
        return
    state.current[node] = new = state.graph.node_copy(node, lambda n: state.current[n])
    if node.target in RUNNING_STATISTICS:
        _keep_statistics(state, node, new)
    source = viewed(node)
    if source is not None:
        state.parent[node] = source


def _write(state: Rewriting, node: fx.Node, writable: frozenset[str]) -> None:
    written, alias = node.args[0], node.target._schema.arguments[0].alias_info  # type: ignore[union-attr]
    if not isinstance(written, fx.Node) or alias is None or not alias.is_write:
        raise FusionError(f"{location(node)}: {node.target} writes into several tensors; write it without in-place")
    _check_view(state, written, node)
    value = _functional_call(state, node)
    if state.is_parameter(state.root(written)):
        _write_parameter(state, written, value, node)
        return
    _assign(state, written, value, node)
    state.parent[node] = written
    state.current[node] = value
    _write_back(state, state.root(written), node, writable)


def _write_parameter(state: Rewriting, written: fx.Node, value: fx.Node, node: fx.Node) -> None:
    """Copy ``value``, which ``node`` leaves in ``written``, into the parameter, and read its views again."""
    root, view = state.root(written), written
    while view in state.parent:
        above = state.parent[view]
        whole = state.current[above]
        if above is root:
            whole = emit(state, node, aten.detach.default, (whole,), {})
        value = scattered(state, view, whole, value)
        view = above
    original = _placeholder(state, root)
    state.graph.call_function(aten.copy_.default, (original, value)).meta["val"] = original.meta["val"]
    state.parent[node] = written
    # A node of its own: what was made of the parameter before the write is not to be used again.
    state.current[root] = emit(state, node, aten.alias.default, (original,), {})
    for other in state.family(written):
        if other is not root and _used_later(state, other, node):
            state.current[other] = _replay(state, other)


def _assign(state: Rewriting, written: fx.Node, value: fx.Node, node: fx.Node) -> None:
    """Make ``value`` the value of ``written`` after ``node``, and update its bases and their other views."""
    state.current[written] = value
    on_path = {written}
    below = written
    while below in state.parent:
        above = state.parent[below]
        scatter = scattered(state, below, state.current[above], state.current[below])
        state.current[above] = scatter
        on_path.add(above)
        below = above
    for view in state.family(written):
        if view not in on_path and _used_later(state, view, node):
            state.current[view] = _replay(state, view)


def _call_members(state: Rewriting, node: fx.Node) -> None:
    """Emit a call of the members' own code, which writes in place: later reads see the tensors it wrote."""
    changing, call = node.args[2], node.args[3]
    places = [_in_memory(state, tensor, node) for tensor in changing]  # type: ignore[union-attr, arg-type]
    state.current[node] = new = state.graph.node_copy(node, lambda n: state.current[n])
    # What was seen has been checked; members may differ in it.
    new.args = (*new.args[:2], places, call, [], False)
    for tensor, buffer in zip(changing, places, strict=True):  # type: ignore[arg-type]
        assert isinstance(tensor, fx.Node)
        # Once more a node of its own: what was made of the tensor before the call is not to be used again.
        if any(_used_later(state, view, node) for view in state.family(tensor)):
            _assign(state, tensor, emit(state, node, aten.alias.default, (buffer,), {}), node)


def _in_memory(state: Rewriting, tensor: fx.Node, node: fx.Node) -> fx.Node:
    """Return a node with the current value of ``tensor`` that may be written into: its placeholder, or a copy."""
    below = tensor
    while below in state.parent and (below.target in IDENTITY or writes(below)):
        below = state.parent[below]
    if below.op == "placeholder":
        return _placeholder(state, below)
    _check_view(state, tensor, node)
    return emit(state, node, aten.clone.default, (state.current[tensor],), {})


def _placeholder(state: Rewriting, node: fx.Node) -> fx.Node:
    placeholder: fx.Node = next(n for n in state.graph.nodes if n.op == "placeholder" and n.name == node.name)
    return placeholder


def _functional_call(state: Rewriting, node: fx.Node) -> fx.Node:
    """Emit the functional form of a write; return the value that the tensor has after it."""
    target = _functional_target(node)
    args = fx.map_arg(node.args, lambda n: state.current[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: state.current[n])
    written = args[0]
    assert isinstance(written, fx.Node)
    if target is aten.copy.default:
        source = args[1]
        assert isinstance(source, fx.Node)
        copied = _copy(state, node, written, source)
        return _with_gradient_of(state, node, written, copied) if _hides_whole(state, node) else copied
    value = emit(state, node, target, args, kwargs)
    example = written.meta["val"]
    if value.meta["val"].dtype == example.dtype:
        return value
    cast = emit(state, node, aten.to.dtype, (value, example.dtype), {})
    # Operators such as comparisons return bools, through which no gradient flows.
    ends = not (value.meta["val"].is_floating_point() or value.meta["val"].is_complex())
    return _with_gradient_of(state, node, written, cast) if ends and _hides_whole(state, node) else cast


def _copy(state: Rewriting, node: fx.Node, written: fx.Node, source: fx.Node) -> fx.Node:
    """Copy ``source`` to the shape, dtype and device of ``written``, without ``aten.copy``, which has no derivative."""
    written_val, source_val = written.meta["val"], source.meta["val"]
    if (written_val.dtype, written_val.device) != (source_val.dtype, source_val.device):
        source = emit(
            state, node, aten._to_copy.default, (source,), {"dtype": written_val.dtype, "device": written_val.device}
        )
    expanded = emit(state, node, aten.expand.default, (source, sizes_of(state, node, written)), {})
    return emit(state, node, aten.clone.default, (expanded,), {"memory_format": torch.contiguous_format})


def _hides_whole(state: Rewriting, write: fx.Node) -> bool:
    """True if ``write`` replaces all of a tensor that gradients flow through."""
    node = write.args[0]
    assert isinstance(node, fx.Node)
    while node in state.parent and shows_all(node):
        node = state.parent[node]
    return node not in state.parent and node in state.differentiable and not state.is_parameter(node)


def _with_gradient_of(state: Rewriting, node: fx.Node, written: fx.Node, value: fx.Node) -> fx.Node:
    """Return ``value``, connected to ``written``, whose gradient is then zeros as in autograd instead of None."""
    always = emit(state, node, aten.ones.default, ([],), {"dtype": torch.bool, "device": value.meta["val"].device})
    return emit(state, node, aten.where.self, (always, value, written), {})


def _functional_target(node: fx.Node) -> OpOverload:
    target = node.target
    assert isinstance(target, OpOverload)
    if target in RENAMED:
        renamed: OpOverload = RENAMED[target]
        return renamed
    space, name = target._schema.name.split("::")
    plain = "" if space != "aten" else BITWISE.get(name, name[:-1] if name.endswith("_") else "")
    packet = getattr(aten, plain, None) if plain else None
    found = None if packet is None else _without_writes(packet, target._schema.arguments)
    if found is None:
        raise FusionError(f"{location(node)}: {target} has no functional form; write it without in-place")
    return found[0]


def _without_writes(packet: Any, arguments: Sequence[Any]) -> tuple[OpOverload, list[str]] | None:
    """Return the overload of ``packet`` that takes ``arguments`` and writes to none, and the names of those it adds.

    Those it adds have defaults. The first argument, the tensor that is written to in place, has no fixed name.
    """

    def types(schema_arguments: Sequence[Any]) -> list[tuple[str, str]]:
        return [(a.name if k else "", str(a.type)) for k, a in enumerate(schema_arguments)]

    found: list[tuple[OpOverload, list[str]]] = []
    for overload in packet.overloads():
        candidate: OpOverload = getattr(packet, overload)
        taken = candidate._schema.arguments
        extra = taken[len(arguments) :]
        alike = types(taken[: len(arguments)]) == types(arguments) and all(a.has_default_value() for a in extra)
        if alike and not candidate._schema.is_mutable:
            found.append((candidate, [a.name for a in extra]))
    return min(found, key=lambda pair: len(pair[1]), default=None)


def _used_later(state: Rewriting, view: fx.Node, write: fx.Node) -> bool:
    write_position = state.position[write]
    return any(state.position[user] > write_position for user in view.users) or any(
        state.parent.get(child) is view and _used_later(state, child, write) for child in state.parent
    )


def _replay(state: Rewriting, view: fx.Node) -> fx.Node:
    """Take the view again, from the current value of its parent."""
    if view.target is operator.getitem:
        views, index = view.args
        assert isinstance(views, fx.Node)
        return emit(state, view, operator.getitem, (_replay(state, views), index), {})
    args = fx.map_arg(view.args, lambda n: state.current[n])
    kwargs = fx.map_arg(view.kwargs, lambda n: state.current[n])
    if writes(view):
        return state.current[state.parent[view]]  # type: ignore[no-any-return]
    return emit(state, view, view.target, args, kwargs)


def _check_view(state: Rewriting, written: fx.Node, write: fx.Node) -> None:
    """Raise FusionError if a step from the root to the written tensor cannot be inverted."""
    if torch.Tag.inplace_view in write.target.tags and len(state.family(written)) > 1:  # type: ignore[union-attr]
        raise FusionError(
            f"{location(write)}: {write.target} changes the shape of a tensor that has views; write it out"
        )
    node = written
    while node in state.parent:
        above = state.parent[node]
        hidden = node.target is aten.detach.default and above in state.differentiable
        if hidden and not state.is_parameter(state.root(node)):
            raise FusionError(
                f"{location(write)}: {write.target} writes, unseen by autograd, into a tensor that gradients flow "
                "through; write into a clone"
            )
        view = node.args[0] if node.target is operator.getitem else node
        assert isinstance(view, fx.Node)
        undoable = view.target in IDENTITY | RESHAPES | LISTS or view.target in SCATTERS or writes(view)
        if not undoable:
            raise FusionError(
                f"{location(write)}: {write.target} writes through {view.target}, which hfusion cannot undo; "
                "write into the tensor itself, or use torch.where"
            )
        node = above


def _write_back(state: Rewriting, root: fx.Node, write: fx.Node, writable: frozenset[str]) -> None:
    if root.op != "placeholder":
        return
    if root.name not in writable:
        raise FusionError(
            f"{location(write)}: forward writes into {root.name}, an input or a constant; "
            "write into a registered buffer or a copy instead"
        )
    original = _placeholder(state, root)
    state.graph.call_function(aten.copy_.default, (original, state.current[root])).meta["val"] = original.meta["val"]


def _keep_statistics(state: Rewriting, node: fx.Node, new: fx.Node) -> None:
    """Norms update their running statistics unseen; those must be the buffers themselves."""
    for statistic in node.args[3:5]:
        if not isinstance(statistic, fx.Node):
            continue
        buffer = state.current[statistic]
        # If gradients are off, and after eager fallbacks, they are views of the buffers.
        while buffer.target in IDENTITY:
            buffer = buffer.args[0]
        if buffer.op != "placeholder":
            raise FusionError(f"{location(node)}: running statistics that forward also writes itself cannot be fused")
        new.replace_input_with(state.current[statistic], buffer)


# Keep the values of buffers and parameters that are needed after a write.


def keep_old_values(graph: fx.Graph, writable: frozenset[str], parameters: frozenset[str]) -> None:
    """Read a copy of a tensor where its value before a write is needed after it: by backward, or by the caller."""
    gradients = differentiable(graph, writable)
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in writable | parameters]:
        writes = [user for user in node.users if _changes(user, node)]
        if not writes:
            continue
        # These nodes read the values that members' own code has written into the buffer.
        again = [user for user in node.users if user.target is aten.alias.default]
        direct_users = {*writes, *again, *(user for user in node.users if user.target in RUNNING_STATISTICS)}
        for source in (node, *again):
            nodes = list(graph.nodes)
            first = next((k for k in range(nodes.index(source), len(nodes)) if nodes[k] in writes), None)
            if first is None:
                continue
            passed = set(nodes[first:])
            readers = [user for user in _readers(source, direct_users) if user not in direct_users]
            if any(user in gradients or user in passed or user.op == "output" for user in readers):
                others = set(source.users).difference(direct_users)
                with graph.inserting_after(source):
                    old = graph.call_function(aten.clone.default, (source,))
                old.meta["val"] = source.meta["val"]
                source.replace_all_uses_with(old, others.__contains__)


def _changes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target is OPAQUE:
        return buffer in user.args[2]  # type: ignore[operator]
    return user.target is aten.copy_.default and user.args[0] is buffer


def _readers(node: fx.Node, direct_users: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the users of ``node`` and of its views, except those through ``direct_users``."""
    for user in node.users:
        yield user
        if user not in direct_users and viewed(user) is node:
            yield from _readers(user, direct_users)


def differentiable(graph: fx.Graph, writable: frozenset[str]) -> set[fx.Node]:
    """Return the nodes that a gradient may flow through."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        example = node.meta.get("val")
        if isinstance(example, Tensor) and not (example.is_floating_point() or example.is_complex()):
            continue
        trained = node.name not in writable if node.op == "placeholder" else not found.isdisjoint(node.all_input_nodes)
        if trained and node.target is not aten.detach.default:
            found.add(node)
    return found


# Calls that write into a tensor given as ``out=``, as calls that give a result, and copies of it.


def out_arguments(target: Any) -> list[str]:
    """The names of the arguments that ``target`` writes its results into; empty unless it is an ``out=`` form."""
    if not isinstance(target, OpOverload) or target.namespace != "aten":
        return []
    written = [a for a in target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return [a.name for a in written] if all(a.kwarg_only for a in written) else []


def without_out(graph: fx.Graph, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """Write an ``out=`` call of another graph, whose operands are nodes of ``graph``, as a call that gives its results.

    Returns: the call, and the tensors that its results are to be copied into.

    Raises:
        FusionError: the operator has no form without ``out=``, or its results have other shapes than the tensors.
    """
    names = out_arguments(node.target)
    target: Any = node.target
    found = _without_writes(target.overloadpacket, [a for a in target._schema.arguments if a.name not in names])
    if found is None:
        raise FusionError(f"{location(node)}: {target} has no form without out=; use its result")
    functional, extra = found
    kwargs = {name: value for name, value in node.kwargs.items() if name not in names}
    tensors: list[fx.Node] = [node.kwargs[name] for name in names]  # type: ignore[misc]
    example = tensors[0].meta["val"]
    kwargs |= {name: getattr(example, name) for name in ("dtype", "device") if name in extra}
    call = graph.call_function(functional, node.args, kwargs)
    call.meta.update({name: node.meta[name] for name in ("stack_trace", "nn_module_stack") if name in node.meta})
    call.meta["val"] = infer(functional, call.args, call.kwargs)
    results = call.meta["val"] if len(names) > 1 else [call.meta["val"]]
    for tensor, result in zip(tensors, results, strict=True):
        if tensor.meta["val"].shape != result.shape:
            raise FusionError(
                f"{location(node)}: {node.target} resizes the tensor given as out=; give one of the shape "
                f"{tuple(result.shape)}, or use the result"
            )
    return call, tensors


# Calls that run the members' own code, as one operator of a graph.

_library = torch.library.Library("hfusion", "DEF")
# ``fixed`` and ``changing`` are the submodule's own tensors.
_library.define(
    "opaque(Tensor[] inputs, Tensor[] fixed, Tensor(a!)[] changing, int call) -> Tensor[]",
    tags=(torch.Tag.nondeterministic_seeded,),
)
OPAQUE: OpOverload = torch.ops.hfusion.opaque.default
