"""Rules for the dim of samples in the results of operators that compute every sample independently.

A rule gets an operator whose operands hold samples in known dims. It returns the dim of its result, or raises
`SamplesMix` of `hfusion.passes.sampled_call`. An operator without a rule is assumed to mix samples. To add one, prove
that element n of its result along the returned dim depends on element n of its operands alone, and in the same way for
every number of samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import sympy
import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.tree import leaves
from hfusion.ops import pointwise
from hfusion.passes.sampled_call import SampledCall, SampleDim, check

aten = torch.ops.aten

Rule: TypeAlias = Callable[[SampledCall], Any]


def _tensors(call: SampledCall, names: Sequence[str] = ()) -> list[fx.Node]:
    chosen = [call[name] for name in names] if names else dict(call.arguments)
    return [node for node in leaves(chosen, fx.Node) if isinstance(node.meta.get("val"), Tensor)]


def broadcast(call: SampledCall, operands: Sequence[fx.Node] = ()) -> SampleDim:
    """Operands are aligned at their last dims."""
    operands = operands or _tensors(call)
    sample_dims = {
        (call.rank(node) - at.dim, at.outer, at.inner) for node in operands if (at := call.at(node)) is not None
    }
    check(len(sample_dims) == 1, "operands hold samples in different dims")
    ((from_end, outer, inner),) = sample_dims
    for node in operands:
        alone = call.at(node) is None and call.rank(node) >= from_end
        check(not alone or call.shape(node)[-from_end] == 1, "a value of a fixed number of rows meets the samples")
    return SampleDim(len(call.result) - from_end, outer, inner)


def same_dim(call: SampledCall) -> SampleDim:
    return call.only("self" if "self" in call else "input")


def without_draws(call: SampledCall) -> SampleDim:
    drawn = call["train"] and call["p"] != 0
    check(not drawn, "it draws random numbers")
    return same_dim(call)


def prelu(call: SampledCall) -> SampleDim:
    at = call.only("self")
    check(at.dim != 1, "its dim of samples is that of channels")
    return at


def linear(call: SampledCall) -> SampleDim:
    at = call.only("input")
    check(at.dim != call.rank(call["input"]) - 1, "it sums over samples")
    return at


def matmul(call: SampledCall) -> SampleDim:
    names = [name for name in ("self", "other", "mat1", "mat2", "batch1", "batch2") if name in call][-2:]
    left, right = (call[name] for name in names)
    check(not any(call.at(node) for node in _tensors(call) if node not in (left, right)), "its bias holds samples")
    a, b, ranks = call.at(left), call.at(right), (call.rank(left), call.rank(right))
    if a is not None and b is None and a.dim == ranks[0] - 2:
        # Samples are rows; a vector as the other operand takes the last dim away.
        return replace(a, dim=len(call.result) - min(2, ranks[1]))
    if b is not None and a is None and 0 < b.dim == ranks[1] - 1:
        return replace(b, dim=len(call.result) - 1)
    inside = [at is not None and at.dim >= rank - 2 for at, rank in zip((a, b), ranks, strict=True)]
    check(not any(inside) and min(ranks) >= 2, "it sums over samples, or multiplies samples with each other")
    return broadcast(call, (left, right))


def einsum(call: SampledCall) -> SampleDim:
    inputs, _, output = call["equation"].replace(" ", "").partition("->")
    operands = call["tensors"]
    terms = inputs.split(",")
    plain = "." not in inputs and output and all(len(set(term)) == len(term) for term in terms)
    check(bool(plain) and call["path"] is None, "its equation is not written out")
    sample_letters = {
        (term[at.dim], at.outer, at.inner) for term, n in zip(terms, operands, strict=True) if (at := call.at(n))
    }
    check(len(sample_letters) == 1, "operands hold samples in different dims")
    ((letter, outer, inner),) = sample_letters
    alone = any(letter in term and call.at(node) is None for term, node in zip(terms, operands, strict=True))
    check(letter in output and not alone, "it sums over samples")
    return SampleDim(output.index(letter), outer, inner)


def images(call: SampledCall) -> SampleDim:
    """Samples are the first dim, before the channels."""
    name = "self" if "self" in call else "input"
    at = call.only(name)
    check(at.dim == 0, "its first dim is not that of samples")
    return at


def convolution(call: SampledCall) -> SampleDim:
    check(call.rank(call["input"]) == call.rank(call["weight"]), "its input has no dim of samples")
    return images(call)


def pooling(spatial: int) -> Rule:
    def rule(call: SampledCall) -> SampleDim:
        check(call.rank(call["self"]) == spatial + 2, "its input has no dim of samples")
        return images(call)

    return rule


def batch_norm(call: SampledCall) -> SampleDim:
    check(call["training"] is False, "it computes statistics over samples")
    return images(call)


def instance_norm(call: SampledCall) -> SampleDim:
    check(call["running_mean"] is None, "it keeps statistics over samples")
    return images(call)


def layer_norm(call: SampledCall) -> SampleDim:
    at = call.only("input")
    check(at.dim < call.rank(call["input"]) - len(call["normalized_shape"]), "it normalizes over samples")
    return at


def along(call: SampledCall) -> SampleDim:
    """Works along the dims of ``dim`` or ``dims``, which stay."""
    at = call.only("self")
    name = "dim" if "dim" in call else "dims"
    check(at.dim not in call.dims(name, call.rank(call["self"])), "it works along the samples")
    return at


def last(count: int) -> Rule:
    """Works within the last ``count`` dims."""

    def rule(call: SampledCall) -> SampleDim:
        at = call.only("self")
        check(at.dim < call.rank(call["self"]) - count, "it works along the samples")
        return at

    return rule


def padding(call: SampledCall) -> SampleDim:
    at = call.only("self")
    check(at.dim < call.rank(call["self"]) - len(call["pad"]) // 2, "it works along the samples")
    return at


def reduce(call: SampledCall) -> SampleDim:
    at, rank = call.only("self"), call.rank(call["self"])
    dims = call.dims("dim", rank)
    check(at.dim not in dims, "it reduces over samples")
    return (
        at if call.arguments.get("keepdim", False) else replace(at, dim=at.dim - sum(dim < at.dim for dim in set(dims)))
    )


def reshape(call: SampledCall) -> SampleDim:
    """Elements keep their order: find the dim of the result that holds the samples' stride."""
    source = call["self"]
    at, before, after = call.only("self"), call.shape(source), call.result
    check(0 not in (*before, *after), "it has no elements")
    outside = sympy.sympify(sympy.prod(before[: at.dim]) * at.outer)
    inside = sympy.sympify(sympy.prod(before[at.dim + 1 :]) * at.inner)
    open_dims = [dim for dim, size in enumerate(after) if size.has(call.samples)]
    check(len(open_dims) == 1, "it spreads samples over several dims")
    (dim,) = open_dims
    outer, inner = outside / sympy.prod(after[:dim]), inside / sympy.prod(after[dim + 1 :])
    check(all(part.as_numer_denom()[1] == 1 for part in (outer, inner)), "it divides samples")
    return SampleDim(dim, outer, inner)


def permute(call: SampledCall) -> SampleDim:
    at, rank = call.only("self"), call.rank(call["self"])
    if "dims" in call:
        return replace(at, dim=[dim % rank for dim in call["dims"]].index(at.dim))
    first, second = (call["dim0"] % rank, call["dim1"] % rank) if "dim0" in call else (0, rank - 1)
    return replace(at, dim={first: second, second: first}.get(at.dim, at.dim))


def spread(call: SampledCall) -> SampleDim:
    """Rows of size 1 are repeated for each sample, or samples along other dims."""
    at, shape = call.at(call["self"]), call.shape(call["self"])
    shift = len(call.result) - len(shape)
    if at is not None:
        check(call.result[at.dim + shift] == shape[at.dim], "it repeats samples")
        return replace(at, dim=at.dim + shift)
    return _filled(call, lambda dim: dim < shift or shape[dim - shift] == 1)


def constant(call: SampledCall) -> SampleDim:
    check(not isinstance(call.arguments.get("fill_value"), fx.Node), "it uses a number that forward computes")
    return _filled(call, lambda dim: True)


def _filled(call: SampledCall, repeats: Callable[[int], bool]) -> SampleDim:
    """Return the dim of samples of a result that is the same for every sample."""
    dims = [dim for dim, size in enumerate(call.result) if size == call.samples]
    check(len(dims) == 1 and repeats(dims[0]), "it uses the number of samples")
    return SampleDim(dims[0])


def join(call: SampledCall) -> SampleDim:
    at = call.only("tensors")
    check(at.dim != call["dim"] % call.rank(call["tensors"][0]), "it joins samples")
    return at


def stack(call: SampledCall) -> SampleDim:
    at, dim = call.only("tensors"), call["dim"] % len(call.result)
    return replace(at, dim=at.dim + (dim <= at.dim))


def select(call: SampledCall) -> SampleDim:
    at, dim = call.only("self"), call["dim"] % call.rank(call["self"])
    check(dim != at.dim, "it picks samples")
    return replace(at, dim=at.dim - (dim < at.dim))


def part(call: SampledCall) -> SampleDim:
    """A slice; of samples only one that takes all in their order."""
    at, rank = call.only("self"), call.rank(call["self"])
    whole = call["start"] in (None, 0) and call["step"] == 1 and call.result == call.shape(call["self"])
    check(call["dim"] % rank != at.dim or whole, "it picks samples")
    return at


def gather(call: SampledCall) -> SampleDim:
    at = call.only("self", "index")
    check(at.dim != call["dim"] % call.rank(call["self"]), "it picks samples")
    return at


def embedding(call: SampledCall) -> SampleDim:
    check(not call["scale_grad_by_freq"], "its gradient depends on how often samples hold an index")
    return call.only("indices")


def attention(call: SampledCall) -> SampleDim:
    ranks = {call.rank(call[name]) for name in ("query", "key", "value")}
    check(call["dropout_p"] == 0, "it draws random numbers")
    operands = _tensors(call)
    at = call.at(call["query"])
    check(len(ranks) == 1 and at is not None and at.dim < min(ranks) - 2, "it attends to other samples")
    check(at == call.at(call["key"]) == call.at(call["value"]), "it attends to other samples")
    return broadcast(call, operands)


def recurrent(call: SampledCall) -> tuple[SampleDim, ...]:
    check(not call["train"] or call["dropout"] == 0 or call["num_layers"] == 1, "it draws random numbers")
    dim = 0 if call["batch_first"] else 1
    states = list(leaves(call["hx"], fx.Node))
    check(call.at(call["input"]) == SampleDim(dim) and call.rank(call["input"]) == 3, "its steps are samples")
    check(all(call.at(state) == SampleDim(1) for state in states), "its state holds no samples")
    check(not any(call.at(node) for node in leaves(call["params"], fx.Node)), "weights are computed from samples")
    return (SampleDim(dim), *[SampleDim(1)] * len(states))


def _pointwise() -> Iterator[OpOverload]:
    left_out = {"prelu", "zeros_like", "ones_like", "full_like", "empty_like"}
    for target in pointwise.RULES:
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        if not drawn and not target._schema.is_mutable and target._schema.name.removeprefix("aten::") not in left_out:
            yield target


_NAMES: tuple[tuple[Rule, str], ...] = (
    (same_dim, "zeros_like ones_like full_like"),
    (without_draws, "dropout feature_dropout alpha_dropout"),
    (prelu, "prelu"),
    (linear, "linear"),
    (matmul, "matmul mm bmm addmm baddbmm"),
    (einsum, "einsum"),
    (convolution, "conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"),
    (pooling(1), "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices"),
    (pooling(2), "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices"),
    (pooling(3), "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices"),
    (batch_norm, "batch_norm"),
    (instance_norm, "instance_norm"),
    (
        images,
        "group_norm upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d",
    ),
    (layer_norm, "layer_norm rms_norm"),
    (along, "softmax.int log_softmax.int _softmax _log_softmax cumsum cumprod flip roll sort topk"),
    (along, "split.Tensor split_with_sizes chunk"),
    (last(2), "triu tril"),
    (last(3), "pixel_shuffle pixel_unshuffle"),
    (padding, "constant_pad_nd pad"),
    (reduce, "sum.dim_IntList mean.dim amax amin max.dim min.dim argmax argmin prod.dim_int any.dim all.dim logsumexp"),
    (reduce, "var.correction var.dim std.correction std.dim var_mean.correction std_mean.correction median.dim"),
    (reduce, "norm.ScalarOpt_dim linalg_vector_norm"),
    (reshape, "view.default reshape _unsafe_view flatten.using_ints unflatten.int"),
    (reshape, "squeeze.default squeeze.dim squeeze.dims unsqueeze"),
    (permute, "transpose.int permute t"),
    (spread, "expand expand_as repeat"),
    (constant, "zeros.default ones.default full.default new_zeros new_ones new_full"),
    (join, "cat.default"),
    (stack, "stack"),
    (select, "select.int unbind.int"),
    (part, "slice.Tensor"),
    (gather, "gather.default"),
    (embedding, "embedding"),
    (attention, "scaled_dot_product_attention"),
    (recurrent, "lstm.input gru.input rnn_tanh.input rnn_relu.input"),
)


def _overloads(name: str) -> Iterator[OpOverload]:
    base, _, overload = name.partition(".")
    packet = getattr(aten, base, None)
    for overload_name in packet.overloads() if packet is not None else ():
        target = getattr(packet, overload_name)
        if overload in ("", overload_name) and not target._schema.is_mutable:
            yield target


RULES: Mapping[OpOverload, Rule] = {
    **dict.fromkeys(_pointwise(), broadcast),
    **{target: rule for rule, names in _NAMES for name in names.split() for target in _overloads(name)},
}

# Take sizes that are computed from the number of samples: what they do with them shows in the shape of the result.
TAKE_SIZES: frozenset[Rule] = frozenset({reshape, spread, constant, part})
