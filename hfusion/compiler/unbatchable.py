"""Find all submodules of a member's graph with operators that cannot be batched, in one walk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx

from hfusion.capture.method_interception import Island
from hfusion.core.layout import Layout
from hfusion.ops.rule import RuleTable
from hfusion.passes.candidates import Result, Unbatchable, candidates, result


def unbatchable(graph: fx.Graph, layouts: Sequence[Layout], members: int, rules: RuleTable) -> dict[Island, str]:
    """Return the submodules that must run in a loop, with the reasons. ``layouts``: the layouts of the placeholders.

    Operators that depend on one without a rule, in its submodule or by a number or size outside of it, are not judged:
    they may be different once the submodule runs in a loop.
    """
    env: dict[fx.Node, Result] = {}
    unknown: dict[fx.Node, str] = {}
    reasons: dict[Island, str] = {}
    input_layouts = iter(layouts)
    for node in graph.nodes:
        example = node.meta.get("val")
        if node.op == "placeholder":
            env[node] = result(node, next(input_layouts), example)
            continue
        if node.op != "call_function":
            continue
        layout, path = Layout.STACKED, module_path(node)
        if any(_inside(path, around) or not _has_known_sizes(source) for source, around in _sources(node, unknown)):
            unknown[node] = path
        else:
            try:
                if candidates(node, env, members, rules)[0].layout is Layout.SHARED:
                    layout = Layout.SHARED
            except Unbatchable as error:
                reasons.setdefault(Island(path), str(error))
                unknown[node] = path
        env[node] = result(node, layout, example)
    return reasons


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule whose code calls ``node``; empty for the model's own code."""
    return next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")


def _sources(node: fx.Node, unknown: dict[fx.Node, str]) -> Iterator[tuple[fx.Node, str]]:
    return ((source, unknown[source]) for source in node.all_input_nodes if source in unknown)


def _inside(path: str, around: str) -> bool:
    return not around or path == around or path.startswith(f"{around}.")


def _has_known_sizes(node: fx.Node) -> bool:
    """Return whether the value of ``node`` is a tensor whose sizes do not depend on values."""
    # Imported late: it imports sympy.
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    example: Any = node.meta.get("val")
    return isinstance(example, Tensor) and not free_unbacked_symbols(example)
