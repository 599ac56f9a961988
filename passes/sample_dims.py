"""Prove from its graph that a member's forward computes every sample of a batch independently.

Samples are the first dim of every value that holds any. An operator may meet them only if it is in `RULES`, and does
nothing along that dim. The results of such a forward do not depend on the samples with which a batch is padded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.tree import contains, leaves
from hfusion.ops import pointwise, random
from hfusion.ops.rule import MemberScalars
from hfusion.passes.candidates import by_name

aten = torch.ops.aten


class SamplesMix(Exception):
    """An operator that is not known to compute every sample independently; says why."""


def check(holds: bool, why: str) -> None:
    """Raise `SamplesMix` with the reason ``why`` unless ``holds``."""
    if not holds:
        raise SamplesMix(why)


def output_samples(graph: fx.Graph, batches: Collection[fx.Node]) -> tuple[int | None, ...] | str:
    """Return the dim of samples of each flat output of a member's graph, None for one that depends on no sample.

    Args:
        batches: the placeholders whose first dim is that of samples; of one number in all of them.

    Returns:
        The dims; or the reason why samples may depend on each other.
    """
    try:
        return _walk(graph, batches)
    except SamplesMix as why:
        return str(why)


@dataclass(frozen=True)
class SampledCall:
    """An operator with its arguments by name.

    Attributes:
        where: the dim of samples of each value of the graph; None for one without samples.
        symbols: the symbols of the number of samples.
        result: the shape of the (first) result.
    """

    arguments: Mapping[str, Any]
    where: Mapping[fx.Node, int | None]
    symbols: frozenset[Any]
    result: tuple[Any, ...]

    def tensors(self, *names: str) -> list[fx.Node]:
        """Return the tensors among the arguments ``names``, by default among all."""
        chosen = [self.arguments[name] for name in names] if names else dict(self.arguments)
        return [node for node in leaves(chosen, fx.Node) if contains(node.meta.get("val"), Tensor)]

    def rank(self, *names: str) -> int:
        """Check that the arguments ``names`` hold samples, and no other does. Return the rank of the first."""
        chosen = self.tensors(*names)
        check(bool(chosen) and all(self.where[node] == 0 for node in chosen), "operands hold samples in different dims")
        others = [node for node in self.tensors() if node not in chosen and self.where[node] is not None]
        check(not others, "weights are computed from samples")
        return len(_shape(chosen[0]))


Rule: TypeAlias = Callable[[SampledCall], None]


def broadcast(call: SampledCall) -> None:
    """Operands are aligned at their last dims."""
    _meet(call, call.tensors())


def _meet(call: SampledCall, operands: Collection[fx.Node]) -> None:
    rank = len(call.result)
    for node in operands:
        shape = _shape(node)
        if call.where[node] is not None:
            check(call.where[node] == 0 and len(shape) == rank, "operands hold samples in different dims")
        else:
            check(len(shape) < rank or shape[0] == 1, "a value of a fixed number of rows meets the samples")


def rows(*names: str, least: int = 1, **required: Any) -> Rule:
    """Return a rule for an operator that computes each row of the arguments ``names``, or works along other dims.

    Args:
        least: the least number of dims of the first of them.
        required: arguments that must have these values.
    """

    def rule(call: SampledCall) -> None:
        rank, arguments = call.rank(*names), call.arguments
        check(rank >= least, "its input has no dim of samples")
        wrong = next((key for key, value in required.items() if arguments[key] != value), None)
        check(wrong is None, f"its {wrong} is {arguments.get(wrong or '')!r}")
        for name in {"dim", "dims", "dim0", "dim1"}.intersection(arguments):
            dims = [arguments[name]] if isinstance(arguments[name], int) else arguments[name]
            check(bool(dims), "it works along all dims")
            check(0 not in [dim % max(rank, len(call.result)) for dim in dims], "it works along samples")

    return rule


def permute(call: SampledCall) -> None:
    check(call.arguments["dims"][0] % call.rank("self") == 0, "it moves the samples")


def within(name: str, argument: str, per_dim: int = 1) -> Rule:
    """Return a rule for an operator within the last dims: one for each ``per_dim`` entries of ``argument``."""

    def rule(call: SampledCall) -> None:
        check(call.rank(name) > len(call.arguments[argument]) // per_dim, "it works along samples")

    return rule


def matmul(call: SampledCall) -> None:
    names = [n for n in ("self", "other", "mat1", "mat2", "batch1", "batch2") if n in call.arguments][-2:]
    left, right = (call.arguments[name] for name in names)
    others = [node for node in call.tensors() if node not in (left, right)]
    check(all(call.where[node] is None for node in others), "its bias holds samples")
    ranks = len(_shape(left)), len(_shape(right))
    if call.where[left] == 0 and call.where[right] is None and ranks[1] <= 2 <= ranks[0]:
        return
    check(min(ranks) >= 2 and max(ranks) >= 3, "it sums over samples, or multiplies samples with each other")
    _meet(call, (left, right))


def reshape(call: SampledCall) -> None:
    """Elements keep their order, so that a first dim of the same size holds the samples as before."""
    call.rank("self")
    check(bool(call.result) and call.result[0] in call.symbols, "it moves or merges the samples")


def part(call: SampledCall) -> None:
    """A slice; of samples only one that takes all in their order."""
    rank, arguments = call.rank("self"), call.arguments
    whole = arguments["start"] in (None, 0) and arguments["step"] == 1 and call.result == _shape(arguments["self"])
    check(arguments["dim"] % rank != 0 or whole, "it picks samples")


def constant(call: SampledCall) -> None:
    """The result is the same for every sample."""
    check(not isinstance(call.arguments.get("fill_value"), fx.Node), "it uses a number that forward computes")
    source = call.arguments.get("self")
    if isinstance(source, fx.Node) and "size" in call.arguments and "implicit" in call.arguments:
        _meet(call, (source,))


def attention(call: SampledCall) -> None:
    operands = call.tensors("query", "key", "value")
    check(call.arguments["dropout_p"] == 0, "it draws random numbers")
    check({len(_shape(node)) for node in operands} <= {3, 4}, "it attends to other samples")
    check(all(call.where[node] == 0 for node in operands), "it attends to other samples")
    _meet(call, call.tensors())


def recurrent(call: SampledCall) -> None:
    arguments = call.arguments
    check(
        not arguments["train"] or arguments["dropout"] == 0 or arguments["num_layers"] == 1, "it draws random numbers"
    )
    check(bool(arguments["batch_first"]) and call.where[arguments["input"]] == 0, "its steps are samples")
    check(all(call.where[state] == 1 for state in call.tensors("hx")), "its state holds no samples")
    check(all(call.where[node] is None for node in call.tensors("params")), "weights are computed from samples")


def _pointwise() -> Iterator[OpOverload]:
    left_out = {"prelu", "zeros_like", "ones_like", "full_like", "empty_like"}
    for target in pointwise.RULES:
        drawn = torch.Tag.nondeterministic_seeded in target.tags
        if not drawn and not target._schema.is_mutable and target._schema.name.removeprefix("aten::") not in left_out:
            yield target


_NAMES: tuple[tuple[Rule, str], ...] = (
    (rows("self"), "zeros_like ones_like full_like unsqueeze transpose.int"),
    (rows("self"), "softmax.int log_softmax.int _softmax _log_softmax cumsum cumprod flip roll sort topk"),
    (rows("self"), "split.Tensor split_with_sizes chunk squeeze.dim squeeze.dims select.int unbind.int"),
    (rows("self"), "sum.dim_IntList mean.dim amax amin max.dim min.dim argmax argmin prod.dim_int any.dim all.dim"),
    (rows("self"), "logsumexp var.correction var.dim std.correction std.dim median.dim linalg_vector_norm"),
    (rows("self", "index"), "gather.default"),
    (rows("tensors"), "cat.default stack"),
    (rows("input", train=False), "dropout feature_dropout alpha_dropout"),
    (rows("self", least=2), "prelu"),
    (rows("self", least=3), "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices"),
    (rows("self", least=4), "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices"),
    (rows("self", least=5), "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices"),
    (rows("self", least=3), "upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d triu tril"),
    (rows("self", least=4), "pixel_shuffle pixel_unshuffle"),
    (rows("input", least=2), "linear group_norm"),
    (rows("input", least=3), "conv1d conv_transpose1d"),
    (rows("input", least=4), "conv2d conv_transpose2d"),
    (rows("input", least=5), "conv3d conv_transpose3d"),
    (rows("input", least=2, training=False), "batch_norm"),
    (rows("input", least=3, running_mean=None), "instance_norm"),
    (rows("indices", scale_grad_by_freq=False), "embedding"),
    (within("input", "normalized_shape"), "layer_norm rms_norm"),
    (within("self", "pad", 2), "constant_pad_nd pad"),
    (matmul, "matmul mm bmm addmm baddbmm"),
    (permute, "permute"),
    (reshape, "view.default reshape _unsafe_view flatten.using_ints unflatten.int"),
    (part, "slice.Tensor"),
    (constant, "zeros.default ones.default full.default new_zeros new_ones new_full expand"),
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
_TAKE_SIZES: frozenset[Rule] = frozenset({reshape, constant, part})


def _walk(graph: fx.Graph, batches: Collection[fx.Node]) -> tuple[int | None, ...]:
    sizes = [_shape(node)[0] for node in batches]
    check(
        bool(sizes) and all(getattr(size, "is_symbol", False) for size in sizes),
        "forward depends on the number of samples",
    )
    symbols, where = frozenset(sizes), dict[fx.Node, int | None]()
    for node in graph.nodes:
        if node.op == "output":
            counts = [result for result in node.all_input_nodes if _counts(result, symbols)]
            check(not counts, "forward returns the number of samples")
            return tuple(where[result] if isinstance(result, fx.Node) else None for result in node.args[0])
        try:
            if node.op != "placeholder":
                _check_call(node, where, symbols)
            where[node] = _samples_of(node, symbols)
        except SamplesMix as why:
            raise SamplesMix(f"{str(node.target).removeprefix('aten.').removesuffix('.default')}: {why}") from None
    raise SamplesMix("forward has no output")


def _check_call(node: fx.Node, where: Mapping[fx.Node, int | None], symbols: frozenset[Any]) -> None:
    """Raise `SamplesMix` unless a call computes every sample independently."""
    operands = [source for source in node.all_input_nodes if contains(source.meta.get("val"), Tensor)]
    sized = any(_counts(source, symbols) for source in node.all_input_nodes)
    target = node.target
    if target is operator.getitem:
        return
    if not contains(node.meta.get("val"), Tensor):
        check(not operands or target is aten.sym_size.int, "it gives no tensor")
        return
    check(isinstance(target, OpOverload), "it is no operator of torch")
    assert isinstance(target, OpOverload)
    check(not target._schema.is_mutable, "it writes into a tensor")
    if not sized and all(where[source] is None for source in operands):
        check(target not in random.RULES, "it draws random numbers")
        return
    rule, (args, kwargs) = RULES.get(target), node.meta.get("arguments", (node.args, node.kwargs))
    if rule is None:
        raise SamplesMix("it may mix samples")
    arguments = by_name(target, args, kwargs)
    check(not sized or rule in _TAKE_SIZES, "it uses the number of samples")
    check(rule is broadcast or not contains(arguments, MemberScalars), "its numbers differ between members")
    rule(SampledCall(arguments, where, symbols, _shape(node)))
    # What an operator takes from samples must hold them again.
    held = any(where[source] is not None for source in operands)
    check(not held or _samples_of(node, symbols) is not None, "its shape depends on the number of samples")


def _samples_of(node: fx.Node, symbols: frozenset[Any]) -> int | None:
    """Return the dim of samples of a value; of the second and later results of a recurrent layer it is 1."""
    dims = {
        tuple(dim for dim, size in enumerate(_sizes(tensor)) if getattr(size, "free_symbols", set()) & symbols)
        for tensor in leaves(node.meta.get("val"), Tensor)
    }
    states = isinstance(node.meta.get("val"), list | tuple)
    check(dims <= ({(0,), (1,)} if states else {(), (0,), (1,)}) or dims <= {()}, "it moves or merges the samples")
    found = next(iter(sorted(dims)), ())
    if not found:
        return None
    whole = all(_sizes(tensor)[found[0]] in symbols for tensor in leaves(node.meta.get("val"), Tensor) if not states)
    check(whole, "it merges samples with other dims")
    return found[0]


def _counts(node: fx.Node, symbols: frozenset[Any]) -> bool:
    """Return whether a value is a number that is computed from the number of samples."""
    value = node.meta.get("val")
    if not isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return False
    return bool(value.node.expr.free_symbols & symbols)


def _shape(node: fx.Node) -> tuple[Any, ...]:
    """Return the sizes of a tensor, or of the first of several; sizes that vary are expressions."""
    return _sizes(next(leaves(node.meta["val"], Tensor)))


def _sizes(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(size if isinstance(size, int) else size.node.expr for size in tensor.shape)
