"""Rewrite in-place operators to functional ones, so that batching rules never meet a write.

A write to a tensor is a new value for that tensor, for every tensor it is a view of, and for every other view of
those. Writes to buffers stay, as one ``copy_`` of the new value into the buffer after the write.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from hfusion.errors import FusionError
from hfusion.passes.islands import OPAQUE, Watched, checked

aten = torch.ops.aten

# They give the input itself where they drop nothing. Their traces say that they copy it.
DROPOUTS = frozenset(
    {
        aten.dropout.default,
        aten.feature_dropout.default,
        aten.alpha_dropout.default,
        aten.feature_alpha_dropout.default,
    }
)
# Those of them that are views at all show the whole.
IDENTITY = frozenset({aten.detach.default, aten.alias.default, aten.lift_fresh.default}) | DROPOUTS
RESHAPES = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.flatten.using_ints,
        aten.unflatten.int,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.device,
        aten.to.dtype_layout,
        aten.view_as.default,
    }
)
# Operators whose results are views side by side.
LISTS = frozenset(
    {
        aten.unbind.int,
        aten.split.Tensor,
        aten.split.sizes,
        aten.split_with_sizes.default,
        aten.chunk.default,
        aten.tensor_split.sections,
        aten.tensor_split.indices,
    }
)
BITWISE = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor"}
RENAMED = {
    aten.normal_.default: aten.normal_functional.default,
    aten.bernoulli_.float: aten.bernoulli.p,
    aten.zero_.default: aten.zero.default,
}


RUNNING_STATISTICS = frozenset({aten.batch_norm.default, aten.instance_norm.default})


@dataclass
class _State:
    """What the rewriting knows: the new graph, each old node's current value, and which node is a view of which."""

    graph: fx.Graph
    current: dict[fx.Node, Any] = field(default_factory=dict)
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    position: dict[fx.Node, int] = field(default_factory=dict)
    differentiable: set[fx.Node] = field(default_factory=set)

    def family(self, node: fx.Node) -> list[fx.Node]:
        """The views of ``node``'s root, the root first, in order of creation."""
        root = self.root(node)
        return [root, *(view for view in self.parent if self.root(view) is root)]

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node


def functional(graph: fx.Graph, writable: frozenset[str]) -> fx.Graph:
    """``graph`` without in-place operators, except ``copy_`` into the placeholders named in ``writable``.

    Raises:
        FusionError: a write to any other placeholder, or a write that has no functional form.
    """
    watched = checked(graph, _viewed, RUNNING_STATISTICS)
    state = _State(fx.Graph(), position={node: k for k, node in enumerate(graph.nodes)})
    for node in graph.nodes:
        if _differentiable(state, node, writable):
            state.differentiable.add(node)
        if node.target is OPAQUE:
            _call_members(state, node, watched[node])
            continue
        if node.target is aten.detach_.default and node.args[0] not in state.differentiable:
            # As of torch.tensor(x.shape[0]): no gradient is cut off.
            state.current[node] = state.current[node.args[0]]
            state.parent[node] = node.args[0]
            continue
        if _writes(node):
            _write(state, node, writable)
            continue
        state.current[node] = new = state.graph.node_copy(node, lambda n: state.current[n])
        if node.target in RUNNING_STATISTICS:
            _keep_statistics(state, node, new)
        source = _viewed(node)
        if source is not None:
            state.parent[node] = source
    remove_dead(state.graph)
    _keep_old_values(state.graph, writable)
    return state.graph


def _keep_old_values(graph: fx.Graph, writable: frozenset[str]) -> None:
    """Read a copy of a buffer where its value before a write is needed after it: by backward, or by the caller."""
    gradients = _with_gradients(graph, writable)
    for node in [n for n in graph.nodes if n.op == "placeholder" and n.name in writable]:
        writes = [user for user in node.users if _changes(user, node)]
        # What members' own code left in the buffer is read by these.
        again = [user for user in node.users if user.target is aten.alias.default]
        kept = {*writes, *again, *(user for user in node.users if user.target in RUNNING_STATISTICS)}
        for source in (node, *again):
            _keep_old_value(graph, source, writes, kept, gradients)


def _changes(user: fx.Node, buffer: fx.Node) -> bool:
    if user.target is OPAQUE:
        return buffer in user.args[2]  # type: ignore[operator]
    return user.target is aten.copy_.default and user.args[0] is buffer


def _keep_old_value(
    graph: fx.Graph, source: fx.Node, writes: list[fx.Node], kept: set[fx.Node], gradients: set[fx.Node]
) -> None:
    """As `_keep_old_values`, of what ``source`` shows of a buffer; ``kept`` are to use the buffer itself."""
    nodes = list(graph.nodes)
    after = nodes[nodes.index(source) :]
    first = next((place for place, node in enumerate(after) if node in writes), None)
    if first is None:
        return
    passed = set(after[first:])
    readers = [user for user in _readers(source, kept) if user not in kept]
    if any(user in gradients or user in passed or user.op == "output" for user in readers):
        _read_copy(graph, source, kept)


def _read_copy(graph: fx.Graph, buffer: fx.Node, kept: set[fx.Node]) -> None:
    """Let all but ``kept`` use a copy of ``buffer``."""
    with graph.inserting_after(buffer):
        old = graph.call_function(aten.clone.default, (buffer,))
    old.meta["val"] = buffer.meta["val"]
    buffer.replace_all_uses_with(old, lambda user: user is not old and user not in kept)


def _readers(node: fx.Node, kept: set[fx.Node]) -> Iterator[fx.Node]:
    """Those who use ``node`` or a view of it, but not by way of ``kept``."""
    for user in node.users:
        yield user
        if user not in kept and _viewed(user) is node:
            yield from _readers(user, kept)


def _with_gradients(graph: fx.Graph, writable: frozenset[str]) -> set[fx.Node]:
    """The calls that a gradient may flow through."""
    state = _State(graph)
    for node in graph.nodes:
        if _differentiable(state, node, writable):
            state.differentiable.add(node)
    return state.differentiable


def _differentiable(state: _State, node: fx.Node, writable: frozenset[str]) -> bool:
    """Whether a gradient may flow through ``node``."""
    example = node.meta.get("val")
    if isinstance(example, Tensor) and not (example.is_floating_point() or example.is_complex()):
        return False
    if node.op == "placeholder":
        return node.name not in writable
    return node.target is not aten.detach.default and any(a in state.differentiable for a in node.all_input_nodes)


def remove_dead(graph: fx.Graph) -> None:
    """Drop calls without users, except writes and autocast borders, and assertions that export proved."""
    for node in reversed(list(graph.nodes)):
        asserts = node.target in (
            aten._assert_tensor_metadata.default,
            aten.sym_constrain_range_for_size.default,
        )
        if node.op == "call_function" and not node.users and (asserts or not has_effect(node)):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """Whether a call matters beyond its value."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable or target in RUNNING_STATISTICS
    return target in (torch.amp.autocast_mode._enter_autocast, torch.amp.autocast_mode._exit_autocast)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes to."""
    if node.target in RUNNING_STATISTICS:
        training = node.args[5] if len(node.args) > 5 else True
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)] if training else []
    return [node.args[0]] if _writes(node) and isinstance(node.args[0], fx.Node) else []


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def _viewed(node: fx.Node) -> fx.Node | None:
    """The node that ``node`` is a view of; one of several side by side is a view of what those are views of."""
    if node.target is operator.getitem:
        call = node.args[0]
        assert isinstance(call, fx.Node)
        return _viewed(call) if call.target in LISTS else _handed_on(call, node)
    if node.op != "call_function" or not isinstance(node.target, OpOverload):
        return None
    schema = node.target._schema
    aliased = schema.arguments and schema.arguments[0].alias_info is not None
    if not aliased or not any(r.alias_info is not None for r in schema.returns):
        return _handed_on(node, node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return source if _shares_storage(node, source) else None


def _handed_on(call: fx.Node, result: fx.Node) -> fx.Node | None:
    """The operand that a composite operator gives back, or a view of it, though its schema does not say so."""
    target = call.target
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return None
    if not torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"):
        return None
    example = _infer(target, call.args, call.kwargs) if target in DROPOUTS else result.meta.get("val")
    return next((operand for operand in call.all_input_nodes if _same_storage(operand.meta.get("val"), example)), None)


def _same_storage(a: Any, b: Any) -> bool:
    # A sparse tensor has several storages, and is no view.
    both = all(isinstance(x, Tensor) and x.layout is torch.strided for x in (a, b))
    return both and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _shares_storage(node: fx.Node, source: fx.Node) -> bool:
    """Whether a call that may give a view gives one, told by running it on the fake tensors."""
    example = source.meta.get("val")
    if not isinstance(example, Tensor):
        return True
    result = _infer(node.target, node.args, node.kwargs)
    parts = result if isinstance(result, list | tuple) else [result]
    return any(_same_storage(part, example) for part in parts)


def _infer(target: Any, args: Any, kwargs: Any) -> Any:
    """The (fake) result of a call, from the examples of its operands."""
    values = fx.map_arg((args, dict(kwargs)), lambda n: n.meta["val"])
    fakes = [leaf for leaf in torch.utils._pytree.tree_leaves(values) if isinstance(leaf, FakeTensor)]
    if not fakes:
        return target(*values[0], **values[1])
    sizes = [size for fake in fakes for size in fake.shape]
    # Sizes that vary need the operators' Python forms, which copy where the others may hand on their input.
    python = enable_python_dispatcher() if any(not isinstance(size, int) for size in sizes) else nullcontext()
    with python, fakes[0].fake_mode:
        return target(*values[0], **values[1])


def _write(state: _State, node: fx.Node, writable: frozenset[str]) -> None:
    written = node.args[0]
    if not isinstance(written, fx.Node) or node.target._schema.name.endswith("_out"):  # type: ignore[union-attr]
        raise FusionError(f"{_where(node)}: {node.target} writes into several tensors; write it without in-place")
    _check_view(state, written, node)
    value = _functional_call(state, node)
    _assign(state, written, value, node)
    state.parent[node] = written
    state.current[node] = value
    _write_back(state, state.root(written), node, writable)


def _assign(state: _State, written: fx.Node, value: fx.Node, node: fx.Node) -> None:
    """From ``node`` on, ``written`` holds ``value``; so do the tensors that it is a view of, and their other views."""
    state.current[written] = value
    on_path = {written}
    below = written
    while below in state.parent:
        above = state.parent[below]
        scatter = _scatter(state, below, state.current[above], state.current[below])
        state.current[above] = scatter
        on_path.add(above)
        below = above
    for view in state.family(written):
        if view not in on_path and _used_later(state, view, node):
            state.current[view] = _replay(state, view)


def _call_members(state: _State, node: fx.Node, watched: Watched) -> None:
    """Members' own code changes its tensors where they lie; what is read of them later, is read anew."""
    changing, call = node.args[2], node.args[3]
    places = [_in_memory(state, tensor, node) for tensor in changing]  # type: ignore[union-attr, arg-type]
    state.current[node] = new = state.graph.node_copy(node, lambda n: state.current[n])
    new.args = (*new.args[:2], places, call, [], [], watched.apart, watched.alive)
    for tensor, place in zip(changing, places, strict=True):  # type: ignore[arg-type]
        assert isinstance(tensor, fx.Node)
        # Once more a node of its own: what was made of the tensor before the call is not to be used again.
        if any(_used_later(state, one, node) for one in state.family(tensor)):
            _assign(state, tensor, _emit(state, node, aten.alias.default, (place,), {}), node)


def _in_memory(state: _State, tensor: fx.Node, node: fx.Node) -> fx.Node:
    """What holds the present value of ``tensor`` and may be written into: its placeholder, or a copy."""
    below = tensor
    while below in state.parent and (below.target in IDENTITY or _writes(below)):
        below = state.parent[below]
    if below.op == "placeholder":
        return _placeholder(state, below)
    _check_view(state, tensor, node)
    return _emit(state, node, aten.clone.default, (state.current[tensor],), {})


def _placeholder(state: _State, node: fx.Node) -> fx.Node:
    found: fx.Node = next(n for n in state.graph.nodes if n.op == "placeholder" and n.name == node.name)
    return found


def _functional_call(state: _State, node: fx.Node) -> fx.Node:
    """The value that the write leaves in the tensor."""
    target = _functional_target(node)
    args = fx.map_arg(node.args, lambda n: state.current[n])
    kwargs = fx.map_arg(node.kwargs, lambda n: state.current[n])
    written = args[0]
    assert isinstance(written, fx.Node)
    if target is aten.copy.default and written.meta["val"].is_complex():
        # Autograd knows `copy` for real numbers only.
        given = _emit(state, node, aten.to.dtype, (args[1], written.meta["val"].dtype), {})
        return _emit(state, node, aten.expand.default, (given, _sizes(state, node, written)), {})
    value = _emit(state, node, target, args, kwargs)
    example = written.meta["val"]
    if value.meta["val"].dtype != example.dtype:
        value = _emit(state, node, aten.to.dtype, (value, example.dtype), {})
    return value


def _functional_target(node: fx.Node) -> OpOverload:
    target = node.target
    assert isinstance(target, OpOverload)
    if target in RENAMED:
        renamed: OpOverload = RENAMED[target]
        return renamed
    space, name = target._schema.name.split("::")
    plain = "" if space != "aten" else BITWISE.get(name, name[:-1] if name.endswith("_") else "")
    packet = getattr(aten, plain, None) if plain else None
    for overload in packet.overloads() if packet is not None else ():
        found: OpOverload = getattr(packet, overload)
        if _parameters(found) == _parameters(target) and not found._schema.is_mutable:
            return found
    raise FusionError(f"{_where(node)}: {target} has no functional form; write it without in-place")


def _parameters(target: OpOverload) -> list[tuple[str, str]]:
    """Of each argument its name and type; the first, the tensor that a write is about, goes by several names."""
    return [(a.name if k else "", str(a.type)) for k, a in enumerate(target._schema.arguments)]


def _emit(state: _State, origin: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
    new = state.graph.call_function(target, args, kwargs)
    new.meta.update({name: origin.meta[name] for name in ("stack_trace", "nn_module_stack") if name in origin.meta})
    new.meta["val"] = _infer(target, args, kwargs)
    return new


def _used_later(state: _State, view: fx.Node, write: fx.Node) -> bool:
    now = state.position[write]
    return any(state.position[user] > now for user in view.users) or any(
        state.parent.get(child) is view and _used_later(state, child, write) for child in state.parent
    )


def _replay(state: _State, view: fx.Node) -> fx.Node:
    """The view taken anew of its parent's current value."""
    if view.target is operator.getitem:
        views, place = view.args
        assert isinstance(views, fx.Node)
        return _emit(state, view, operator.getitem, (_replay(state, views), place), {})
    args = fx.map_arg(view.args, lambda n: state.current[n])
    kwargs = fx.map_arg(view.kwargs, lambda n: state.current[n])
    if _writes(view):
        return state.current[state.parent[view]]  # type: ignore[no-any-return]
    return _emit(state, view, view.target, args, kwargs)


def _check_view(state: _State, written: fx.Node, write: fx.Node) -> None:
    """Every step from the root to the written tensor must be one that can be undone."""
    if torch.Tag.inplace_view in write.target.tags and len(state.family(written)) > 1:  # type: ignore[union-attr]
        raise FusionError(f"{_where(write)}: {write.target} changes the shape of a tensor that has views; write it out")
    node = written
    while node in state.parent:
        above = state.parent[node]
        if node.target is aten.detach.default and above in state.differentiable:
            raise FusionError(
                f"{_where(write)}: {write.target} writes, unseen by autograd, into a tensor that gradients flow "
                "through; write into a clone"
            )
        view = node.args[0] if node.target is operator.getitem else node
        assert isinstance(view, fx.Node)
        undoable = view.target in IDENTITY | RESHAPES | LISTS or view.target in _SCATTERS or _writes(view)
        if not undoable:
            raise FusionError(
                f"{_where(write)}: {write.target} writes through {view.target}, which hfusion cannot undo; "
                "write into the tensor itself, or use torch.where"
            )
        node = above


Scatter = Callable[[_State, fx.Node, Any, Any], fx.Node]


def _scatter(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``whole`` with the region that ``view`` shows replaced by ``part``."""
    if view.target in IDENTITY or _writes(view):
        return part
    if view.target in RESHAPES:
        sizes = _sizes(state, view, whole)
        return _emit(state, view, aten.reshape.default, (part, sizes), {})
    return _SCATTERS[view.target](state, view, whole, part)


def _sizes(state: _State, view: fx.Node, whole: fx.Node) -> list[Any]:
    """The sizes of ``whole``, symbolic ones as nodes."""
    return [
        size if isinstance(size, int) else _emit(state, view, aten.sym_size.int, (whole, dim), {})
        for dim, size in enumerate(whole.meta["val"].shape)
    ]


def _scatter_by(target: OpOverload) -> Scatter:
    def scatter(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        where = fx.map_arg(view.args[1:], lambda n: state.current[n])
        if not whole.meta["val"].is_complex():
            return _emit(state, view, target, (whole, part, *where), view.kwargs)
        # Autograd knows these for real numbers only.
        real = [_emit(state, view, aten.view_as_real.default, (_plain(state, view, x),), {}) for x in (whole, part)]
        dim, *rest = where or (view.kwargs.get("dim", 0),)
        place = dim % whole.meta["val"].dim()
        kwargs = {name: value for name, value in view.kwargs.items() if name != "dim"}
        return _as_complex(state, view, _emit(state, view, target, (*real, place, *rest), kwargs))

    return scatter


def _plain(state: _State, view: fx.Node, value: fx.Node) -> fx.Node:
    """``value`` itself where it was noted as the conjugate of another."""
    return _emit(state, view, aten.resolve_conj.default, (value,), {})


def _as_complex(state: _State, view: fx.Node, pairs: fx.Node) -> fx.Node:
    pairs = _emit(state, view, aten.contiguous.default, (pairs,), {})
    return _emit(state, view, aten.view_as_complex.default, (pairs,), {})


def _scatter_real(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    if not whole.meta["val"].is_complex():
        return part
    imaginary = _emit(state, view, aten.imag.default, (whole,), {})
    return _emit(state, view, aten.complex.default, (part, imaginary), {})


def _scatter_imaginary(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    real = _emit(state, view, aten.real.default, (whole,), {})
    return _emit(state, view, aten.complex.default, (real, part), {})


def _scatter_pairs(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` shows complex numbers as pairs of real ones."""
    return _as_complex(state, view, part)


def _scatter_complex(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` shows pairs of real numbers as complex ones."""
    return _emit(state, view, aten.view_as_real.default, (_plain(state, view, part),), {})


def _diagonal_back(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    return _emit(state, view, aten.diagonal_scatter.default, (whole, part, *view.args[1:]), view.kwargs)


def _permute_back(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    dims = [d % len(view.args[1]) for d in view.args[1]]  # type: ignore[union-attr, arg-type, operator]
    return _emit(state, view, aten.permute.default, (part, [dims.index(k) for k in range(len(dims))]), {})


def _same_again(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    return _emit(state, view, view.target, (part, *view.args[1:]), view.kwargs)


def _scatter_part(state: _State, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` is one of several views side by side."""
    views, place = view.args
    assert isinstance(views, fx.Node)
    assert isinstance(views.target, OpOverload)
    assert isinstance(place, int)
    names = [a.name for a in views.target._schema.arguments]
    dim = views.kwargs.get("dim", views.args[names.index("dim")] if len(views.args) > names.index("dim") else 0)
    if views.target is aten.unbind.int:
        return _emit(state, view, aten.select_scatter.default, (whole, part, dim, place), {})
    sizes = [example.shape[dim] for example in views.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise FusionError(f"{_where(view)}: a write into a part of varying size cannot be fused; write into a slice")
    start = sum(sizes[:place])
    return _emit(state, view, aten.slice_scatter.default, (whole, part, dim, start, start + sizes[place]), {})


_SCATTERS: Mapping[Any, Scatter] = {
    aten.select.int: _scatter_by(aten.select_scatter.default),
    aten.slice.Tensor: _scatter_by(aten.slice_scatter.default),
    aten.diagonal.default: _diagonal_back,
    aten.permute.default: _permute_back,
    aten.transpose.int: _same_again,
    aten.t.default: _same_again,
    aten.numpy_T.default: _same_again,
    aten.mT.default: _same_again,
    aten.mH.default: _same_again,
    aten.adjoint.default: _same_again,
    aten._conj.default: _same_again,
    aten._neg_view.default: _same_again,
    aten.real.default: _scatter_real,
    aten.imag.default: _scatter_imaginary,
    aten.view_as_real.default: _scatter_pairs,
    aten.view_as_complex.default: _scatter_complex,
    operator.getitem: _scatter_part,
}


def _write_back(state: _State, root: fx.Node, write: fx.Node, writable: frozenset[str]) -> None:
    if root.op != "placeholder":
        return
    if root.name not in writable:
        raise FusionError(
            f"{_where(write)}: forward writes into {root.name}, a parameter, an input or a constant; "
            "write into a registered buffer or a copy instead"
        )
    original = _placeholder(state, root)
    state.graph.call_function(aten.copy_.default, (original, state.current[root])).meta["val"] = original.meta["val"]


def _keep_statistics(state: _State, node: fx.Node, new: fx.Node) -> None:
    """Norms update their running statistics unseen; those must be the buffers themselves."""
    for statistic in node.args[3:5]:
        if not isinstance(statistic, fx.Node):
            continue
        now = state.current[statistic]
        # Where gradients are off, and after members' own code, as views of the buffers.
        while now.target in IDENTITY:
            now = now.args[0]
        if now.op != "placeholder":
            raise FusionError(f"{_where(node)}: running statistics that forward also writes itself cannot be fused")
        new.replace_input_with(state.current[statistic], now)


def _where(node: fx.Node) -> str:
    lines = [line.strip() for line in node.meta.get("stack_trace", "").strip().splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else f"node {node.name}"
