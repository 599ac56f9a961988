"""Checks of forward that do nothing but raise, as an assertion does.

`EXPECT` represents such a check in a graph. It is made for all members together, and ends the run of a program if it
fails for one of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, RuleTable, Site, Value

_library = torch.library.Library("hfusion_expected", "DEF")
# ``source`` is the line of the check.
_library.define("expect(Tensor condition, bool truth, str source) -> Tensor")
EXPECT: OpOverload = torch.ops.hfusion_expected.expect.default


class FailedCheck(FusionError):
    """A check of forward does not hold for some member; its own code has to run, and will raise."""


def _expect(condition: Tensor, truth: bool, source: str) -> Tensor:
    holds = condition == truth
    if not holds.all():
        rows = (~holds).nonzero().flatten().tolist() if holds.dim() else []
        members = f" for model {', '.join(map(str, rows))}" if rows else ""
        raise FailedCheck(f"{source}: the check that forward makes here fails{members}")
    return holds


_library.impl("expect", _expect, "CompositeExplicitAutograd")


@torch.library.register_fake(EXPECT, lib=_library)  # type: ignore[untyped-decorator]
def _fake(condition: Tensor, truth: bool, source: str) -> Tensor:
    return torch.empty_like(condition)


# Without users, it is not to be dropped.
torch.fx.node.has_side_effect(EXPECT)


def rule(site: Site, condition: Value, truth: bool, source: str) -> Call:
    """Check the conditions of all members in one call."""
    operand = condition if condition.shared else condition.to(Layout.STACKED)
    layout = Layout.SHARED if condition.shared else Layout.STACKED
    return site.call(EXPECT, (operand, truth, source), layout, f"a check of all members, {source}")


RULES: RuleTable = {EXPECT: rule}


def expectations(graph: fx.Graph) -> Sequence[str]:
    """The lines of the checks in ``graph``."""
    return [str(node.args[2]) for node in graph.nodes if node.target is EXPECT]
