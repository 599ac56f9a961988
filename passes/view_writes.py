"""Put the new value of a view back into its base."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.passes.views import IDENTITY, RESHAPES, infer, location, writes

aten = torch.ops.aten


@dataclass
class Rewriting:
    """The new graph, each old node's current value, which node is a view of which, and the names of parameters."""

    graph: fx.Graph
    current: dict[fx.Node, Any] = field(default_factory=dict)
    parent: dict[fx.Node, fx.Node] = field(default_factory=dict)
    position: dict[fx.Node, int] = field(default_factory=dict)
    differentiable: set[fx.Node] = field(default_factory=set)
    parameters: frozenset[str] = frozenset()

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
        # Autograd knows these for real numbers only.
        real = [emit(state, view, aten.view_as_real.default, (_plain(state, view, x),), {}) for x in (whole, part)]
        dim, *rest = where or (view.kwargs.get("dim", 0),)
        wrapped_dim = dim % whole.meta["val"].dim()
        kwargs = {name: value for name, value in view.kwargs.items() if name != "dim"}
        return _as_complex(state, view, emit(state, view, target, (*real, wrapped_dim, *rest), kwargs))

    return scatter


def _plain(state: Rewriting, view: fx.Node, value: fx.Node) -> fx.Node:
    """``value`` itself where it was noted as the conjugate of another."""
    return emit(state, view, aten.resolve_conj.default, (value,), {})


def _as_complex(state: Rewriting, view: fx.Node, pairs: fx.Node) -> fx.Node:
    pairs = emit(state, view, aten.contiguous.default, (pairs,), {})
    return emit(state, view, aten.view_as_complex.default, (pairs,), {})


def _scatter_real(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    if not whole.meta["val"].is_complex():
        return part
    imaginary = emit(state, view, aten.imag.default, (whole,), {})
    return emit(state, view, aten.complex.default, (part, imaginary), {})


def _scatter_imaginary(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    real = emit(state, view, aten.real.default, (whole,), {})
    return emit(state, view, aten.complex.default, (real, part), {})


def _scatter_pairs(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` shows complex numbers as pairs of real ones."""
    return _as_complex(state, view, part)


def _scatter_complex(state: Rewriting, view: fx.Node, whole: fx.Node, part: fx.Node) -> fx.Node:
    """``view`` shows pairs of real numbers as complex ones."""
    return emit(state, view, aten.view_as_real.default, (_plain(state, view, part),), {})


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
    aten.real.default: _scatter_real,
    aten.imag.default: _scatter_imaginary,
    aten.view_as_real.default: _scatter_pairs,
    aten.view_as_complex.default: _scatter_complex,
    operator.getitem: _scatter_part,
}

# These overwrite all elements of the base.
_WHOLE = (_permute_back, _same_again, _scatter_pairs, _scatter_complex)


def shows_all(view: fx.Node) -> bool:
    """True if ``view`` contains all elements of its base."""
    if view.target is aten.real.default:
        return not view.args[0].meta["val"].is_complex()  # type: ignore[union-attr]
    return view.target in IDENTITY | RESHAPES or writes(view) or SCATTERS.get(view.target) in _WHOLE
