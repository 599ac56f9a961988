"""Convolution: one for all members, grouped or dense, a matrix product, or one per member in channels_last.

With a shared input and per-member weights, B convolutions are one with ``B*O`` outputs. With an input per
member they are one with B times the groups. With shared weights the members are samples. Against the loop over
members, one call saves B-1 calls, and is the slower the larger the images: in channels_last one member's pixel is
next to those of all others. A kernel of one position is a product of matrices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hfusion.core.layout import Layout, lift
from hfusion.ops.lowering import Efficiency
from hfusion.ops.rule import (
    Answer,
    Call,
    Memberwise,
    RuleTable,
    Site,
    Value,
    call_per_member,
    folded,
    has_per_member,
    loop,
)

aten = torch.ops.aten

CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}

# Of an H200, 16 members, less 0.2 ms that every measured call took: one call 0.2 to 0.3 ms, in a loop 0.12 ms for each.
# A matrix product took 0.36 ms where the grouped convolution took 0.56 ms.
GROUPED_ON_GPU, DENSE_ON_GPU = Efficiency(14), Efficiency(14)
EACH_ON_GPU, PRODUCT_ON_GPU = Efficiency(8), Efficiency(12)
# Fits to forward and backward of single layers, one core of a Xeon (AVX-512), 4 and 16 members.
GROUPED = Efficiency(67, traffic=0.25, gpu=GROUPED_ON_GPU)
DENSE = Efficiency(40, traffic=0.45, gpu=DENSE_ON_GPU)
GROUPED_LAST = Efficiency(20, traffic=0.28, gpu=GROUPED_ON_GPU)
DENSE_LAST = Efficiency(40, traffic=0.25, gpu=DENSE_ON_GPU)
LAST = Efficiency(90, traffic=0.7)
EACH = Efficiency(53, traffic=0.3, gpu=EACH_ON_GPU)
PRODUCT = Efficiency(21, traffic=0.6, gpu=PRODUCT_ON_GPU)
PRODUCT_EACH = Efficiency(27, traffic=0.6, gpu=Efficiency(8))

Maybe = Tensor | None
Options = Mapping[str, Any]


@dataclass(frozen=True)
class Convolution:
    """The rule of one convolution operator with ``dims`` spatial dims.

    ``input [N, C, *S]`` or ``[C, *S]``, ``weight [O, C/groups, *K]``, or ``[C, O/groups, *K]`` if transposed.
    """

    dims: int
    transposed: bool = False

    def __call__(self, site: Site, **arguments: Any) -> Answer:
        if has_per_member(arguments):
            return loop(site, arguments, EACH)
        x, weight, bias = (arguments[name] for name in ("input", "weight", "bias"))
        options = {k: v for k, v in arguments.items() if k not in ("input", "weight", "bias")}
        if x.layout is Layout.LISTED and (weight.shared or x.rank == self.dims + 1):
            return self.listed(site, x, weight, bias, options)
        if weight.shared:
            return self.one_weight(site, x, weight, bias, options)
        if x.rank == self.dims + 1:
            return self.merged(site, x, weight, bias, options)
        candidates = [self.merged(site, x, weight, bias, options), self.listed(site, x, weight, bias, options)]
        if self.pointwise(weight, options) and (self.dims == 1 or x.layout is not Layout.PACKED):
            candidates.insert(0 if self.dims == 1 else 2, self.product(site, x, weight, bias))
        return tuple(candidates)

    def pointwise(self, weight: Value, options: Options) -> bool:
        """True if the kernel has one position, stride 1, no padding and one group."""
        ones = (1,) * self.dims
        return (
            not self.transposed
            and tuple(weight.shape[2:]) == ones
            and options["groups"] == 1
            and tuple(options["stride"]) in (ones, (1,))
            and (isinstance(options["padding"], str) or set(options["padding"]) == {0})
        )

    def images(self, x: Value) -> bool:
        """True if torch has channels_last for the rank of ``x``."""
        return x.rank == self.dims + 2 and x.rank in CHANNELS_LAST

    def one_weight(self, site: Site, x: Value, weight: Value, bias: Value | None, options: Options) -> Call:
        """Members as samples; biases of their own are added afterwards."""
        wide = x if x.shared else x.to(Layout.STACKED)
        if bias is not None and not bias.shared:
            apart = (site.target, site.rank, wide, weight, bias.to(Layout.STACKED))
            text = "folded: shared weight, own biases"
            return site.call(with_biases, apart, Layout.STACKED, text, options, efficiency=GROUPED)
        if x.rank == self.dims + 1:
            whole = (wide, weight, bias)
            return site.call(site.target, whole, Layout.STACKED, "members as batch", options, efficiency=GROUPED)
        args = (site.target, 1, wide, weight, bias)
        return site.call(folded, args, Layout.STACKED, "folded: shared weight", options, efficiency=GROUPED)

    def product(self, site: Site, x: Value, weight: Value, bias: Value | None) -> Call:
        """A kernel of one position: one matrix product of a shared input, one per member of a stacked one."""
        args = (x if x.shared else x.to(Layout.STACKED), weight.to(Layout.STACKED), _stacked(bias))
        return site.call(product, args, Layout.STACKED, "matrix product", efficiency=PRODUCT)

    def merged(self, site: Site, x: Value, weight: Value, bias: Value | None, options: Options) -> Call:
        """One convolution, dense for a shared input, else grouped: packed, or stacked where there is no N."""
        dense = x.shared and options["groups"] == 1
        fn, layout = (one_sample, Layout.STACKED) if x.rank == self.dims + 1 else (side_by_side, Layout.PACKED)
        options = options if dense else {**options, "groups": options["groups"] * site.members}
        wide = x if dense else x.to(layout)
        args = (site.target, wide, weight.to(Layout.STACKED), _stacked(bias), dense and self.transposed)
        first, other = (DENSE_LAST, GROUPED_LAST) if self.images(x) else (DENSE, GROUPED)
        text, efficiency = ("dense: shared input", first) if dense else ("grouped", other)
        return site.call(fn, args, layout, text, options, efficiency=efficiency)

    def listed(self, site: Site, x: Value, weight: Value, bias: Value | None, options: Options) -> Call:
        """One convolution per member, in channels_last where torch has it."""
        operands = tuple(v if v is None or v.shared else v.to(Layout.LISTED) for v in (x, weight, bias))
        if self.images(x) and x.example.device.type == "cpu":
            each_last = (site.members, (site.target, *operands), options)
            text = "loop, channels-last"
            return site.call(channels_last, each_last, Layout.LISTED, text, efficiency=LAST, loops=True)
        args: tuple[Any, ...] = (site.members, operands, {})
        if self.dims == 1 and x.rank == 3 and self.pointwise(weight, options):
            return site.call(product_each, args, Layout.LISTED, "loop, product", efficiency=PRODUCT_EACH, loops=True)
        args = (site.target, site.members, operands, options)
        return site.call(call_per_member, args, Layout.LISTED, "loop over members", efficiency=EACH, loops=True)


def side_by_side(convolve: OpOverload, x: Tensor, *rest: Any, **options: Any) -> Tensor:
    """Compute one convolution for all members: shared or packed ``x``, stacked weights, a packed result.

    The arguments are those of `of_all_members`. On a CPU input and result are in channels_last where torch has it: as
    fast or up to twice as fast, and norms and pooling after it up to six times.
    """
    return of_all_members(
        convolve, to_channels_last(x) if x.is_cpu and x.dim() in CHANNELS_LAST else x, *rest, **options
    )


def of_all_members(
    convolve: OpOverload, x: Tensor, weight: Tensor, bias: Maybe, inputs_first: bool, **options: Any
) -> Tensor:
    """Convolve ``x`` with the weights of all members.

    ``inputs_first``: weights ``[C, O, *K]`` that all meet the same C, so that members lie side by side in O.
    """
    kernels = weight.movedim(0, 1).flatten(1, 2) if inputs_first else weight.flatten(0, 1)
    y: Tensor = convolve(x, kernels, None if bias is None else bias.reshape(-1), **options)
    return y


def one_sample(
    convolve: OpOverload, x: Tensor, weight: Tensor, bias: Maybe, inputs_first: bool, **options: Any
) -> Tensor:
    """`of_all_members` for shared ``x [C, *S]`` or stacked ``[B, C, *S]``; a stacked result ``[B, O, *S]``."""
    flat = x.flatten(0, 1) if x.dim() == weight.dim() - 1 else x
    y = of_all_members(convolve, flat.unsqueeze(0), weight, bias, inputs_first, **options)
    return y.squeeze(0).unflatten(0, (weight.shape[0], -1))  # type: ignore[no-any-return]


def with_biases(convolve: OpOverload, rank: int, x: Tensor, weight: Tensor, bias: Tensor, **options: Any) -> Tensor:
    """One weight for all members, which are samples or share ``x``, and ``bias [B, O]``.

    ``rank`` is that of a member's result.
    """
    samples = x.dim() > weight.dim()
    y = folded(convolve, 1, x, weight, None, **options) if samples else convolve(x, weight, None, **options)
    result: Tensor = y + lift(bias.reshape(*bias.shape, *(1,) * (weight.dim() - 2)), rank)
    return result


def product(x: Tensor, weight: Tensor, bias: Maybe) -> Tensor:
    """Kernels of one position: ``x [N, C, *S]`` shared or ``[B, N, C, *S]``, ``weight [B, O, C, *1]``.

    The stacked result ``[B, N, O, *S]`` is stored as ``[B, O, N, *S]``: one product per member, and norms over
    channels read it in order.
    """
    members, channels_out, channels_in = weight.shape[:3]
    if x.dim() < weight.dim():
        features = x.movedim(1, 0)
        matrix, flat = weight.reshape(-1, channels_in), features.reshape(channels_in, -1)
        y = matrix @ flat if bias is None else torch.addmm(bias.reshape(-1, 1), matrix, flat)
        return y.view(members, channels_out, *features.shape[1:]).movedim(1, 2)
    features = x.movedim(2, 1)
    matrix, flat = (weight.reshape(members, channels_out, channels_in), features.reshape(members, channels_in, -1))
    y = matrix @ flat if bias is None else torch.baddbmm(bias.unsqueeze(-1), matrix, flat)
    return y.view(members, channels_out, *features.shape[2:]).movedim(1, 2)


@Memberwise
def product_each(x: Tensor, weight: Tensor, bias: Maybe) -> Tensor:
    """One member's `product`: ``x [N, C, *S]``, ``weight [O, C, *1]``; the result is stored as ``[O, N, *S]``."""
    return product(x, weight.unsqueeze(0), None if bias is None else bias.unsqueeze(0)).squeeze(0)


@Memberwise
def channels_last(convolve: OpOverload, x: Tensor, weight: Tensor, bias: Maybe, **options: Any) -> Tensor:
    """One member's convolution, input and result in channels_last."""
    y: Tensor = convolve(to_channels_last(x), weight, bias, **options)
    return y


def to_channels_last(x: Tensor) -> Tensor:
    """Return ``[N, C, *S]`` in channels_last: ``x`` itself if it is already, or a view if it has one channel."""
    if x.shape[1] == 1:
        # With one channel both orders fit; torch takes the strides for channels_last only if they say so.
        return x.contiguous().squeeze(1).unsqueeze(-1).movedim(-1, 1)
    return x.contiguous(memory_format=CHANNELS_LAST[x.dim()])


def _stacked(value: Value | None) -> Any:
    return None if value is None else value.to(Layout.STACKED)


RULES: RuleTable = {
    aten.conv1d.default: Convolution(1),
    aten.conv1d.padding: Convolution(1),
    aten.conv2d.default: Convolution(2),
    aten.conv2d.padding: Convolution(2),
    aten.conv3d.default: Convolution(3),
    aten.conv3d.padding: Convolution(3),
    aten.conv_transpose1d.default: Convolution(1, transposed=True),
    aten.conv_transpose2d.input: Convolution(2, transposed=True),
    aten.conv_transpose3d.input: Convolution(3, transposed=True),
}
