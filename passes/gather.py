"""Gather and scatter rows of members in graphs whose nodes are not computed by all members.

A node of a common graph that only some members compute names them in ``node.meta["rows"]``, in ascending order. Its
operands come through `GATHER` if the sources have other rows; its writes into a buffer go back through `PUT`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout, Listed
from hfusion.ops.lowering import View
from hfusion.ops.rule import Call, RuleTable, Site, Value
from hfusion.ops.saved import NOTHING

_library = torch.library.Library("hfusion_variants", "DEF")
# ``counts``: the rows of each source. ``picks``: for each row of the result a source, and the position among its rows.
# ``written``: whether the next call writes into the result, which then has memory of its own.
_library.define("gather_rows(Tensor[] sources, int[] counts, int[] picks, bool written=False) -> Tensor")
# ``members``: the rows of the stack that ``value`` is written to, its leading part in every dim.
_library.define("put_rows(Tensor(a!) self, Tensor value, int[] members) -> Tensor(a!)")
GATHER: OpOverload = torch.ops.hfusion_variants.gather_rows.default
PUT: OpOverload = torch.ops.hfusion_variants.put_rows.default


@torch.library.register_fake(GATHER, lib=_library)  # type: ignore[untyped-decorator]
def _gathered(sources: Sequence[Tensor], counts: Sequence[int], picks: Sequence[int], written: bool = False) -> Tensor:
    return torch.empty_like(sources[0])


@torch.library.register_fake(PUT, lib=_library)  # type: ignore[untyped-decorator]
def _put(self: Tensor, value: Tensor, members: Sequence[int]) -> Tensor:
    return self


# Neighbouring rows of one source: its place, the first position, the step from one to the next, and how many.
Run = tuple[int, int, int, int]


def rows_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the members that compute a node of a common graph, or of a program; None for all."""
    rows: tuple[int, ...] | None = node.meta.get("rows")
    return rows


def width(node: fx.Node, members: int) -> int:
    """Return the number of members that compute a node: all ``members``, unless it names rows."""
    rows = rows_of(node)
    return members if rows is None else len(rows)


def has_variants(graph: fx.Graph) -> bool:
    """Return whether some node is computed by some members only."""
    return any(rows_of(node) is not None for node in graph.nodes)


def runs_of(picks: Sequence[int]) -> tuple[Run, ...]:
    """Return ``picks`` as few slices.

    >>> runs_of([0, 1, 0, 3, 0, 5, 1, 0])
    ((0, 1, 2, 3), (1, 0, 1, 1))
    """
    runs: list[Run] = []
    for source, position in zip(picks[::2], picks[1::2], strict=True):
        if runs:
            before, start, step, count = runs[-1]
            apart = position - (start + step * (count - 1))
            if before == source and apart > 0 and (count == 1 or apart == step):
                runs[-1] = (source, start, apart, count + 1)
                continue
        runs.append((source, position, 1, 1))
    return tuple(runs)


def _slice(run: Run) -> slice:
    _, start, step, count = run
    return slice(start, start + step * (count - 1) + 1, step)


def gather_stacked(sources: Sequence[Tensor], shared: tuple[bool, ...], picks: tuple[int, ...]) -> Tensor:
    """Rows of ``sources [B_i, *S]`` as ``[R, *S]``; a source that is ``shared`` is ``[*S]``, the same in each row."""
    runs = runs_of(picks)
    if len(runs) <= len(set(picks[::2])):
        parts = [_rows(sources[run[0]], run, shared[run[0]]) for run in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    rows = [
        [x] * (max(picks[1::2]) + 1) if is_shared else x.unbind() for x, is_shared in zip(sources, shared, strict=True)
    ]
    return torch.stack([rows[source][row] for source, row in zip(picks[::2], picks[1::2], strict=True)])


def _rows(x: Tensor, run: Run, shared: bool) -> Tensor:
    return x.expand(run[3], *x.shape) if shared else x[_slice(run)]


def gather_packed(
    sources: Sequence[Tensor], counts: tuple[int, ...], shared: tuple[bool, ...], picks: tuple[int, ...]
) -> Tensor:
    """Members' channels of ``sources [N, B_i*C, *S]`` as ``[N, R*C, *S]``; see `gather_stacked`."""
    parts = []
    for run in runs_of(picks):
        x = sources[run[0]]
        if shared[run[0]]:
            parts.append(x.unsqueeze(1).expand(x.shape[0], run[3], *x.shape[1:]))
        else:
            parts.append(x.unflatten(1, (counts[run[0]], x.shape[1] // counts[run[0]]))[:, _slice(run)])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).flatten(1, 2)


def gather_listed(sources: Sequence[Listed | Tensor], shared: tuple[bool, ...], picks: tuple[int, ...]) -> Listed:
    """Rows of listed ``sources``; no copy."""
    pairs = zip(picks[::2], picks[1::2], strict=True)
    return Listed(sources[source] if shared[source] else sources[source][row] for source, row in pairs)


def gather_shared(x: Tensor) -> Tensor:
    """Return ``x``, which is the same for whichever members."""
    return x


def gather_copied(stack: Tensor, picks: tuple[int, ...]) -> Tensor:
    """Rows of a ``stack [B, *S]`` in memory of their own."""
    return gather_stacked([stack], (False,), picks).clone(memory_format=torch.contiguous_format)


def gather(
    site: Site, sources: Sequence[Value], counts: Sequence[int], picks: Sequence[int], written: bool
) -> tuple[Call, ...]:
    """Rows as slices of the sources, side by side, or as a list of them, which is no work."""
    if written:
        if sources[0].shared:
            raise _shared(sources[0])
        operands = (sources[0].to(Layout.STACKED), tuple(picks))
        return (site.call(gather_copied, operands, Layout.STACKED, "rows to write to", saves=NOTHING),)
    if len(sources) == 1 and sources[0].shared:
        return (site.call(gather_shared, (sources[0],), Layout.SHARED, "shared", saves=NOTHING, view=View.ALWAYS),)
    shared, places = tuple(x.shared for x in sources), tuple(picks)

    def moved(layout: Layout) -> list[object]:
        return [x if x.shared else x.to(layout) for x in sources]

    few = len(runs_of(places)) == 1
    text, view = ("rows", View.PERHAPS) if few else ("rows side by side", View.NEVER)
    calls = [
        site.call(
            gather_stacked, (moved(Layout.STACKED), shared, places), Layout.STACKED, text, saves=NOTHING, view=view
        )
    ]
    if site.rank >= 2 and any(x.layout is Layout.PACKED for x in sources):
        args = (moved(Layout.PACKED), tuple(counts), shared, places)
        calls.insert(0, site.call(gather_packed, args, Layout.PACKED, text, saves=NOTHING, view=View.PERHAPS))
    listed = (moved(Layout.LISTED), shared, places)
    call = site.call(gather_listed, listed, Layout.LISTED, "rows of a list", saves=NOTHING, view=View.USUALLY)
    return (call, *calls) if any(x.layout is Layout.LISTED for x in sources) else (*calls, call)


def put_stacked(stack: Tensor, value: Tensor, members: tuple[int, ...]) -> Tensor:
    """Write ``value [R, *S]`` into rows ``members`` of ``stack [B, *T]``, where T may be larger than S."""
    inner = tuple(slice(size) for size in value.shape[1:])
    start = 0
    with torch.no_grad():
        for run in runs_of([number for member in members for number in (0, member)]):
            stack[(_slice(run), *inner)].copy_(value[start : start + run[3]])
            start += run[3]
    return value


def put(site: Site, self: Value, value: Value, members: Sequence[int]) -> Call:
    """A write of some members into their rows of a stack."""
    if self.shared:
        raise _shared(self)
    rows = value.to(Layout.STACKED, rank=site.rank)
    return site.call(put_stacked, (self, rows, tuple(members)), Layout.STACKED, "write rows")


def _shared(value: Value) -> FusionError:
    return FusionError(
        f"{value.node.name} is one object in all members, but members write values of their own into it; give each "
        "model its own"
    )


RULES: RuleTable = {GATHER: gather, PUT: put}
