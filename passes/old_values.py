"""Keep the values of buffers and parameters that are needed after a write."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, fx

from hfusion.passes.islands import OPAQUE
from hfusion.passes.side_effects import RUNNING_STATISTICS
from hfusion.passes.view_writes import Rewriting
from hfusion.passes.views import viewed

aten = torch.ops.aten


def keep_old_values(graph: fx.Graph, writable: frozenset[str], parameters: frozenset[str]) -> None:
    """Read a copy of a tensor where its value before a write is needed after it: by backward, or by the caller."""
    gradients = _with_gradients(graph, writable)
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in writable | parameters]:
        writes = [user for user in node.users if _changes(user, node)]
        if not writes:
            continue
        # These nodes read the values that members' own code has written into the buffer.
        again = [user for user in node.users if user.target is aten.alias.default]
        direct_users = {*writes, *again, *(user for user in node.users if user.target in RUNNING_STATISTICS)}
        for source in (node, *again):
            _keep_old_value(graph, source, writes, direct_users, gradients)


def _changes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target is OPAQUE:
        return buffer in user.args[2]  # type: ignore[operator]
    return user.target is aten.copy_.default and user.args[0] is buffer


def _keep_old_value(
    graph: fx.Graph, source: fx.Node, writes: list[fx.Node], direct_users: set[fx.Node], gradients: set[fx.Node]
) -> None:
    """Apply `keep_old_values` to ``source``, a buffer or an alias; ``direct_users`` use the buffer itself."""
    nodes = list(graph.nodes)
    after = nodes[nodes.index(source) :]
    first = next((index for index, node in enumerate(after) if node in writes), None)
    if first is None:
        return
    passed = set(after[first:])
    readers = [user for user in _readers(source, direct_users) if user not in direct_users]
    if any(user in gradients or user in passed or user.op == "output" for user in readers):
        _read_copy(graph, source, direct_users)


def _read_copy(graph: fx.Graph, buffer: fx.Node, direct_users: set[fx.Node]) -> None:
    """Make all users of ``buffer`` except the ``direct_users`` use a copy of it."""
    with graph.inserting_after(buffer):
        old = graph.call_function(aten.clone.default, (buffer,))
    old.meta["val"] = buffer.meta["val"]
    buffer.replace_all_uses_with(old, lambda user: user is not old and user not in direct_users)


def _readers(node: fx.Node, direct_users: set[fx.Node]) -> Iterator[fx.Node]:
    """Yield the users of ``node`` and of its views, except those through ``direct_users``."""
    for user in node.users:
        yield user
        if user not in direct_users and viewed(user) is node:
            yield from _readers(user, direct_users)


def _with_gradients(graph: fx.Graph, writable: frozenset[str]) -> set[fx.Node]:
    """The calls that a gradient may flow through."""
    state = Rewriting(graph)
    for node in graph.nodes:
        if differentiable(state, node, writable):
            state.differentiable.add(node)
    return state.differentiable


def differentiable(state: Rewriting, node: fx.Node, writable: frozenset[str]) -> bool:
    """True if a gradient may flow through ``node``."""
    example = node.meta.get("val")
    if isinstance(example, Tensor) and not (example.is_floating_point() or example.is_complex()):
        return False
    if node.op == "placeholder":
        return node.name not in writable
    return node.target is not aten.detach.default and any(a in state.differentiable for a in node.all_input_nodes)
