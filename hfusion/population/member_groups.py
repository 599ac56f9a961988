"""Arrays and plain models as one module that gives the outputs of all members."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import device_of
from hfusion.core.calls import take_entries
from hfusion.core.layout import member_values, values_of
from hfusion.population.member_layout import check_entries
from hfusion.population.members import apart
from hfusion.population.plain_module import PlainModule, of_row, with_row

Group = tuple[FusedModule | PlainModule, Sequence[int | None]]
"""An array or a plain model, and the row of the population of each of its members; None where a row is free."""


class MemberGroups(nn.Module):
    """Arrays and plain models that are called with the same arguments: outputs ``[B, ...]`` of all members.

    Args:
        groups: fused modules, and models of one member.
        rows: for each group, the rows of its members, which errors name. Outputs are in ascending order of rows.
    """

    order: Tensor | None

    def __init__(self, groups: Sequence[nn.Module], rows: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.groups = nn.ModuleList(groups)
        self._rows = [list(of_group) for of_group in rows]
        joined = [row for of_group in self._rows for row in of_group]
        self._entries = [[sorted(joined).index(row) for row in of_group] for of_group in self._rows]
        order = torch.tensor(sorted(range(len(joined)), key=joined.__getitem__), device="cpu")
        in_order = joined == sorted(joined)
        self.register_buffer("order", None if in_order else order.to(device_of(self.groups)), persistent=False)

    def __len__(self) -> int:
        return sum(len(of_group) for of_group in self._rows)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Arguments are those of one member, or stacked. Raises ValueError if outputs differ in structure or shape."""
        check_entries((args, kwargs), len(self))
        outputs = []
        for group, entries in zip(self.groups, self._entries, strict=True):
            positional, named = take_entries(args, entries), take_entries(kwargs, entries)
            if isinstance(group, FusedModule):
                outputs.append(group(*positional, **named))
            else:
                outputs.append(with_row(group(*of_row(positional), **of_row(named))))
        return joined_rows(outputs, self._rows, self.order)


def selected_members(groups: Sequence[Group], rows: Sequence[int]) -> FusedModule | MemberGroups:
    """Return the members of ``rows``, which ascend, as one module: of the groups themselves if all take part.

    Otherwise members are copied: to an array for each group, or as a plain model where a group has one member.
    """
    chosen = set(rows)
    is_whole = all(row in chosen for _, of_group in groups for row in of_group)
    modules: list[nn.Module] = []
    members: list[list[int]] = []
    for fused, of_group in groups:
        chosen_rows = [row for row in of_group if row is not None and row in chosen]
        if not chosen_rows:
            continue
        members.append(chosen_rows)
        if is_whole:
            modules.append(fused.model if isinstance(fused, PlainModule) else fused)
        else:
            copies = [apart(cast(FusedModule, fused), of_group.index(row)) for row in chosen_rows]
            modules.append(copies[0] if len(copies) == 1 else fuse(copies))
    if members == [list(rows)] and isinstance(modules[0], FusedModule):
        return modules[0]
    return MemberGroups(modules, members)


def joined_rows(outputs: Sequence[Any], rows: Sequence[Sequence[int | None]], order: Tensor | None) -> Any:
    """Join the outputs of groups, each a nest with a leading dim of members, to one of all members.

    Args:
        outputs: the outputs of each group.
        rows: for each group, the rows of its members, for errors.
        order: index of each member into the concatenated groups; None if they are in order.

    Raises:
        ValueError: outputs of groups differ in structure, shape or dtype.
    """
    flat = [pytree.tree_flatten_with_path(output) for output in outputs]
    spec = flat[0][1]
    for (_, other), of_group in zip(flat, rows, strict=True):
        if other != spec:
            raise _unlike("outputs", pytree.treespec_pprint(spec), pytree.treespec_pprint(other), rows[0], of_group)
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    joined = [_joined([leaf for _, leaf in column], pytree.keystr(column[0][0]), rows, order) for column in columns]
    return pytree.tree_unflatten(joined, spec)


def _joined(leaves: Sequence[Any], path: str, rows: Sequence[Sequence[int | None]], order: Tensor | None) -> Any:
    kind = _kind(leaves[0])
    for leaf, of_group in zip(leaves, rows, strict=True):
        if _kind(leaf) != kind:
            raise _unlike(f"output{path}", _shown(leaves[0]), _shown(leaf), rows[0], of_group)
    if not isinstance(leaves[0], Tensor):
        pairs = zip(leaves, rows, strict=True)
        each = [value for leaf, of_group in pairs for value in values_of(leaf, len(of_group))]
        return member_values(each if order is None else [each[index] for index in order.tolist()])
    values = torch.cat(list(leaves)) if len(leaves) > 1 else leaves[0]
    return values if order is None else values[order.to(values.device)]


def _kind(leaf: Any) -> Any:
    """Return the properties that members' outputs must share."""
    return (leaf.dtype, tuple(leaf.shape[1:])) if isinstance(leaf, Tensor) else None


def _shown(leaf: Any) -> str:
    return f"{leaf.dtype} {list(leaf.shape[1:])}" if isinstance(leaf, Tensor) else type(leaf).__name__


def _unlike(
    source: str, first: Any, other: Any, rows: Sequence[int | None], other_rows: Sequence[int | None]
) -> ValueError:
    live, other_live = ([row for row in member_rows if row is not None] for member_rows in (rows, other_rows))
    return ValueError(
        f"{source}: {first} of the members in rows {live}, {other} of those in rows {other_live}. Members are averaged "
        "where they give outputs of one shape and dtype: choose such rows by weights=, or let the models give them"
    )
