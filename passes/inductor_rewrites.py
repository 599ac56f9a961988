"""Rewrites of a traced step, after which Inductor generates faster code; values stay the same up to rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.layout import stacked_to_listed
from hfusion.core.member_random import draws_random
from hfusion.ops.norm import BATCHED
from hfusion.ops.shape import equal
from hfusion.passes.views import IDENTITY
from hfusion.torch_private.dispatch_modes import FakeTensor

aten = torch.ops.aten

Env: TypeAlias = dict[fx.Node, fx.Node]
"""The nodes of a new graph by those that they were made of."""


def _rewritten(module: fx.GraphModule, replaced: Callable[[fx.Graph, fx.Node, Env], fx.Node | None]) -> fx.GraphModule:
    """Return a copy of ``module`` with each node replaced by what ``replaced`` gives for it, if it gives a node."""
    graph, env = fx.Graph(), Env()
    for node in module.graph.nodes:
        new = replaced(graph, node, env)
        if new is None:
            new = graph.node_copy(node, env.__getitem__)
        elif not new.meta:
            new.meta.update(node.meta)
        env[node] = new
    graph.lint()
    return fx.GraphModule(module, graph)


# Pointwise operators in the memory order of their operands, for a compiler that computes in the order of the dims.
#
# Eager torch keeps the order of memory: of a transposed operand ``relu`` gives a transposed result, so that
# feature-major values stay so through a network at no cost. Inductor writes the result in the order of its dims, a copy
# at every operator. Here ``op(transpose(x))`` becomes ``transpose(op(x))``, and transpositions that meet cancel.


@dataclass(frozen=True)
class Transposed:
    """A value that is ``base`` with the two ``dims`` swapped."""

    base: fx.Node
    dims: tuple[int, int]


def sink_transposes(module: fx.GraphModule) -> fx.GraphModule:
    """Sink transpositions below pointwise operators of ``module``, an ATen graph with fake tensors in ``meta["val"]``.

    Values stay the same, bit for bit, and so do strides, for which the rest of the graph was traced.
    """
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    views: dict[fx.Node, Transposed] = {}

    def value(node: fx.Node) -> fx.Node:
        if node not in env:
            env[node] = graph.call_function(aten.transpose.int, (views[node].base, *views[node].dims))
            env[node].meta.update(node.meta)
        return env[node]

    for node in module.graph.nodes:
        sources = node.all_input_nodes
        if node.target is aten.transpose.int:
            (source,), rank = sources, node.meta["val"].dim()
            first, second = sorted(int(dim) % rank for dim in node.args[1:])
            if source in views and views[source].dims == (first, second):
                env[node] = views[source].base
            else:
                views[node] = Transposed(value(source), (first, second))
        elif node.target in IDENTITY and sources[0] in views:
            views[node] = views[sources[0]]
        elif _pointwise(node) and _alike(sources, views) and (sunk_val := _sunk(node, views)) is not None:
            base = graph.node_copy(node, lambda n: views[n].base)
            base.meta = {"val": sunk_val}
            views[node] = Transposed(base, views[sources[0]].dims)
        else:
            env[node] = graph.node_copy(node, value)
    graph.lint()
    return fx.GraphModule(module, graph)


def _pointwise(node: fx.Node) -> bool:
    """True if ``node`` is a pointwise operator that draws no random numbers and writes into no operand."""
    target: Any = node.target
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags or target._schema.is_mutable:
        return False
    return not draws_random(target) and isinstance(node.meta.get("val"), Tensor)


def _alike(sources: list[fx.Node], views: dict[fx.Node, Transposed]) -> bool:
    """True if all operands are tensors of one rank with the same transposition."""
    if not sources or not all(source in views for source in sources):
        return False
    return len({(views[source].dims, source.meta["val"].dim()) for source in sources}) == 1


def _sunk(node: fx.Node, views: dict[fx.Node, Transposed]) -> FakeTensor | None:
    """Return the result of ``node`` on the bases of its operands, None if its transposition has other strides.

    Strides differ for operators that choose a memory order, such as `aten.clone`.
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: views[n].base.meta["val"])
    val: FakeTensor = node.meta["val"]
    with val.fake_mode:
        sunk: FakeTensor = node.target(*args, **kwargs)  # type: ignore[operator]
        strides = sunk.transpose(*views[node.all_input_nodes[0]].dims).stride()
    same_strides = all(equal(a, b) for a, b in zip(strides, val.stride(), strict=True))
    return sunk if same_strides else None


# Products that are read transposed, computed as the product of the transposed operands.
#
# The gradient of a weight that a product read transposed is ``(x^T y)^T`` in autograd. It is then copied, or read by
# pointwise operators, in the memory order of the weight. ``y^T x`` has that order already, and its long side where
# kernels want it.

_PRODUCTS = frozenset({aten.bmm.default, aten.mm.default})


def transpose_products(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same up to rounding."""

    def replaced(graph: fx.Graph, node: fx.Node, env: Env) -> fx.Node | None:
        def transposed(factor: Any) -> fx.Node:
            if _transposes(factor):
                return env[factor.all_input_nodes[0]]
            transpose = graph.call_function(aten.transpose.int, (env[factor], -2, -1))
            transpose.meta["val"] = factor.meta["val"].mT
            return transpose

        product: Any = _product(node)
        if product is None:
            return None
        first, second = product.args
        new = graph.call_function(product.target, (transposed(second), transposed(first)))
        fake: Any = _val(node)
        with fake.fake_mode:
            new.meta["val"] = fake.clone(memory_format=torch.contiguous_format)
        return new

    rewritten = _rewritten(module, replaced)
    rewritten.graph.eliminate_dead_code()
    rewritten.recompile()
    return rewritten


def _product(node: fx.Node) -> fx.Node | None:
    """Return the product whose transposition ``node`` reads in the order of the dims, None if it has other users."""
    view = node
    if node.target is aten.clone.default and _val(node).is_contiguous():
        (view,) = node.all_input_nodes
        if len(view.users) > 1:
            return None
    elif not all(map(_reads_in_order, node.users)):
        return None
    if not _transposes(view):
        return None
    (product,) = view.all_input_nodes
    return product if product.target in _PRODUCTS and len(product.users) == 1 else None


def _reads_in_order(node: fx.Node) -> bool:
    target: Any = node.target
    pointwise = isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags
    return pointwise and isinstance(node.meta.get("val"), Tensor) and _val(node).is_contiguous()


def _transposes(node: fx.Node) -> bool:
    """True if ``node`` swaps the last two dims of one matrix or a stack of matrices."""
    if node.target is aten.t.default:
        return _val(node).dim() == 2
    if node.target is not aten.transpose.int:
        return False
    rank = _val(node).dim()
    return {int(dim) % rank for dim in node.args[1:]} == {rank - 2, rank - 1}  # type: ignore[arg-type]


def _val(node: fx.Node) -> Tensor:
    val: Tensor = node.meta["val"]
    return val


# Scattering one element per row into zeros, as the gradient of `max` does, written as a comparison.
#
# A compiler of whole graphs fills the zeros, scatters, and reads them back in another order. A comparison of positions
# is computed where the result is used, and nothing is stored.

_ZEROS = frozenset({aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default})


def onehot(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same, bit for bit."""

    def replaced(graph: fx.Graph, node: fx.Node, env: Env) -> fx.Node | None:
        if not _one_per_row(node):
            return None
        _, dim, index, source = node.args
        return graph.call_function(chosen, (env[index], env[source], node.meta["val"].shape[dim], dim))  # type: ignore[index]

    return _rewritten(module, replaced)


def chosen(index: Tensor, source: Tensor, size: int, dim: int) -> Tensor:
    """Scatter ``source`` at ``index`` into zeros of ``size`` along ``dim``, where both have size 1."""
    places = torch.arange(size, device=index.device)
    return torch.where(index == places.view(-1, *(1,) * (index.dim() - 1 - dim)), source, 0)


def _one_per_row(node: fx.Node) -> bool:
    """True if ``node`` scatters one element into every row of a tensor of zeros."""
    if node.target is not aten.scatter.src:
        return False
    base, dim, index, source = node.args
    if not isinstance(base, fx.Node) or base.target not in _ZEROS or not isinstance(dim, int) or dim < 0:
        return False
    sizes = list(node.meta["val"].shape)
    if not isinstance(sizes[dim], int):
        return False
    sizes[dim] = 1
    return _has_sizes(index, sizes) and _has_sizes(source, sizes)


def _has_sizes(node: Any, sizes: list[Any]) -> bool:
    shape = node.meta["val"].shape
    return len(shape) == len(sizes) and all(equal(a, b) for a, b in zip(shape, sizes, strict=True))


# Small tensors that a graph holds, such as the members' rates of dropout, written out as numbers.
#
# A compiler of whole graphs hands a tensor to its code as one more input. With numbers instead, the code is all there
# is to the program: it can be kept on disk, and called by any thread.

# Largest number of elements: larger tensors do not hold numbers of members, and take longer to compile.
MAX_ELEMENTS = 256


def inline_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same, bit for bit."""

    def replaced(graph: fx.Graph, node: fx.Node, env: Env) -> fx.Node | None:
        held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if not _small(held):
            return None
        assert isinstance(held, Tensor)
        return graph.call_function(written_out, (held.flatten().tolist(), list(held.shape), held.dtype))

    return _rewritten(module, replaced)


def written_out(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of these values, on the CPU."""
    return torch.cat([torch.full((1,), value, dtype=dtype, device="cpu") for value in values]).view(shape)


def _small(held: object) -> bool:
    """True for a small CPU tensor whose values can be written as numbers in the code."""
    return (
        isinstance(held, Tensor)
        and held.device.type == "cpu"
        and 0 < held.numel() <= MAX_ELEMENTS
        and held.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
    )


# Programs as a compiler of whole graphs wants them: loops inside of a lowering written as one call.


def batch_member_loops(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, a program's, with its loops in BATCHED replaced; the same values up to rounding."""

    def replaced(graph: fx.Graph, node: fx.Node, env: Env) -> fx.Node | None:
        if node.target is stacked_to_listed and all(user.target in BATCHED for user in node.users):
            return env[node.all_input_nodes[0]]
        if node.target not in BATCHED:
            return None
        return graph.call_function(BATCHED[node.target], fx.map_arg(node.args, env.__getitem__))

    return _rewritten(module, replaced)


# Copies of tensors before values are scattered into them that are views of the same tensor.
#
# If the tensor is not used later, Inductor scatters in place and overwrites values that it has yet to read. This was
# seen with ``index_put`` of torch 2.13, into which ``index_add`` decomposes.

# Operators whose first argument is the tensor that they put values into.
_PUT_INTO = frozenset(
    {
        aten.index_put.default,
        aten._unsafe_index_put.default,
        aten.slice_scatter.default,
        aten.select_scatter.default,
        aten.diagonal_scatter.default,
        aten.as_strided_scatter.default,
    }
)


def copy_overlapping_writes(graph: fx.Graph) -> None:
    """Let scatters of ``graph`` whose operands overlap write into a copy. Inductor's last graph is to be passed."""
    for node in list(graph.nodes):
        if node.target in _PUT_INTO and _overlaps(node):
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (node.args[0],))
            copy.meta["val"] = node.args[0].meta["val"].clone()
            node.args = (copy, *node.args[1:])


def _overlaps(node: fx.Node) -> bool:
    """Return whether the tensor that an operator writes into shares its storage with another operand."""
    target = _memory(node.args[0])
    others: list[Any] = []
    fx.node.map_arg((node.args[1:], node.kwargs), others.append)
    return target is not None and any(_memory(other) == target for other in others)


def _memory(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None


# Decompositions of operators for which a compiler of whole graphs then generates better code.

# In lower precision the values between the operators would be rounded.
_EXACT = (torch.float32, torch.float64)


def bias_apart(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Any:
    """Decompose `torch.baddbmm` and `torch.addmm`, so that the sum fuses with the operators after it.

    A single call would first copy the bias into the result.
    """
    if beta != 1 or alpha != 1 or bias.dtype not in _EXACT:
        return NotImplemented
    if a.dim() == 3:
        return bias + torch.bmm(a, b)
    # In three dims, where inductor does not find the addmm again.
    return (bias + torch.mm(a, b).unsqueeze(0)).squeeze(0)


def batch_norm_in_two_passes(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Batch norm in training: first the mean, then the variance about it, as plain sums.

    Inductor writes Welford's recurrence instead, which is no more accurate and several times the arithmetic. Inputs of
    lower precision are widened, as in torch's kernel, where statistics and parameters are not of that precision, too.
    """
    dtype = x.dtype
    if not training or any(t is not None and t.dtype not in _EXACT for t in (weight, bias, running_mean, running_var)):
        return NotImplemented
    x = x.to(running_mean.dtype)
    dims, shape = [0, *range(2, x.dim())], [1, -1, *(1,) * (x.dim() - 2)]
    count = x.numel() // x.shape[1]
    mean = _realize(x.sum(dims) / count)
    centred = x - mean.view(shape)
    variance = _realize((centred * centred).sum(dims) / count)
    inverse = _realize(torch.rsqrt(variance + eps))
    y = centred * _realize(inverse if weight is None else inverse * weight).view(shape)
    y = y if bias is None else y + bias.view(shape)
    running_mean.copy_(running_mean * (1 - momentum) + mean * momentum)
    running_var.copy_(running_var * (1 - momentum) + variance * (count / (count - 1) * momentum))
    return y.to(dtype), mean, inverse


def _realize(vector: Tensor) -> Tensor:
    """Store ``vector [C]`` in memory: inductor would recompute it for every element it is combined with."""
    return vector.as_strided(vector.shape, (1,))


DECOMPOSITIONS: Mapping[OpOverload, Callable[..., Any]] = {
    aten.addmm.default: bias_apart,
    aten.baddbmm.default: bias_apart,
    aten._native_batch_norm_legit.default: batch_norm_in_two_passes,
}
