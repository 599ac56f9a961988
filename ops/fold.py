"""The fold family: operators on ``[N, C, *S]`` that treat samples alike, so that members can be samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.ops.lowering import PLAIN, Efficiency
from hfusion.ops.rule import Call, Rule, Site, has_per_member, in_order, loop, map_values, values


@dataclass(frozen=True)
class Fold:
    """A fold of members and samples into one dim: ``[B*N, ...]``, or ``[N*B, ...]`` if ``samples_first``."""

    members: int
    samples_first: bool

    @classmethod
    def of(cls, x: Tensor) -> Fold:
        """Return the fold in the memory order of ``x`` ``[B, N, ...]``, which needs no copy."""
        return cls(x.shape[0], x.stride(0) < x.stride(1))

    def fold(self, x: Tensor) -> Tensor:
        """``[B, N, ...] -> [B*N, ...]``; a view where the strides allow."""
        return (x.movedim(0, 1) if self.samples_first else x).flatten(0, 1)

    def unfold(self, x: Tensor) -> Tensor:
        """``[B*N, ...] -> [B, N, ...]``; a view."""
        if self.samples_first:
            return x.view(-1, self.members, *x.shape[1:]).movedim(1, 0)
        return x.view(self.members, -1, *x.shape[1:])


def folded(fn: Callable[..., Any], count: int, *args: Any, **kwargs: Any) -> Any:
    """Call ``fn`` with members as samples: the first ``count`` arguments and the results are ``[B, N, ...]``.

    Tensors in later arguments, such as weights, are the same for all members.
    """
    order = Fold.of(next(x for x in args if isinstance(x, Tensor)))
    operands = (order.fold(x) if isinstance(x, Tensor) else x for x in args[:count])
    result = fn(*operands, *args[count:], **kwargs)
    if isinstance(result, Tensor):
        return order.unfold(result)
    return tuple(order.unfold(x) for x in result)


def folding(
    rank: int | None = None,
    channelwise: bool = True,
    *,
    at_once: Efficiency = PLAIN,
    loops: Efficiency = PLAIN,
    packed: Efficiency | None = None,
) -> Rule:
    """Return the rule of an operator on samples of a batch.

    ``rank``: the rank of an operand that has N; in an operand of another rank the members take the place of N.
    ``None``: the operand always has N. ``channelwise``: each channel of the result depends on its own in the
    operands only, so that packed operands can stay packed. ``at_once``, ``packed`` and ``loops``: the efficiency of one
    call for all members, of one for packed operands where that is another, and of the loop over members.
    """

    def rule(site: Site, **arguments: Any) -> Call | None:
        operands = values(arguments)
        layouts = {v.layout for v in operands}
        if Layout.LISTED in layouts or has_per_member(arguments):
            return loop(site, arguments, loops)
        if rank is not None and operands[0].rank != rank:
            return _members_as_samples(site, arguments, at_once)
        if channelwise and Layout.PACKED in layouts:
            args, _ = in_order(site, map_values(arguments, lambda v: v.to(Layout.PACKED)))
            return site.call(site.target, args, Layout.PACKED, "packed", efficiency=packed or at_once)
        args, _ = in_order(site, map_values(arguments, lambda v: v.to(Layout.STACKED)))
        return site.call(folded, (site.target, len(args), *args), Layout.STACKED, "folded", efficiency=at_once)

    return rule


def _members_as_samples(site: Site, arguments: dict[str, Any], efficiency: Efficiency) -> Call:
    args, _ = in_order(site, map_values(arguments, lambda v: v.to(Layout.STACKED)))
    return site.call(site.target, args, Layout.STACKED, "members as batch", efficiency=efficiency)
