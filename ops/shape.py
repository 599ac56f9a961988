"""Views and splits: the member's dims shifted behind the member dim, or kept on a packed value.

A packed ``[N, B*C, ...]`` stays packed under operators that keep dims 0 and 1 in place, or that merge or split
dim 1, since the members are outermost there. All others work on the stacked value, a free view of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.ops.lowering import View
from hfusion.ops.pointwise import first_member, identity, like
from hfusion.ops.rule import (
    Answer,
    Call,
    Memberwise,
    Rule,
    RuleTable,
    Site,
    Value,
    has_per_member,
    loop,
    map_values,
    none_listed,
    table,
    values,
)

aten = torch.ops.aten

NEEDS_0_1 = frozenset({0, 1})
NEEDS_1 = frozenset({1})


def normal(dim: int, rank: int) -> int:
    """Return ``dim`` as a non-negative number."""
    return dim % max(rank, 1)


def shifted(dim: Any, rank: int) -> Any:
    """Return one or several dims of a member as dims of the stacked value."""
    return _map_dims(dim, lambda d: normal(d, rank) + 1)


def along(*names: str, packed: frozenset[int], extra: int = 0) -> Rule:
    """Return the rule of operators that work along the dims in the arguments ``names``.

    ``packed``: the dims for which a packed value cannot stay packed. ``extra``: the dims are counted in a tensor that
    has this many dims more than the operand.
    """

    def rule(site: Site, **arguments: Any) -> Call | None:
        operands = values(arguments)
        rank = operands[0].rank + extra
        if rank == 0 or any(v.layout is Layout.LISTED for v in operands) or has_per_member(arguments):
            return loop(site, arguments)
        dims = {normal(d, rank) for name in names for d in _several(arguments[name])}
        if rank >= 2 and not dims & packed and all(v.layout is Layout.PACKED for v in operands):
            fixed = {name: _map_dims(arguments[name], lambda d: normal(d, rank)) for name in names}
            packed_operands = map_values({**arguments, **fixed}, lambda v: v.to(Layout.PACKED))
            return site.same_call(packed_operands, Layout.PACKED)
        moved = {name: shifted(arguments[name], rank) for name in names}
        return site.same_call(map_values({**arguments, **moved}, lambda v: v.to(Layout.STACKED)), Layout.STACKED)

    return rule


def _several(dim: Any) -> Sequence[int]:
    return dim if isinstance(dim, list | tuple) else (dim,)


def _map_dims(dim: Any, change: Callable[[int], int]) -> Any:
    return [change(d) for d in dim] if isinstance(dim, list | tuple) else change(dim)


def equal(a: Any, b: Any) -> bool:
    """True if two sizes are always equal. Sizes that vary are never guarded."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    # Imported here because it imports sympy.
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return bool(statically_known_true(a == b))


def reshape(site: Site, *, self: Value, **sizes: Any) -> Call | None:
    """``view``, ``reshape`` and the like; never by `view`, since the strides of the array are its own."""
    (target_shape,) = sizes.values()
    if self.layout is Layout.LISTED:
        return loop(of_operator(site, aten.reshape.default), {"self": self, "shape": target_shape})
    if self.layout is Layout.PACKED and site.rank >= 2 and equal(self.shape[0], site.example.shape[0]):
        return site.call(reshape_packed, (self, site.members, list(target_shape)), Layout.PACKED)
    return site.call(aten.reshape.default, (self.to(Layout.STACKED), [site.members, *target_shape]), Layout.STACKED)


def reshape_packed(x: Tensor, members: int, shape: Sequence[int]) -> Tensor:
    """``[N, B*C, ...]`` to ``[N, B*D, ...]`` for the member's ``shape = [N, D, ...]``."""
    batch, channels, *rest = shape
    return x.reshape(batch, channels if channels == -1 else members * channels, *rest)


@none_listed
def flatten(site: Site, *, self: Value, start_dim: int, end_dim: int) -> Call | None:
    if self.rank == 0:
        return loop(site, {"self": self, "start_dim": start_dim, "end_dim": end_dim})
    start, end = normal(start_dim, self.rank), normal(end_dim, self.rank)
    if self.layout is Layout.PACKED and start >= 1:
        return site.call(aten.flatten.using_ints, (self, start, end), Layout.PACKED)
    return site.call(aten.flatten.using_ints, (self.to(Layout.STACKED), start + 1, end + 1), Layout.STACKED)


def ravel(site: Site, *, self: Value) -> Answer:
    return flatten(of_operator(site, aten.flatten.using_ints), self=self, start_dim=0, end_dim=-1)


@none_listed
def unflatten(site: Site, *, self: Value, dim: int, sizes: Sequence[Any]) -> Call | None:
    if self.rank == 0:
        return loop(site, {"self": self, "dim": dim, "sizes": sizes})
    wrapped_dim = normal(dim, self.rank)
    if self.layout is Layout.PACKED and wrapped_dim >= 1:
        return site.call(unflatten_packed, (self, site.members, wrapped_dim, list(sizes)), Layout.PACKED)
    return site.call(aten.unflatten.int, (self.to(Layout.STACKED), wrapped_dim + 1, list(sizes)), Layout.STACKED)


def unflatten_packed(x: Tensor, members: int, dim: int, sizes: Sequence[int]) -> Tensor:
    """``[N, B*C, ...]`` with ``dim >= 1`` of it as ``sizes``; the members stay outermost in dim 1."""
    first, *rest = sizes
    if dim == 1 and first != -1:
        first = members * first
    return torch.unflatten(x, dim, (first, *rest))


def reshape_as(site: Site, *, self: Value, other: Value) -> Call | None:
    if Layout.LISTED in (self.layout, other.layout):
        return loop(of_operator(site, aten.reshape_as.default), {"self": self, "other": other})
    if other.shared:
        return site.call(reshape_to, (self.to(Layout.STACKED), other), Layout.STACKED)
    operands = (self.to(Layout.STACKED), other.to(Layout.STACKED))
    return site.call(aten.reshape_as.default, operands, Layout.STACKED)


def reshape_to(x: Tensor, other: Tensor) -> Tensor:
    """Stacked ``x`` in the shape of a shared ``other``."""
    return x.reshape(x.shape[0], *other.shape)


@none_listed
def permute(site: Site, *, self: Value, dims: Sequence[int]) -> Call | None:
    order = [normal(d, self.rank) for d in dims]
    if self.layout is Layout.PACKED and order[:2] == [0, 1]:
        return site.call(aten.permute.default, (self, order), Layout.PACKED)
    stacked = (self.to(Layout.STACKED), [0, *(d + 1 for d in order)])
    return site.call(aten.permute.default, stacked, Layout.STACKED)


def reverse(site: Site, *, self: Value) -> Answer:
    """``t`` and ``.T``: all dims in reverse order."""
    return permute(of_operator(site, aten.permute.default), self=self, dims=list(reversed(range(self.rank))))


def transpose_last(site: Site, *, self: Value) -> Answer:
    dims = {"dim0": self.rank - 2, "dim1": self.rank - 1}
    return RULES[aten.transpose.int](of_operator(site, aten.transpose.int), self=self, **dims)


def of_operator(site: Site, target: Any) -> Site:
    """Return the same site with ``target`` as its operator."""
    return Site(target, site.members, site.example)


def squeeze(site: Site, *, self: Value) -> Answer:
    """Remove only dims of size 1 of the member's tensor, never the member dim."""
    ones = [k for k, size in enumerate(self.shape) if equal(size, 1)]
    if not ones:
        return None if self.layout is Layout.LISTED else site.call(identity, (self,), self.layout, view=View.ALWAYS)
    return RULES[aten.squeeze.dims](of_operator(site, aten.squeeze.dims), self=self, dim=ones)


@none_listed
def unsqueeze(site: Site, *, self: Value, dim: int) -> Call | None:
    wrapped_dim = normal(dim, self.rank + 1)
    if self.layout is Layout.PACKED and wrapped_dim >= 2:
        return site.call(site.target, (self, wrapped_dim), Layout.PACKED)
    return site.call(site.target, (self.to(Layout.STACKED), wrapped_dim + 1), Layout.STACKED)


@none_listed
def expand(site: Site, *, self: Value, size: Sequence[Any], implicit: bool = False) -> Call | None:
    if self.layout is Layout.PACKED and site.rank == self.rank and equal(self.shape[1], site.example.shape[1]):
        return site.call(aten.expand.default, (self, [size[0], -1, *size[2:]]), Layout.PACKED)
    x = self.to(Layout.STACKED, rank=site.rank)
    return site.call(aten.expand.default, (x, [site.members, *size]), Layout.STACKED)


def expand_as(site: Site, *, self: Value, other: Value) -> Call | None:
    """Only the shape of ``other`` counts: a shared ``self`` stays shared."""
    if self.layout is Layout.LISTED or (other.layout is Layout.LISTED and not self.shared):
        return loop(site, {"self": self, "other": other})
    if self.shared:
        return site.call(expand_to_first, (self, other, other.layout.value, site.members), Layout.SHARED, "shared")
    x = self.to(Layout.STACKED, rank=site.rank)
    if other.shared:
        return site.call(expand_to, (x, other), Layout.STACKED)
    return site.call(aten.expand_as.default, (x, other.to(Layout.STACKED)), Layout.STACKED)


def expand_to(x: Tensor, other: Tensor) -> Tensor:
    """Stacked ``x`` in the shape of a shared ``other``."""
    return x.expand(x.shape[0], *other.shape)


def expand_to_first(x: Tensor, other: Any, layout: str, members: int) -> Tensor:
    """Shared ``x`` in the shape of one member of ``other``."""
    return x.expand(first_member(other, layout, members).shape)


def roll(site: Site, *, self: Value, shifts: Any, dims: Any) -> Answer:
    if not dims:
        return loop(site, {"self": self, "shifts": shifts, "dims": dims})
    return _roll(site, self=self, shifts=shifts, dims=dims)


_roll = along("dims", packed=NEEDS_1)


@none_listed
def triangle(site: Site, *, self: Value, diagonal: Any) -> Call | None:
    """The last two dims are the matrix."""
    layout = Layout.PACKED if self.layout is Layout.PACKED and self.rank >= 4 else Layout.STACKED
    return site.same_call({"self": self.to(layout), "diagonal": diagonal}, layout)


def slices(site: Site, *, self: Value, dim: int, start: Any, end: Any, step: Any) -> Answer:
    """Python's ``x[:, k]`` is full of slices that take a dim whole; those are no work."""
    whole = start in (None, 0) and end in (None, _TO_THE_END) and step == 1
    if whole and self.layout is Layout.LISTED:
        args: tuple[Any, ...] = (site.members, (self,), {})
        return site.call(listed_identity, args, self.layout, view=View.ALWAYS, loops=True)
    if whole:
        return site.call(identity, (self,), self.layout, view=View.ALWAYS)
    return _SLICE(site, self=self, dim=dim, start=start, end=end, step=step)


listed_identity = Memberwise(identity)
_SLICE = along("dim", packed=NEEDS_1)
_TO_THE_END = 2**63 - 1


def size(site: Site, *, self: Value, dim: int) -> Answer:
    """A member's size, the same for all."""
    if self.layout is Layout.STACKED:
        return site.call(aten.sym_size.int, (self, normal(dim, self.rank) + 1), Layout.SHARED, "size")
    return like(site, self=self, dim=dim)


def strides(site: Site, **arguments: Any) -> Call | None:
    raise FusionError(f"{site.target}: forward reads the strides of a tensor, which differ in an array; use its shape")


def as_strided(
    site: Site, *, self: Value, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None
) -> Call | None:
    """Addresses a member's memory: known only where its tensor is contiguous and starts its storage."""
    if not self.example.is_contiguous() or self.example.storage_offset() != 0:
        strides(site)
    args = (self.to(Layout.STACKED), list(size), list(stride), storage_offset or 0)
    return site.call(strided, args, Layout.STACKED)


def strided(x: Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> Tensor:
    """Stacked ``x`` as each member's contiguous memory read in ``size`` and ``stride`` from ``offset`` on."""
    flat = x.reshape(x.shape[0], -1).contiguous()
    return flat.as_strided((x.shape[0], *size), (flat.shape[1], *stride), flat.storage_offset() + offset)


@none_listed
def view_as_complex(site: Site, *, self: Value) -> Call:
    """Pairs of numbers as complex ones; pairs of a member are not always next to each other in a stack."""
    operand = self.to(Layout.STACKED)
    return site.call(complex_pairs, (operand,), Layout.STACKED, "stacked", view=View.USUALLY)


def complex_pairs(x: Tensor) -> Tensor:
    """Return ``x [..., 2]`` as complex numbers, copied if its pairs are not next to each other in memory."""
    return torch.view_as_complex(x.contiguous())


def as_strided_scatter(site: Site, **arguments: Any) -> Call | None:
    """Refused: torch's derivative of it reads memory of the gradient that a row of a stack does not begin (2.13)."""
    raise FusionError(f"{site.target}: forward writes at addresses of a tensor's memory; write by index or by slices")


_SPLITS = (
    *(aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default),
    *(aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default, aten.unsafe_chunk.default),
    *(aten.tensor_split.sections, aten.tensor_split.indices),
)


# Joins and repetitions: of several tensors, or of one with itself.


@none_listed
def repeat(site: Site, *, self: Value, **repeats: Any) -> Call | None:
    """``repeat`` and ``tile``."""
    (counts,) = repeats.values()
    counts = [1] * (self.rank - len(counts)) + list(counts)
    x = self.to(Layout.STACKED, rank=len(counts))
    return site.call(aten.repeat.default, (x, [1, *counts]), Layout.STACKED)


@none_listed
def repeat_interleave(site: Site, *, self: Value, repeats: Any, dim: int | None, **rest: Any) -> Call | None:
    if self.rank == 0:
        return loop(site, {"self": self, "repeats": repeats, "dim": dim, **rest})
    x = self.to(Layout.STACKED)
    if dim is None:
        return site.call(repeat_flat, (x, repeats), Layout.STACKED)
    return site.call(site.target, (x, repeats, normal(dim, self.rank) + 1), Layout.STACKED, "stacked", rest)


def repeat_flat(x: Tensor, repeats: int) -> Tensor:
    """Flatten each member's tensor and repeat every element ``repeats`` times: ``[B, numel * repeats]``."""
    return x.flatten(1).repeat_interleave(repeats, 1)


@none_listed
def cat(site: Site, *, tensors: Sequence[Value], dim: int) -> Call | None:
    """Members side by side in the channels can be joined along them too."""
    rank = site.rank
    if any(v.rank != rank for v in tensors):
        return loop(of_operator(site, aten.cat.default), {"tensors": tensors, "dim": dim})
    wrapped_dim = normal(dim, rank)
    if all(v.layout is Layout.PACKED for v in tensors):
        if wrapped_dim == 1:
            return site.call(cat_channels, (list(tensors), site.members), Layout.PACKED)
        return site.call(aten.cat.default, (list(tensors), wrapped_dim), Layout.PACKED)
    stacked = [v.to(Layout.STACKED) for v in tensors]
    return site.call(aten.cat.default, (stacked, wrapped_dim + 1), Layout.STACKED)


def cat_channels(tensors: Sequence[Tensor], members: int) -> Tensor:
    """``[N, B*C_i, ...]`` to ``[N, B*sum(C_i), ...]``, each member's channels together."""
    return torch.cat([torch.unflatten(x, 1, (members, -1)) for x in tensors], 2).flatten(1, 2)


@none_listed
def stack(site: Site, *, tensors: Sequence[Value], dim: int) -> Call | None:
    wrapped_dim = normal(dim, site.rank)
    if wrapped_dim >= 2 and all(v.layout is Layout.PACKED for v in tensors):
        return site.call(aten.stack.default, (list(tensors), wrapped_dim), Layout.PACKED)
    stacked = [v.to(Layout.STACKED) for v in tensors]
    return site.call(aten.stack.default, (stacked, wrapped_dim + 1), Layout.STACKED)


def cat_along(dim: int, least: int) -> Rule:
    """Return the rule of ``hstack``, ``vstack`` or ``dstack``: `cat` along ``dim`` if members have ``least`` dims."""

    def rule(site: Site, *, tensors: Sequence[Value]) -> Answer:
        if any(v.rank < least for v in tensors):
            return loop(site, {"tensors": tensors})
        return cat(site, tensors=tensors, dim=dim)

    return rule


RULES: RuleTable = {
    **table((aten.repeat.default, aten.tile.default), repeat),
    aten.repeat_interleave.self_int: repeat_interleave,
    **table((aten.cat.default, aten.concat.default, aten.concatenate.default), cat),
    aten.stack.default: stack,
    aten.hstack.default: cat_along(1, 2),
    aten.vstack.default: cat_along(0, 2),
    aten.dstack.default: cat_along(2, 3),
    **table((aten.view.default, aten.reshape.default, aten._unsafe_view.default), reshape),
    **table((aten.view_as.default, aten.reshape_as.default), reshape_as),
    aten.flatten.using_ints: flatten,
    aten.ravel.default: ravel,
    aten.unflatten.int: unflatten,
    aten.permute.default: permute,
    **table((aten.t.default, aten.numpy_T.default), reverse),
    aten.mT.default: transpose_last,
    aten.transpose.int: along("dim0", "dim1", packed=NEEDS_0_1),
    aten.swapdims.default: along("dim0", "dim1", packed=NEEDS_0_1),
    aten.swapaxes.default: along("axis0", "axis1", packed=NEEDS_0_1),
    **table(
        (aten.movedim.int, aten.movedim.intlist, aten.moveaxis.int, aten.moveaxis.intlist),
        along("source", "destination", packed=NEEDS_0_1),
    ),
    aten.squeeze.default: squeeze,
    **table((aten.squeeze.dim, aten.squeeze.dims), along("dim", packed=NEEDS_0_1)),
    aten.unsqueeze.default: unsqueeze,
    **table((aten.expand.default, aten.broadcast_to.default), expand),
    aten.expand_as.default: expand_as,
    aten.slice.Tensor: slices,
    **table((aten.narrow.default, aten.slice_copy.Tensor), along("dim", packed=NEEDS_1)),
    **table(_SPLITS, along("dim", packed=NEEDS_1)),
    **table((aten.select.int, aten.unbind.int, aten.select_scatter.default), along("dim", packed=NEEDS_0_1)),
    **table((aten.slice_scatter.default, aten.glu.default), along("dim", packed=NEEDS_1)),
    **table((aten.diagonal.default, aten.diagonal_scatter.default), along("dim1", "dim2", packed=NEEDS_0_1)),
    aten.diag_embed.default: along("dim1", "dim2", packed=frozenset(range(9)), extra=1),
    aten.unfold.default: along("dimension", packed=NEEDS_1),
    aten.flip.default: along("dims", packed=NEEDS_1),
    aten.roll.default: roll,
    **table((aten.tril.default, aten.triu.default), triangle),
    aten.view_as_complex.default: view_as_complex,
    aten.sym_size.int: size,
    aten.sym_numel.default: like,
    aten.as_strided.default: as_strided,
    aten.as_strided_scatter.default: as_strided_scatter,
    **table((aten.sym_stride.int, aten.sym_storage_offset.default), strides),
    **table((aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default), like),
}
