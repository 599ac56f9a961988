"""Split one value into the rows of several variants with a single call, so that gradients are joined once.

A slice for each variant is a view, but each has a gradient of the whole value, filled with zeros, and these are added.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from hfusion.core.layout import Layout
from hfusion.ops.lowering import Lowering, View
from hfusion.ops.saved import NOTHING
from hfusion.passes.gather import gather_stacked


def split_rows(x: Tensor, parts: tuple[tuple[int, ...], ...]) -> tuple[Tensor, ...]:
    """Return the rows of ``x [B, *S]`` in each of ``parts``, which together are all rows, each once.

    >>> split_rows(torch.tensor([1, 2, 3, 4]), ((0, 2), (1, 3)))
    (tensor([1, 3]), tensor([2, 4]))
    """
    count, size = len(parts), len(parts[0])
    if [row for part in parts for row in part] == list(range(len(x))):
        return tuple(x.split([len(part) for part in parts]))
    if all(part == tuple(range(first, len(x), count)) for first, part in enumerate(parts)) and count * size == len(x):
        return tuple(x.unflatten(0, (size, count)).unbind(1))
    rows = x.unbind()
    return tuple(torch.stack([rows[row] for row in part]) for part in parts)


_SPLIT = Lowering(split_rows, Layout.STACKED, "rows of variants", saves=NOTHING, view=View.PERHAPS)
_ITEM = Lowering(operator.getitem, Layout.STACKED, "rows", saves=NOTHING, view=View.ALWAYS)


def split_gathers(graph: fx.Graph, members: int) -> None:
    """Let the gathers of disjoint rows of one value with a gradient be one call, in place."""
    for source in list(graph.nodes):
        gathers = [user for user in source.users if _takes_rows(user)]
        taken_rows = [row for gather in gathers for row in _rows(gather)]
        if len(gathers) < 2 or len(set(taken_rows)) < len(taken_rows) or not _has_gradient(source):
            continue
        held = source.meta.get("rows", range(members))
        # In the order of their first rows, in which neighbours can be split; rows that are not taken are a part, too.
        gathers.sort(key=lambda gather: _rows(gather)[0])
        parts = [_rows(gather) for gather in gathers]
        rest = tuple(row for row in range(len(held)) if row not in taken_rows)
        first = min(gathers, key=list(graph.nodes).index)
        with graph.inserting_before(first):
            split = graph.call_function(split_rows, (source, (*parts, rest) if rest else tuple(parts)))
        split.meta.update(layout=Layout.STACKED, lowering=_SPLIT, transition=True, example=source.meta["example"])
        if "rows" in source.meta:
            split.meta["rows"] = source.meta["rows"]
        for index, gather in enumerate(gathers):
            with graph.inserting_before(gather):
                item = graph.call_function(operator.getitem, (split, index))
            item.meta.update(gather.meta, lowering=_ITEM)
            gather.replace_all_uses_with(item)
            graph.erase_node(gather)


def _takes_rows(node: fx.Node) -> bool:
    """True if a node takes some rows of one stacked value."""
    if node.target is not gather_stacked:
        return False
    sources, shared, _ = node.args
    return isinstance(sources, Sequence) and len(sources) == 1 and shared == (False,)


def _rows(gather: fx.Node) -> tuple[int, ...]:
    picks = gather.args[2]
    assert isinstance(picks, Sequence)
    return tuple(picks[1::2])  # type: ignore[arg-type]


def _has_gradient(source: fx.Node) -> bool:
    """True if a value may have a gradient; buffers have none, and are written and read row by row."""
    example = source.meta.get("example")
    if not isinstance(example, Tensor) or not example.is_floating_point():
        return False
    return source.op != "placeholder" or example.requires_grad
