"""Find the views among the nodes of a captured graph, from their fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.ops.rule import hint
from hfusion.torch_private.dispatch_modes import FakeTensor, FakeTensorMode, enable_python_dispatcher
from hfusion.torch_private.operator_tables import is_composite

aten = torch.ops.aten

# They give the input itself where they drop nothing. Their traces say that they copy it.
DROPOUTS = frozenset(
    {aten.dropout.default, aten.feature_dropout.default, aten.alpha_dropout.default, aten.feature_alpha_dropout.default}
)

# Operators whose result, if it is a view, contains all elements of the operand.
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


def writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


def viewed(node: fx.Node) -> fx.Node | None:
    """Return the base of ``node``, None if it is no view; an item of a list of views has the base of the list."""
    if node.target is operator.getitem:
        call = node.args[0]
        assert isinstance(call, fx.Node)
        return viewed(call) if call.target in LISTS else _handed_on(call, node)
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
    if not _composite(call.target):
        return None
    if call.target in DROPOUTS:
        return handed_back(call)
    example = result.meta.get("val")
    return next((operand for operand in call.all_input_nodes if _same_storage(operand.meta.get("val"), example)), None)


def _composite(target: Any) -> bool:
    """True for a composite operator that writes into no operand."""
    if not isinstance(target, OpOverload) or target._schema.is_mutable:
        return False
    return is_composite(target.name())


def handed_back(call: fx.Node) -> fx.Node | None:
    """Return the operand that a call returns itself, if any, judged with symbols replaced by numbers."""
    if not _composite(call.target) or not isinstance(call.meta.get("val"), Tensor):
        return None
    mode = FakeTensorMode()
    with mode:
        examples = {operand: _of_numbers(operand.meta.get("val")) for operand in call.all_input_nodes}
        if any(example is None for example in examples.values()):
            return None
        args, kwargs = fx.map_arg((call.args, dict(call.kwargs)), examples.__getitem__)
        result = call.target(*args, **kwargs)  # type: ignore[operator]
    return next((operand for operand, example in examples.items() if example is result), None)


def _of_numbers(value: Any) -> Any:
    """The like of a value, with a number for every symbol; None where there is none."""
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, torch.SymInt) else value
    if value.layout is not torch.strided or value.is_conj() or value.is_neg():
        return None
    sizes, strides = ([hint(n) for n in numbers] for numbers in (value.shape, value.stride()))
    if None in sizes or None in strides:
        return None
    return torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)  # type: ignore[arg-type]


def _same_storage(a: Any, b: Any) -> bool:
    # A sparse tensor has several storages, and is no view.
    strided = all(isinstance(x, Tensor) and x.layout is torch.strided for x in (a, b))
    return strided and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def _shares_storage(node: fx.Node, source: fx.Node) -> bool:
    """True if a call that may return a view returns one when run on the fake tensors."""
    example = source.meta.get("val")
    if not isinstance(example, Tensor):
        return True
    result = infer(node.target, node.args, node.kwargs)
    parts = result if isinstance(result, list | tuple) else [result]
    return any(_same_storage(part, example) for part in parts)


def infer(target: Any, args: Any, kwargs: Any) -> Any:
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


def location(node: fx.Node) -> str:
    lines = [line.strip() for line in node.meta.get("stack_trace", "").strip().splitlines() if line.strip()]
    return " ".join(lines[-2:]) if lines else f"node {node.name}"


# Put the new value of a view back into its base.


@dataclass
class Rewriting:
    """A new graph that is being written.

    Attributes:
        position: the places of the old nodes.
        differentiable: the old nodes that a gradient may flow through.
        parameters: the names of parameters.
        current: the current value of each old node, in the new graph.
        parent: which old node is a view of which.
    """

    graph: fx.Graph
    position: Mapping[fx.Node, int]
    differentiable: Set[fx.Node]
    parameters: frozenset[str]
    current: dict[fx.Node, Any] = field(default_factory=dict)
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def is_parameter(self, node: fx.Node) -> bool:
        return node.op == "placeholder" and node.name in self.parameters

    def family(self, node: fx.Node) -> list[fx.Node]:
        """The views of ``node``'s root, the root first, in order of creation."""
        root = self.root(node)
        return [root, *(view for view in self.parent if self.root(view) is root)]

    def root(self, node: fx.Node) -> fx.Node:
        while node in self.parent:
            node = self.parent[node]
        return node


def emit(state: Rewriting, origin: fx.Node, target: Any, args: Any, kwargs: Any) -> fx.Node:
    """Emit a call into the new graph, with the source location of ``origin``."""
    new = state.graph.call_function(target, args, kwargs)
    new.meta.update(
        {name: origin.meta[name] for name in ("stack_trace", "nn_module_stack", "call") if name in origin.meta}
    )
    new.meta["val"] = infer(target, args, kwargs)
    return new


Scatter = Callable[[Rewriting, fx.Node, Any, Any], fx.Node]


def scattered(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``whole`` with the region that ``view`` shows replaced by ``part``."""
    if view.target in IDENTITY or writes(view):
        return part
    if view.target in RESHAPES:
        sizes = sizes_of(state, view, whole)
        return emit(state, view, aten.reshape.default, (part, sizes), {})
    return SCATTERS[view.target](state, view, whole, part)


def sizes_of(state: Rewriting, view: fx.Node, whole: fx.Node) -> list[Any]:
    """The sizes of ``whole``, symbolic ones as nodes."""
    return [
        size if isinstance(size, int) else emit(state, view, aten.sym_size.int, (whole, dim), {})
        for dim, size in enumerate(whole.meta["val"].shape)
    ]


def _scatter_by(target: OpOverload) -> Scatter:
    def scatter(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
        where = fx.map_arg(view.args[1:], lambda n: state.current[n])
        if not whole.meta["val"].is_complex():
            return emit(state, view, target, (whole, part, *where), view.kwargs)
        # Autograd knows these for real numbers only; a value may be noted as the conjugate of another.
        plain = (emit(state, view, aten.resolve_conj.default, (x,), {}) for x in (whole, part))
        real = [emit(state, view, aten.view_as_real.default, (x,), {}) for x in plain]
        dim, *rest = where or (view.kwargs.get("dim", 0),)
        wrapped_dim = dim % whole.meta["val"].dim()
        kwargs = {name: value for name, value in view.kwargs.items() if name != "dim"}
        pairs = emit(state, view, target, (*real, wrapped_dim, *rest), kwargs)
        pairs = emit(state, view, aten.contiguous.default, (pairs,), {})
        return emit(state, view, aten.view_as_complex.default, (pairs,), {})

    return scatter


def _diagonal_back(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    return emit(state, view, aten.diagonal_scatter.default, (whole, part, *view.args[1:]), view.kwargs)


def _permute_back(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    dims = [d % len(view.args[1]) for d in view.args[1]]  # type: ignore[union-attr, arg-type, operator]
    return emit(state, view, aten.permute.default, (part, [dims.index(k) for k in range(len(dims))]), {})


def _same_again(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    return emit(state, view, view.target, (part, *view.args[1:]), view.kwargs)


def _scatter_part(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` is one of several views side by side."""
    views, index = view.args
    assert isinstance(views, fx.Node)
    assert isinstance(views.target, OpOverload)
    assert isinstance(index, int)
    names = [a.name for a in views.target._schema.arguments]
    dim = views.kwargs.get("dim", views.args[names.index("dim")] if len(views.args) > names.index("dim") else 0)
    if views.target is aten.unbind.int:
        return emit(state, view, aten.select_scatter.default, (whole, part, dim, index), {})
    sizes = [example.shape[dim] for example in views.meta["val"]]
    if not all(isinstance(size, int) for size in sizes):
        raise FusionError(f"{location(view)}: a write into a part of varying size cannot be fused; write into a slice")
    start = sum(sizes[:index])
    return emit(state, view, aten.slice_scatter.default, (whole, part, dim, start, start + sizes[index]), {})


SCATTERS: Mapping[Any, Scatter] = {
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
    operator.getitem: _scatter_part,
}

# These overwrite all elements of the base.
_WHOLE = (_permute_back, _same_again)


def shows_all(view: fx.Node) -> bool:
    """True if ``view`` contains all elements of its base."""
    return view.target in IDENTITY | RESHAPES or writes(view) or SCATTERS.get(view.target) in _WHOLE


VIEW_OR_COPY = frozenset(
    {
        aten.reshape.default,
        aten.reshape_as.default,
        aten.flatten.using_ints,
        aten.ravel.default,
        aten.contiguous.default,
        aten.to.dtype,
        aten.to.dtype_layout,
        aten.to.device,
        aten.to.other,
    }
)


def depends_on_strides(graph: fx.Graph, was_contiguous: bool) -> bool:
    """Return whether strides of inputs decide if a write reaches a value that is read later.

    ``was_contiguous``: some operator that may copy gave its operand, so that the graph does not show it.
    """
    nodes = list(graph.nodes)
    written = [node for node in nodes if writes(node)]
    if written and was_contiguous:
        return True
    conditional = [node for node in nodes if node.target in VIEW_OR_COPY]
    if not written or not conditional:
        return False
    position = {node: k for k, node in enumerate(nodes)}
    # From each node to the root of the memory that it shares if all conditional views are views.
    paths: dict[fx.Node, list[fx.Node]] = {}
    for node in nodes:
        source = node.args[0] if node.target in VIEW_OR_COPY or writes(node) else viewed(node)
        paths[node] = [node, *(paths[source] if isinstance(source, fx.Node) else ())]
    for node in conditional:
        for write in written:
            if position[node] > position[write] or paths[node][-1] is not paths[write][-1]:
                continue
            # What shares memory with the written tensor only if ``node`` is a view.
            below = node in paths[write]
            others = [x for x in nodes if paths[x][-1] is paths[node][-1] and (node in paths[x]) is not below]
            # The caller sees a write into a placeholder.
            if any(x.op == "placeholder" or any(position[u] > position[write] for u in x.users) for x in others):
                return True
    return False
