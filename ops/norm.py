"""Normalisation with torch's own kernels, packed, stacked or per member.

Where only weights differ between members, values are normalised without them, once if they are shared, and
scaled afterwards. Running statistics ``[B, C]`` are updated in place, through views.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout, lift
from hfusion.ops.lowering import Efficiency, Saves, Sizes
from hfusion.ops.rule import (
    Call,
    Memberwise,
    Operand,
    RuleTable,
    Site,
    Value,
    call_per_member,
    folded,
    has_per_member,
    hint,
    in_order,
    loop,
    map_values,
)
from hfusion.ops.saved import result_bytes, row_statistics
from hfusion.torch_private.autograd_engine import preserve_version_counters

aten = torch.ops.aten

# Elements of one member from which, on a CPU, B calls of the fused kernel and a copy beat a pass for scaling.
ROWS_FROM = 1 << 14

# Fits to forward and backward of single layers, one core of a Xeon (AVX-512), 4 and 16 members.
# On a GPU as in ops/conv.py: a loop of modules took 0.1 ms for each.
CHANNELS = Efficiency(16, traffic=0.45, gpu=Efficiency(8))
CHANNELS_EACH = Efficiency(11, traffic=0.5, gpu=Efficiency(7))

Maybe = Tensor | None


def batch_norm(site: Site, **arguments: Any) -> Call | None:
    """``input [N, C, *S]``; in training the running statistics are written in place."""
    x, mean, training = arguments["input"], arguments["running_mean"], arguments["training"]
    once = x.shared and not has_per_member(arguments)
    if x.rank < 2:
        # Empty, as torch takes no others of one dim.
        return _listed(site, arguments, batch_norm_each)
    if (training and _written_by_all(site, arguments)) or (not once and _loops(arguments)) or _half_shared(arguments):
        return _listed(site, arguments, batch_norm_each)
    layout = x.layout
    if once and (training or mean is None or mean.shared):
        return _batch_norm_once(site, arguments)
    if once:
        layout = Layout.PACKED
    fn = batch_norm_packed if layout is Layout.PACKED else batch_norm_stacked
    state = (_stacked(arguments[name]) for name in ("weight", "bias", "running_mean", "running_var"))
    options = (training, arguments["momentum"], arguments["eps"])
    return site.call(fn, (x.to(layout), *state, *options), layout, layout.value, efficiency=CHANNELS)


def native_batch_norm(site: Site, **arguments: Any) -> Call | None:
    """Writes running statistics in training, too, though its schema does not say so."""
    if not arguments["training"] or (arguments["running_mean"] is None and arguments["running_var"] is None):
        return None
    _written_by_all(site, arguments)
    return loop(site, arguments)


def _batch_norm_once(site: Site, arguments: Mapping[str, Any]) -> Call:
    """Normalise a shared input once; its running statistics are each member's own, or shared."""
    state = tuple(arguments[name] for name in ("weight", "bias"))
    layout = Layout.PACKED if any(v is not None and not v.shared for v in state) else Layout.SHARED
    mean, var = arguments["running_mean"], arguments["running_var"]
    fn = batch_norm_measured if mean is not None and not mean.shared else batch_norm_shared
    running = (mean, var) if fn is batch_norm_shared else (mean.to(Layout.STACKED), var.to(Layout.STACKED))
    affine = state if layout is Layout.SHARED else tuple(_stacked(v) for v in state)
    options = (arguments["training"], arguments["momentum"], arguments["eps"])
    args = (arguments["input"], *affine, *running, *options)
    return site.call(fn, args, layout, "normalised once", efficiency=CHANNELS)


def batch_norm_packed(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, training: bool, momentum: float, eps: float
) -> Tensor:
    """Packed ``x [N, B*C, *S]``; weights and running statistics ``[B, C]``."""
    mean, var = _channels(mean, written=training), _channels(var, written=training)
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(x, _channels(weight), _channels(bias), mean, var, training, momentum, eps, cudnn)


def batch_norm_stacked(x: Tensor, *rest: Any) -> Tensor:
    """Normalise stacked ``x [B, N, C, *S]`` in the memory order of its dims; ``rest`` as of a packed one."""
    members, _, channels = x.shape[:3]
    samples_outside = x.stride(1) > x.stride(2)
    if samples_outside and (x.dim() == 3 or x.stride(0) == channels * x.stride(2)):
        side_by_side = x.movedim(0, 1)
        packed = batch_norm_packed(side_by_side.flatten(1, 2), *rest)
        return packed.view(side_by_side.shape).movedim(1, 0)
    features = x.movedim(2, 1)
    flat = batch_norm_packed(features.reshape(1, members * channels, -1), *rest)
    return flat.view(features.shape).movedim(1, 2)


def batch_norm_alone(x: Tensor, *rest: Any) -> Tensor:
    """torch's own of ``x [N, C, *S]``, which reads it in order where channels are outside of samples in memory."""
    if x.dim() < 3 or x.stride(0) >= x.stride(1):
        return torch.batch_norm(x, *rest)
    features = x.movedim(1, 0)
    flat = torch.batch_norm(features.reshape(1, x.shape[1], -1), *rest)
    return flat.view(features.shape).movedim(0, 1)


batch_norm_each = Memberwise(batch_norm_alone)


def batch_norm_shared(x: Tensor, weight: Maybe, bias: Maybe, *rest: Any) -> Tensor:
    """One ``x [N, C, *S]``, one set of running statistics ``[C]``; weights ``[C]`` or stacked ``[B, C]``."""
    y = torch.batch_norm(x, None, None, *(*rest, torch.backends.cudnn.enabled))
    return _scaled_channels(y, weight, bias)


def batch_norm_measured(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Tensor, var: Tensor, training: bool, momentum: float, eps: float
) -> Tensor:
    """One ``x [N, C, *S]`` whose statistics, measured once, enter every member's running ones ``[B, C]``."""
    batch_mean, batch_var = torch.zeros_like(mean[0]), torch.zeros_like(var[0])
    y = batch_norm_shared(x, weight, bias, batch_mean, batch_var, training, 1.0, eps)
    # No samples leave running statistics as they are.
    if x.numel() > 0:
        with _as_batch_norm_writes(mean, var):
            mean.lerp_(batch_mean.expand_as(mean), momentum)
            var.lerp_(batch_var.expand_as(var), momentum)
    return y


def _as_batch_norm_writes(mean: Tensor, var: Tensor) -> AbstractContextManager[object]:
    """Context manager in which writes into running statistics do not count as changes.

    torch.batch_norm saves the statistics for its backward, which does not read them in training, and its own writes do
    not count. So a module may be called again before the backward of its first call. Traces of Dynamo have no counts.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    context: AbstractContextManager[object] = preserve_version_counters((mean, var))
    return context


def _scaled_channels(y: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    """``y [N, C, *S]`` times ``weight`` plus ``bias``: packed where these are stacked ``[B, C]``."""
    per_member = any(v is not None and v.dim() == 2 for v in (weight, bias))
    wide = y.unsqueeze(1) if per_member else y
    trailing = (1,) * (y.dim() - 2)
    weight, bias = (v if v is None else v.reshape(*v.shape, *trailing) for v in (weight, bias))
    scaled = scale(wide, weight, bias).to(y.dtype)
    return scaled.flatten(1, 2) if per_member else scaled


def scale(y: Tensor, weight: Maybe, bias: Maybe) -> Tensor:
    """``y * weight + bias``, broadcast."""
    if weight is None:
        return y if bias is None else y + bias
    return y * weight if bias is None else torch.addcmul(bias, y, weight)


def instance_norm(site: Site, **arguments: Any) -> Call | None:
    """``input [N, C, *S]``; with ``use_input_stats`` the running statistics, if any, are written in place."""
    if arguments["use_input_stats"] and _written_by_all(site, arguments):
        return loop(site, arguments, CHANNELS_EACH)
    if _loops(arguments) or _half_shared(arguments):
        return loop(site, arguments, CHANNELS_EACH)
    if _only_input_differs(arguments):
        args, _ = in_order(site, arguments)
        args = (site.target, 1, *args)
        return site.call(folded, args, Layout.STACKED, "folded: shared weights", efficiency=CHANNELS)
    state = (_stacked(arguments[name]) for name in ("weight", "bias", "running_mean", "running_var"))
    options = (arguments["use_input_stats"], arguments["momentum"], arguments["eps"])
    x: Value = arguments["input"]
    args = (x.to(Layout.PACKED), *state, *options)
    return site.call(instance_norm_packed, args, Layout.PACKED, "packed", efficiency=CHANNELS)


def instance_norm_packed(
    x: Tensor, weight: Maybe, bias: Maybe, mean: Maybe, var: Maybe, use_input_stats: bool, momentum: float, eps: float
) -> Tensor:
    """Packed ``x [N, B*C, *S]``; weights and running statistics ``[B, C]``."""
    mean, var = _channels(mean, written=use_input_stats), _channels(var, written=use_input_stats)
    cudnn = torch.backends.cudnn.enabled
    return torch.instance_norm(x, _channels(weight), _channels(bias), mean, var, use_input_stats, momentum, eps, cudnn)


def group_norm(site: Site, **arguments: Any) -> Call | None:
    """``input [N, C, *S]``: packed, B times as many groups."""
    if _loops(arguments):
        return _listed(site, arguments, group_norm_each)
    if _only_input_differs(arguments):
        args, _ = in_order(site, arguments)
        text = "folded: shared weights"
        return site.call(group_norm_folded, args, Layout.STACKED, text, efficiency=CHANNELS)
    x, groups = arguments["input"], site.members * arguments["num_groups"]
    affine = (_stacked(arguments[name]) for name in ("weight", "bias"))
    args = (x.to(Layout.PACKED), groups, *affine, arguments["eps"])
    return site.call(group_norm_packed, args, Layout.PACKED, "packed", efficiency=CHANNELS)


def group_norm_packed(x: Tensor, groups: int, weight: Maybe, bias: Maybe, eps: float) -> Tensor:
    """Packed ``x [N, B*C, *S]`` in B times the member's groups; weights ``[B, C]``."""
    return group_norm_alone(x, groups, _channels(weight), _channels(bias), eps, torch.backends.cudnn.enabled)


def group_norm_alone(
    x: Tensor, groups: int, weight: Maybe = None, bias: Maybe = None, eps: float = 1e-5, cudnn: bool = True
) -> Tensor:
    """torch's own of ``x [N, C, *S]``, as convolutions may have laid it in memory."""
    if x.is_cpu and not x.requires_grad and x.dim() > 3 and x.stride(1) == 1:
        # In channels_last torch (as of 2.13) writes the gradient of ``x`` also where there is none, and crashes.
        x = x.clone(memory_format=torch.contiguous_format)
    return torch.group_norm(x, groups, weight, bias, eps, cudnn)


def group_norm_folded(x: Tensor, *rest: Any) -> Tensor:
    """Stacked ``x [B, N, C, *S]``, and the same weights for all members."""
    y: Tensor = folded(group_norm_alone, 1, x, *rest)
    return y


group_norm_each = Memberwise(group_norm_alone)


def last_dims_norm(site: Site, **arguments: Any) -> Call | None:
    """Layer and RMS norm: ``input [..., *normalized_shape]``; leading dims, and so the members, are free."""
    x: Value = arguments["input"]
    if _loops(arguments):
        return loop(site, arguments)
    affine = [arguments.get(name) for name in ("weight", "bias")]
    wide = x if x.shared else x.to(Layout.STACKED)
    if all(v is None or v.shared for v in affine):
        return site.same_call({**arguments, "input": wide}, Layout.STACKED)
    if x.example.device.type == "cpu" and not x.shared and math.prod(hint(size) or 1 for size in x.shape) >= ROWS_FROM:
        args, _ = in_order(site, map_values(arguments, lambda v: v if v.shared else v.to(Layout.LISTED)))
        args = (site.target, site.members, *args)
        return site.call(rows, args, Layout.STACKED, "loop, stacked", loops=True)
    weight, bias = (v if v is None or v.shared else v.to(Layout.STACKED, rank=x.rank) for v in affine)
    bare = {name: item for name, item in arguments.items() if name not in ("input", "weight", "bias")}
    operands = (site.target, wide, weight, bias)
    return site.call(scaled, operands, Layout.STACKED, "normalised, then scaled", bare, saves=SCALED_KEEPS)


def _rows_and_result(sizes: Sizes) -> int:
    return row_statistics(sizes) + result_bytes(sizes)


# The normalised values, in addition to what their norm keeps.
SCALED_KEEPS = Saves(extra_bytes=_rows_and_result)


def scaled(norm: OpOverload, x: Tensor, weight: Maybe, bias: Maybe, **options: Any) -> Tensor:
    """``norm(x) * weight + bias``; the weights broadcast against stacked ``x``, or one shared ``x``."""
    return scale(norm(x, **options), weight, bias).to(x.dtype)


def rows(norm: OpOverload, members: int, *args: Any) -> Tensor:
    """``norm`` once per member, stacked."""
    return torch.stack(call_per_member(norm, members, args, {}))


def rows_batched(norm: OpOverload, members: int, x: Tensor, shape: list[int], *args: Any) -> Tensor:
    """Compute `rows` without a loop: ``x [B, *S]`` and weights ``[B, *shape]``, or ``shape`` shared by all members."""
    names = [argument.name for argument in norm._schema.arguments[2:]]
    options = dict(zip(names, args, strict=False))
    weight, bias = (_lifted(options.pop(name, None), len(shape), x) for name in ("weight", "bias"))
    return scaled(norm, x, weight, bias, normalized_shape=shape, **options)


def _lifted(affine: Maybe, rank: int, x: Tensor) -> Maybe:
    return affine if affine is None or affine.dim() == rank else lift(affine, x.dim() - 1)


def _loops(arguments: Mapping[str, Any]) -> bool:
    """True if members run in a loop: listed input, scalars that differ, or statistics whose layout needs a copy."""
    statistics = [arguments.get(name) for name in ("running_mean", "running_var")]
    listed = any(v is not None and v.layout in (Layout.LISTED, Layout.PACKED) for v in statistics)
    return listed or arguments["input"].layout is Layout.LISTED or has_per_member(arguments)


def _listed(site: Site, arguments: Mapping[str, Any], fn: Memberwise) -> Call:
    args, kwargs = in_order(site, map_values(arguments, lambda v: v if v.shared else v.to(Layout.LISTED)))
    whole, text = (site.members, args, kwargs), "loop over members"
    return site.call(fn, whole, Layout.LISTED, text, efficiency=CHANNELS_EACH, loops=True)


def _only_input_differs(arguments: Mapping[str, Any]) -> bool:
    """A stacked input, all else shared and no running statistics: members are then samples."""
    rest = [arguments.get(name) for name in ("weight", "bias")]
    stateless = arguments.get("running_mean") is None and arguments.get("running_var") is None
    alike = all(v is None or v.shared for v in rest)
    return stateless and alike and arguments["input"].layout is Layout.STACKED


def _half_shared(arguments: Mapping[str, Any]) -> bool:
    """True if one of the running statistics is shared and the other is not."""
    statistics = [v for v in (arguments["running_mean"], arguments["running_var"]) if v is not None]
    return len({v.shared for v in statistics}) > 1


def _written_by_all(site: Site, arguments: Mapping[str, Any]) -> bool:
    """True if the call updates running statistics that are shared. Raises FusionError for more than one member."""
    statistics = [v for v in (arguments["running_mean"], arguments["running_var"]) if v is not None and v.shared]
    if not statistics or site.members == 1:
        return bool(statistics)
    raise FusionError(
        f"{site.target} is in training mode and its running statistics ({statistics[0].node}) "
        f"are one tensor for all {site.members} models, which cannot hold the statistics of each; give every "
        "model its own buffers, or put this layer in eval() mode"
    )


def _stacked(value: Value | None) -> Operand | None:
    return None if value is None else value.to(Layout.STACKED)


def _channels(x: Maybe, written: bool = False) -> Maybe:
    """``[B, C] -> [B*C]``; a view, without fail where it is written."""
    if x is None:
        return None
    return x.view(-1) if written else x.reshape(-1)


# Loops of kernels, and what a compiler of whole graphs makes better code of: the same on stacked operands.
BATCHED = {rows: rows_batched}

RULES: RuleTable = {
    aten.batch_norm.default: batch_norm,
    aten.native_batch_norm.default: native_batch_norm,
    aten.instance_norm.default: instance_norm,
    aten.group_norm.default: group_norm,
    aten.layer_norm.default: last_dims_norm,
    aten.rms_norm.default: last_dims_norm,
}
