"""Elementwise operators: the operator itself on operands brought to one layout.

Most are found by torch's own ``pointwise`` tag; composites, which carry no tag, are listed by name.
Type promotion: https://docs.pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.ops.lowering import View
from hfusion.ops.rule import (
    Call,
    Memberwise,
    RuleTable,
    Site,
    Value,
    in_order,
    loop,
    none_listed,
    pointwise,
    scalars_alike,
    table,
    values,
)
from hfusion.torch_private.operator_tables import operator_names

aten = torch.ops.aten

# Elementwise, but without the tag: composites, and kernels that torch does not tag.
_UNTAGGED = """
absolute alias arccos arccosh arcsin arcsinh arctan arctan2 arctanh conj_physical detach divide exp2 fix
float_power greater greater_equal hardswish imag isclose isreal less less_equal lift_fresh lift_fresh_copy
log_sigmoid logical_and logical_not logical_or logical_xor multiply negative not_equal positive real
resolve_conj resolve_neg rsub special_digamma special_erf special_erfc special_erfinv special_exp2
special_expit special_expm1 special_gammaln special_i0 special_log1p special_logit special_multigammaln
special_ndtr special_polygamma special_psi special_round special_sinc special_xlogy square subtract
true_divide where zero
"""

# Tagged, but with a rule of their own, several results, random numbers, or several promotions inside.
_NOT_PLAIN = frozenset({"clone", "equal", "frexp", "ldexp", "rrelu", "masked_fill"})
_BOUNDED = (aten.clamp.Tensor, aten.clip.Tensor)


def _tagged() -> Iterator[OpOverload]:
    for name in operator_names():
        namespace, _, operator = name.partition("::")
        base, _, overload = operator.partition(".")
        written = overload.endswith("out") or (base.endswith("_") and not base.endswith("__"))
        if namespace != "aten" or written or base in _NOT_PLAIN:
            continue
        # A build of torch may register a name without an operator.
        target = getattr(getattr(aten, base, None), overload or "default", None)
        if isinstance(target, OpOverload) and torch.Tag.pointwise in target.tags and _plain(target):
            yield target


def _untagged() -> Iterator[OpOverload]:
    for base in _UNTAGGED.split():
        packet = getattr(aten, base, None)
        for overload in packet.overloads() if packet is not None else ():
            target = getattr(packet, overload)
            if _plain(target):
                yield target


def _plain(target: OpOverload) -> bool:
    """True if ``target`` takes a tensor, returns a single one, and writes into none."""
    schema = target._schema
    single = [str(result.type) for result in schema.returns] == ["Tensor"]
    takes = any(str(argument.type) in ("Tensor", "Optional[Tensor]") for argument in schema.arguments)
    return single and takes and not schema.is_mutable


def elementwise(site: Site, **arguments: Any) -> Call | None:
    """`pointwise` in the dtype that one member computes in.

    A member's 0-dim tensor ranks below tensors with dims in type promotion, yet has a dim once it is stacked.
    Where that would change the result, 0-dim operands are cast to the member's dtype first.
    """
    call = pointwise(site, **arguments)
    if call is None or call.layout is Layout.LISTED:
        return call
    operands = [v for v in values(arguments) if v.example.dtype is not torch.bool]
    if len({v.example.dtype for v in operands}) < 2:
        return call
    member_dtype = _promoted([(v.example.dtype, v.rank) for v in operands])
    ranks = [(v.example.dtype, v.rank if v.shared else site.rank + 1) for v in operands]
    if _promoted(ranks) == member_dtype:
        return call
    casts = tuple(_is_zero_dim(a) for a in in_order(site, arguments)[0])
    cast_call = (call.fn, member_dtype, casts, call.args, dict(call.kwargs))
    return Call(replace(call.lowering, fn=with_casts), cast_call)


def _is_zero_dim(argument: Any) -> bool:
    return isinstance(argument, Value) and argument.rank == 0 and argument.example.dtype is not torch.bool


def _promoted(operands: Sequence[tuple[torch.dtype, int]]) -> torch.dtype:
    """The dtype that tensors of these dtypes and ranks are brought to."""
    groups = []
    for with_dims in (True, False):
        dtypes = [dtype for dtype, rank in operands if (rank > 0) is with_dims]
        if dtypes:
            common = dtypes[0]
            for dtype in dtypes[1:]:
                common = torch.promote_types(common, dtype)
            groups.append(torch.empty((1,) if with_dims else (), dtype=common, device="meta"))
    return torch.result_type(groups[0], groups[-1])


def with_casts(
    target: OpOverload, dtype: torch.dtype, casts: tuple[bool, ...], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``target`` with the marked positional operands cast to ``dtype``."""
    cast = [a.to(dtype) if mark else a for a, mark in zip(args, casts, strict=True)]
    return target(*cast, **kwargs)


def clamp(site: Site, *, self: Value, min: Value | None, max: Value | None) -> Call | None:
    """Clamp by tensors. torch 2.13 does not broadcast ``min`` of fewer dims than ``max``, so such calls loop."""
    arguments = {"self": self, "min": min, "max": max}
    if min is not None and max is not None and min.shared is not max.shared:
        return loop(site, arguments)
    return elementwise(site, **arguments)


@none_listed
def masked_fill(site: Site, *, self: Value, mask: Value, value: Any) -> Call | None:
    """``self [*S]`` with ``value`` where ``mask``; a 0-dim ``value`` per member is filled in by `where`."""
    if not isinstance(value, Value) or value.shared:
        return pointwise(site, self=self, mask=mask, value=value)
    rank = site.rank
    lifted = [v if v.shared else v.to(Layout.STACKED, rank=rank) for v in (mask, value, self)]
    return site.call(where_filled, tuple(lifted), Layout.STACKED)


def where_filled(mask: Tensor, value: Tensor, x: Tensor) -> Tensor:
    """``x`` with ``value`` in the dtype of ``x`` where ``mask``."""
    return torch.where(mask, value.to(x.dtype), x)


def copy(site: Site, *, self: Value, src: Value, non_blocking: Any = False) -> Call | None:
    """``src`` in the shape and dtype of ``self``; by `copy_`, since ``aten.copy`` has no derivative."""
    if Layout.LISTED in (self.layout, src.layout):
        listed = tuple(v if v.shared else v.to(Layout.LISTED) for v in (self, src))
        args: tuple[Any, ...] = (site.members, listed, {})
        return site.call(copied_each, args, Layout.LISTED, "loop over members", loops=True)
    if self.layout is src.layout is Layout.PACKED and self.shape == src.shape:
        return site.call(copied, (self, src), Layout.PACKED)
    source = src if src.shared else src.to(Layout.STACKED, rank=self.rank)
    return site.call(copied, (self.to(Layout.STACKED), source), Layout.STACKED)


def copied(x: Tensor, src: Tensor) -> Tensor:
    return x.clone().copy_(src)


copied_each = Memberwise(copied)


def fill_tensor(site: Site, *, self: Value, value: Value) -> Call | None:
    """Fill ``self`` with the 0-dim ``value``."""
    return pointwise(site, self=self, value=value) if value.shared else copy(site, self=self, src=value)


_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def cast(site: Site, **arguments: Any) -> Call | None:
    """Copies and casts of one tensor; ``memory_format`` speaks of the member's dims."""
    x: Value = arguments["self"]
    memory_format = arguments.get("memory_format")
    if memory_format not in _CHANNELS_LAST or x.layout is not Layout.STACKED:
        return pointwise(site, **arguments)
    args, kwargs = in_order(site, {**arguments, "self": x.to(Layout.STACKED)})
    return site.call(merged, (site.target, args, kwargs), Layout.STACKED)


def merged(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """``target`` on a stacked ``[B, N, ...]`` seen as ``[B*N, ...]``, for memory formats of fixed rank."""
    x, *rest = args
    result: Tensor = target(x.flatten(0, 1), *rest, **kwargs)
    return result.reshape(x.shape[:2] + result.shape[1:])


def contiguous(site: Site, *, self: Value, memory_format: Any = torch.contiguous_format) -> Call | None:
    """Return ``self`` unchanged if a member's tensor is contiguous already: the strides of the array are free."""
    plain = memory_format not in _CHANNELS_LAST
    if plain and self.layout is not Layout.LISTED and self.example.is_contiguous():
        return site.call(identity, (self,), self.layout, view=View.ALWAYS)
    return cast(site, self=self, memory_format=memory_format)


def identity(x: Tensor) -> Tensor:
    return x


@none_listed
def cast_as(site: Site, *, self: Value, other: Value, **options: Any) -> Call | None:
    """``self`` in the dtype and on the device of ``other``, whose values play no part."""
    copied = bool(options.get("copy", False))
    args = (self, site.example.device, site.example.dtype, False, copied)
    return site.call(aten.to.device, args, self.layout)


@none_listed
def prelu(site: Site, *, self: Value, weight: Value) -> Call | None:
    """``weight`` holds one slope, or one for each channel, dim 1 of ``self``."""
    slopes = weight if weight.shared else weight.to(Layout.STACKED)
    return site.call(prelu_stacked, (self.to(Layout.STACKED), slopes, not weight.shared), Layout.STACKED)


def prelu_stacked(x: Tensor, weight: Tensor, per_member: bool) -> Tensor:
    """``x [B, N, C, ...]``, ``weight [B, C]`` or ``[B, 1]``; a shared one without B."""
    members = weight.shape[:1] if per_member else (1,)
    channels = weight.shape[-1] if weight.dim() > per_member else 1
    if x.dim() < 3:
        shape = (*members, *(1,) * (x.dim() - 1))
        weight = weight.reshape(shape)
    else:
        weight = weight.reshape(*members, 1, channels, *(1,) * (x.dim() - 3))
    result: Tensor = aten._prelu_kernel.default(x, weight)
    return result


@scalars_alike
def like(site: Site, *, self: Value, **options: Any) -> Call | None:
    """Return one constant tensor for all members, in the shape that one member sees."""
    args, kwargs = in_order(site, {"self": self, **options})
    first = (site.target, self.layout.value, site.members, args, kwargs)
    return site.call(on_first_member, first, Layout.SHARED, "shared")


def on_first_member(
    target: OpOverload, layout: str, members: int, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """Call ``target`` with member 0's part of the first operand."""
    x, *rest = args
    return target(first_member(x, layout, members), *rest, **kwargs)


def first_member(x: Any, layout: str, members: int) -> Tensor:
    """Return member 0's tensor, a view."""
    part: Tensor = x.narrow(1, 0, x.shape[1] // members) if layout == Layout.PACKED.value else x[0]
    return part


# Writes of a new value into a buffer or a parameter, the one effect that captured graphs keep.


def write(buffer: Tensor, value: Tensor) -> Tensor:
    """Copy ``value [B, *S]`` into the stacked ``buffer [B, *S]``."""
    with torch.no_grad():
        return buffer.copy_(value)


def copy_(site: Site, self: Value, src: Value, non_blocking: Any = False) -> Call:
    if self.shared:
        raise FusionError(
            f"{self.node.name} is one object in all members, but every member writes its own value into it; "
            "give each model its own"
        )
    return site.call(write, (self, src.to(Layout.STACKED, rank=self.rank)), Layout.STACKED, "write")


RULES: RuleTable = {
    aten.copy_.default: copy_,
    **table(_tagged(), elementwise),
    **table(_untagged(), elementwise),
    **table(_BOUNDED, clamp),
    **table((aten.clone.default, aten._to_copy.default, aten.to.dtype, aten.to.device, aten.to.dtype_layout), cast),
    **table((aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.empty_like.default), like),
    **table((aten.type_as.default, aten.to.other), cast_as),
    **table((aten.masked_fill.Scalar, aten.masked_fill.Tensor), masked_fill),
    aten.contiguous.default: contiguous,
    aten.copy.default: copy,
    aten.fill.Scalar: pointwise,
    aten.fill.Tensor: fill_tensor,
    aten.prelu.default: prelu,
}
