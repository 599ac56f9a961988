"""Reading and writing by index: shared indices address dims behind the member dim, others add a member index.

In the result the dims of the indices replace the indexed dims if those are neighbours, and come first otherwise:
https://numpy.org/doc/stable/user/basics.indexing.html#combining-advanced-and-basic-indexing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.ops.rule import (
    Answer,
    Call,
    MemberScalars,
    RuleTable,
    Site,
    Value,
    always_loop,
    loop,
    map_values,
    none_listed,
    table,
    values,
)
from hfusion.ops.shape import NEEDS_1, along, normal

aten = torch.ops.aten


@dataclass(frozen=True)
class Indexed:
    """The effect of indices on a member's dims: ``dims`` of theirs replace ``consumed`` dims from ``first`` on.

    ``adjacent``: whether the indexed dims are neighbours.
    """

    first: int
    dims: int
    consumed: int
    adjacent: bool


def _indexed(indices: Sequence[Value | None]) -> Indexed:
    places = [k for k, index in enumerate(indices) if index is not None]
    present = [index for index in indices if index is not None]
    masks = [index.rank if _is_mask(index) else 0 for index in present]
    return Indexed(
        first=places[0],
        dims=max(1 if mask else index.rank for index, mask in zip(present, masks, strict=True)),
        consumed=sum(mask or 1 for mask in masks),
        adjacent=places == list(range(places[0], places[-1] + 1)),
    )


def _is_mask(index: Value) -> bool:
    return index.example.dtype in (torch.bool, torch.uint8)


def by_indices(site: Site, *, self: Value, indices: Sequence[Value | None]) -> Call | None:
    """``self[indices]``, None for a dim that is taken whole."""
    present = [i for i in indices if i is not None]
    if any(_is_mask(i) and not i.shared for i in present):
        raise FusionError(
            f"{site.target}: a mask that differs between members picks a different number of "
            "elements from each; multiply by the mask, or use torch.where"
        )
    listed = Layout.LISTED in (self.layout, *(i.layout for i in present))
    if listed or any(_is_mask(i) and i.rank == 0 for i in present):
        return loop(site, {"self": self, "indices": indices})
    spans = _indexed(indices)
    if all(i.shared for i in present):
        return _shared_indices(site, self, indices, spans)
    lifted = [i if i is None or i.shared else i.to(Layout.STACKED, rank=spans.dims) for i in indices]
    first_dim = spans.first if spans.adjacent else 0
    if self.shared:
        return site.call(index_moved, (self, lifted, first_dim), Layout.STACKED)
    x = self.to(Layout.STACKED)
    return site.call(index_stacked, (x, lifted, spans.dims, first_dim), Layout.STACKED)


def _shared_indices(site: Site, self: Value, indices: Sequence[Value | None], spans: Indexed) -> Call:
    packed = self.layout is Layout.PACKED and spans.adjacent and (spans.first >= 2 or _picks_rows(spans))
    if packed:
        return site.call(site.target, (self, list(indices)), Layout.PACKED)
    x = self.to(Layout.STACKED)
    if spans.adjacent:
        return site.call(site.target, (x, [None, *indices]), Layout.STACKED)
    # With a whole dim between shared indices, their dims come first, before that of the members.
    return site.call(index_moved, (x, [None, *indices], spans.dims), Layout.STACKED)


def _picks_rows(spans: Indexed) -> bool:
    return (spans.first, spans.dims, spans.consumed) == (0, 1, 1)


def index_moved(x: Tensor, indices: Sequence[Tensor | None], member_dim: int) -> Tensor:
    """Index shared ``x`` by stacked indices ``[B, ...]``, or the other way round; ``member_dim`` is moved first."""
    result: Tensor = aten.index.Tensor(x, indices)
    return result.movedim(member_dim, 0)


def index_stacked(x: Tensor, indices: Sequence[Tensor | None], dims: int, first_dim: int) -> Tensor:
    """Index stacked ``x`` by stacked and shared indices, whose ``dims`` are moved to the member's ``first_dim``."""
    result: Tensor = aten.index.Tensor(x, [_member_index(x, dims), *indices])
    # The indices may not be adjacent to the member index; their dims then come first.
    return result.movedim(tuple(range(1, dims + 1)), tuple(range(first_dim + 1, first_dim + dims + 1)))


def _member_index(x: Tensor, dims: int) -> Tensor:
    return torch.arange(x.shape[0], device=x.device).view(-1, *(1,) * dims)


@none_listed
def index_put(
    site: Site, *, self: Value, indices: Sequence[Value | None], values: Value, accumulate: bool = False
) -> Call | None:
    """``self`` with ``values`` at ``indices``; a mask and one value select between two tensors."""
    present = [i for i in indices if i is not None]
    if len(indices) == 1 and _is_mask(present[0]) and values.rank == 0:
        return _masked_put(site, self, present[0], values, accumulate)
    if any(_is_mask(i) and (i.rank == 0 or not i.shared) for i in present):
        return loop(site, {"self": self, "indices": indices, "values": values, "accumulate": accumulate})
    spans = _indexed(indices)
    rank = spans.dims + self.rank - spans.consumed
    put = values if values.shared else values.to(Layout.STACKED, rank=rank)
    x = self.to(Layout.STACKED)
    if all(i.shared for i in present) and spans.adjacent:
        return site.call(site.target, (x, [None, *indices], put, accumulate), Layout.STACKED)
    if spans.first == 0 and spans.adjacent:
        lifted = [i if i is None or i.shared else i.to(Layout.STACKED, rank=spans.dims) for i in indices]
        return site.call(index_put_stacked, (x, lifted, put, accumulate, spans.dims), Layout.STACKED)
    return None


def index_put_stacked(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool, dims: int
) -> Tensor:
    """Stacked ``x`` with ``values`` at indices into the first dims of a member, of which some are stacked."""
    result: Tensor = aten.index_put.default(x, [_member_index(x, dims), *indices], values, accumulate)
    return result


def _masked_put(site: Site, self: Value, mask: Value, value: Value, accumulate: bool) -> Call:
    where = mask if mask.shared else mask.to(Layout.STACKED)
    put = value if value.shared else value.to(Layout.STACKED, rank=self.rank)
    args = (self.to(Layout.STACKED), where, put, self.rank - mask.rank, accumulate)
    return site.call(masked_put, args, Layout.STACKED)


def masked_put(x: Tensor, mask: Tensor, value: Tensor, trailing: int, accumulate: bool) -> Tensor:
    """``x`` with ``value`` where ``mask``, which lacks the ``trailing`` last dims of ``x``."""
    wide = mask.view(*mask.shape, *(1,) * trailing)
    return torch.where(wide != 0, x + value if accumulate else value, x)


@none_listed
def index_select(site: Site, *, self: Value, dim: int, index: Value) -> Call | None:
    """Rows at ``index`` along ``dim``."""
    if self.rank == 0 or index.rank == 0:
        return loop(site, {"self": self, "dim": dim, "index": index})
    wrapped_dim = normal(dim, self.rank)
    if index.shared:
        if self.layout is Layout.PACKED and wrapped_dim != 1:
            return site.call(site.target, (self, wrapped_dim, index), Layout.PACKED)
        return site.call(site.target, (self.to(Layout.STACKED), wrapped_dim + 1, index), Layout.STACKED)
    return by_indices(
        Site(aten.index.Tensor, site.members, site.example), self=self, indices=[*[None] * wrapped_dim, index]
    )


@none_listed
def by_rows(site: Site, *, self: Value, dim: int, index: Value, **rest: Any) -> Call | None:
    """``index_add`` and its kin: ``source`` goes to rows ``index`` along ``dim``, shared by all members."""
    if not index.shared or self.rank == 0 or any(v.rank != self.rank for v in values(rest)):
        # vmap fills the wrong rows of a shared tensor by stacked indices (torch 2.13).
        return loop(site, {"self": self, "dim": dim, "index": index, **rest}) if site.target in _FILLS else None
    wrapped_dim = normal(dim, self.rank)
    moved = map_values({"self": self, **rest}, lambda v: v.to(Layout.STACKED))
    return site.same_call({**moved, "dim": wrapped_dim + 1, "index": index}, Layout.STACKED)


def take_along_dim(site: Site, *, self: Value, indices: Value, dim: int | None) -> Answer:
    if dim is None:
        return site.call(take_flat, (self.to(Layout.STACKED), indices.to(Layout.STACKED)), Layout.STACKED)
    if self.rank != indices.rank:
        return loop(site, {"self": self, "indices": indices, "dim": dim})
    return _ALONG(site, self=self, indices=indices, dim=dim)


def take_flat(x: Tensor, indices: Tensor) -> Tensor:
    """The elements of each member's flattened ``x`` at its flattened ``indices``."""
    members = x.shape[0]
    return x.reshape(members, -1).gather(1, indices.reshape(members, -1))


@none_listed
def bucketize(site: Site, *, self: Value, boundaries: Value, **options: Any) -> Call | None:
    """Elementwise in ``self`` where all members share the boundaries."""
    arguments = {"self": self, "boundaries": boundaries, **options}
    if not boundaries.shared:
        return loop(site, arguments)
    return site.same_call(arguments, self.layout)


def one_hot(site: Site, *, self: Value, num_classes: int) -> Answer:
    return refuse(site) if num_classes == -1 else _one_hot(site, self=self, num_classes=num_classes)


@none_listed
def _one_hot(site: Site, *, self: Value, num_classes: int) -> Call:
    return site.call(site.target, (self, num_classes), self.layout)


def repeat_rows(site: Site, *, self: Value, repeats: Value, dim: int | None, output_size: Any) -> Call | None:
    """``repeat_interleave`` by a tensor of counts."""
    if not repeats.shared:
        refuse(site)
    arguments = {"self": self, "repeats": repeats, "dim": dim, "output_size": output_size}
    if self.layout is Layout.LISTED or self.rank == 0 or dim is None:
        return loop(site, arguments)
    stacked_dim = normal(dim, self.rank) + 1
    args = (self.to(Layout.STACKED), repeats, stacked_dim)
    return site.call(site.target, args, Layout.STACKED, "stacked", {"output_size": output_size})


def refuse(site: Site, **arguments: Any) -> Call | None:
    raise FusionError(
        f"{site.target}: what follows depends in size or course on values that differ between members; "
        "use a form of fixed size, such as torch.where"
    )


_FILLS = (aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
_ALONG = along("dim", packed=NEEDS_1)


# Tables looked up by index.

STACKED = Layout.STACKED


def embedding(site: Site, **arguments: Any) -> Call:
    weight, indices, padding_idx, scale_grad_by_freq, sparse = arguments.values()
    if sparse or isinstance(padding_idx, MemberScalars) or (weight.shared and scale_grad_by_freq):
        return loop(site, arguments)
    if weight.shared:
        return site.call(F.embedding, (indices.to(STACKED), weight, _index(padding_idx)), STACKED, "shared table")
    table = (weight.to(STACKED), padding_idx)
    if indices.shared and not scale_grad_by_freq:
        return site.call(rows_of_all, (indices, *table), STACKED, "index_select")
    operands = (indices.to(STACKED), *table, scale_grad_by_freq)
    return site.call(own_rows, operands, STACKED, "one table of all members' rows")


def _index(padding_idx: int) -> int | None:
    """ATen writes -1 for no padding, `torch.nn.functional` counts it from the end."""
    return padding_idx if padding_idx >= 0 else None


def rows_of_all(indices: Tensor, weight: Tensor, padding_idx: int) -> Tensor:
    """``indices [*]``, the same for all, ``weight [B, V, D]`` -> ``[B, *, D]``."""
    rows = weight.index_select(1, indices.reshape(-1)).view(weight.shape[0], *indices.shape, weight.shape[-1])
    return _without_padding(rows, indices, padding_idx)


def own_rows(indices: Tensor, weight: Tensor, padding_idx: int, scale_grad_by_freq: bool) -> Tensor:
    """``indices [B, *]``, ``weight [B, V, D]`` -> ``[B, *, D]``."""
    members, size, width = weight.shape
    # Looking each index up in 0 .. V-1 raises for an index that would reach into another member's rows.
    checked = torch.arange(size, device=weight.device).index_select(0, indices.reshape(-1)).view(indices.shape)
    first = torch.arange(0, members * size, size, device=weight.device)
    flat = checked + first.view(-1, *(1,) * (indices.dim() - 1))
    table = weight.reshape(-1, width)
    if scale_grad_by_freq:
        rows = aten.embedding.default(table, flat, -1, True)
    else:
        rows = table.index_select(0, flat.view(-1)).view(*flat.shape, width)
    return _without_padding(rows, indices, padding_idx)


def _without_padding(rows: Tensor, indices: Tensor, padding_idx: int) -> Tensor:
    """Keep the gradient from the padding's rows; ``rows [B, *, D]``, ``indices [B, *]`` or ``[*]``."""
    if padding_idx < 0:
        return rows
    return torch.where(indices.eq(padding_idx).unsqueeze(-1), rows.detach(), rows)


RULES: RuleTable = {
    aten.embedding.default: embedding,
    aten.embedding_bag.default: always_loop,
    aten.embedding_bag.padding_idx: always_loop,
    **table((aten.index.Tensor, aten._unsafe_index.Tensor), by_indices),
    aten.index_put.default: index_put,
    aten.index_select.default: index_select,
    aten.gather.default: _ALONG,
    **table((aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce), _ALONG),
    **table((aten.scatter_add.default, aten.scatter_reduce.two), _ALONG),
    aten.take_along_dim.default: take_along_dim,
    **table((aten.index_add.default, aten.index_copy.default, aten.index_reduce.default), by_rows),
    **table(_FILLS, by_rows),
    aten.bucketize.Tensor: bucketize,
    aten.one_hot.default: one_hot,
    aten.repeat_interleave.self_Tensor: repeat_rows,
    **table((aten.masked_select.default, aten.nonzero.default, aten.nonzero_numpy.default, aten.where.default), refuse),
    **table((aten.argwhere.default, aten._unique2.default, aten.unique_dim.default), refuse),
    **table((aten.unique_consecutive.default, aten.bincount.default, aten.repeat_interleave.Tensor), refuse),
    **table((aten.item.default, aten._local_scalar_dense.default, aten.is_nonzero.default), refuse),
}
