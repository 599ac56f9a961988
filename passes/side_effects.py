"""Calls that matter beyond their values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.core.program import Kind, Slot
from hfusion.ops.rule import Call, RuleTable, Site, Value
from hfusion.passes.views import writes
from hfusion.torch_private.dispatch_modes import enter_autocast, exit_autocast

aten = torch.ops.aten

RUNNING_STATISTICS = frozenset({aten.batch_norm.default, aten.instance_norm.default, aten.native_batch_norm.default})


def remove_dead(graph: fx.Graph) -> None:
    """Drop calls without users, except writes and autocast borders, and assertions that export proved."""
    for node in reversed(list(graph.nodes)):
        asserts = node.target in (aten._assert_tensor_metadata.default, aten.sym_constrain_range_for_size.default)
        if node.op == "call_function" and not node.users and (asserts or not has_effect(node)):
            graph.erase_node(node)


def has_effect(node: fx.Node) -> bool:
    """True if a call has an effect besides its value."""
    target = node.target
    if isinstance(target, OpOverload):
        return target._schema.is_mutable or target in RUNNING_STATISTICS or target is EXPECT
    return target in (enter_autocast, exit_autocast)


def written_inputs(node: fx.Node) -> list[fx.Node]:
    """The operands that a call writes to."""
    if node.target in RUNNING_STATISTICS:
        training = node.args[5] if len(node.args) > 5 else True
        return [a for a in node.args[3:5] if isinstance(a, fx.Node)] if training else []
    return [node.args[0]] if writes(node) and isinstance(node.args[0], fx.Node) else []


def written_slots(graph: fx.Graph, slots: Sequence[Slot]) -> frozenset[str]:
    """The names of the parameters, buffers and constants that a member's graph writes to."""
    placeholders = zip(graph.find_nodes(op="placeholder"), slots, strict=True)
    names = {node: slot.name for node, slot in placeholders if slot.kind is not Kind.INPUT}
    return frozenset(names[node] for call in graph.nodes for node in written_inputs(call) if node in names)


# Checks of forward that do nothing but raise, as an assertion does.

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
