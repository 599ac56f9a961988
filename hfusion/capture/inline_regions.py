"""Inline the regions of an exported graph that set the grad mode or autocast."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.capture.dynamic_sizes import original
from hfusion.capture.fallback_runtime import calls
from hfusion.core.errors import FusionError
from hfusion.ops.random import LIKE
from hfusion.passes.islands import OPAQUE
from hfusion.passes.out_arguments import out_arguments, without_out
from hfusion.passes.views import handed_back, writes
from hfusion.torch_private.autocast import enter_autocast, exit_autocast
from hfusion.torch_private.operator_tables import HigherOrderOperator

aten = torch.ops.aten

# In-place dropouts and their functional forms, which replace them where nothing is dropped, and so nothing written.
_DROPOUTS = {
    aten.dropout_.default: aten.dropout.default,
    aten.feature_dropout_.default: aten.feature_dropout.default,
    aten.alpha_dropout_.default: aten.alpha_dropout.default,
    aten.feature_alpha_dropout_.default: aten.feature_alpha_dropout.default,
}


def inlined(module: fx.GraphModule, trained: Collection[str]) -> fx.Graph:
    """Return the graph of ``module`` with its regions inlined; ``trained`` names the values that may need a gradient.

    Where gradients are off, a call takes its operands detached. One that returns its operand itself (a dropout that
    drops nothing, ``contiguous``, ``to``) returns it with its history, as the code does.
    """
    inliner = _Inliner(fx.Graph(), frozenset(trained))
    inliner.graph.output(tuple(inliner.inline(module, None, enabled=True)))
    return inliner.graph


@dataclass(frozen=True, eq=False)
class _Inliner:
    """Copies nodes to ``graph``. ``attached``: nodes with a possible gradient; ``detached``: their detached copies."""

    graph: fx.Graph
    trained: frozenset[str]
    attached: set[fx.Node] = field(default_factory=set)
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def inline(self, module: fx.GraphModule, inputs: Sequence[Any] | None, enabled: bool) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        operands = iter(inputs or ())
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._placeholder(node) if inputs is None else next(operands)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
            elif node.op == "output":
                outputs = node.args[0]
                results = outputs if isinstance(outputs, list | tuple) else [outputs]
                return [env[r] if isinstance(r, fx.Node) else r for r in results]
            elif isinstance(node.target, HigherOrderOperator):
                env[node] = self._region(node, env, enabled)
            elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._call(node, env, enabled)
        raise FusionError("a captured region has no output")

    def _placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node)
        if node.name in self.trained:
            self.attached.add(new)
        return new

    def _region(self, node: fx.Node, env: Mapping[fx.Node, Any], enabled: bool) -> list[Any]:
        name = str(node.target)
        args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
        if name == "wrap_with_set_grad_enabled":
            inside, body, *operands = args
            return self.inline(body, operands, inside)
        if name == "wrap_with_autocast":
            device, dtype, active, cache, body, *operands = args
            token = self.graph.call_function(enter_autocast, (device, dtype, active, cache))
            outputs = self.inline(body, operands, enabled)
            self.graph.call_function(exit_autocast, (token,))
            return outputs
        raise FusionError(
            f"forward uses {name}, a control flow that hfusion does not fuse: use torch.where, or call it in a "
            "submodule, which then runs member by member"
        )

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Any], enabled: bool) -> Any:
        new = self.graph.node_copy(node, lambda n: env[n])
        new.target = original(node.target)
        if out_arguments(new.target):
            return self._copied_out(new, enabled)
        if new.target in _DROPOUTS:
            in_place, new.target = new.target, _DROPOUTS[new.target]
            if handed_back(new) is None:
                new.target = in_place
        return self._attach(new, enabled)

    def _copied_out(self, call: fx.Node, enabled: bool) -> Any:
        """Replace an ``out=`` call by its functional form, and copy the results into the ``out`` tensors."""
        functional, tensors = without_out(self.graph, call)
        self.graph.erase_node(call)
        self._attach(functional, enabled)
        copied = []
        for k, tensor in enumerate(tensors):
            result = functional
            if len(tensors) > 1:
                result = self.graph.call_function(operator.getitem, (functional, k))
                result.meta["val"] = functional.meta["val"][k]
                self._attach(result, enabled)
            copy = self.graph.call_function(aten.copy_.default, (tensor, result))
            copy.meta.update(functional.meta | {"val": tensor.meta["val"]})
            copied.append(self._attach(copy, enabled))
        return copied if len(tensors) > 1 else copied[0]

    def _attach(self, new: fx.Node, enabled: bool) -> fx.Node:
        """Detach the operands of a call where gradients are off; returns the node for its result."""
        reached = any(operand in self.attached for operand in new.all_input_nodes)
        if not reached or enabled or new.target is operator.getitem:
            keeps = new.target not in LIKE
        else:
            keeps = handed_back(new) in self.attached or _gives_attached(new)
        if keeps:
            if reached:
                self.attached.add(new)
            return new
        written = new.args[0] if writes(new) else None
        self._detach_operands(new)
        # An in-place operator returns its operand, which keeps its history.
        return written if isinstance(written, fx.Node) and written in self.attached else new

    def _detach_operands(self, call: fx.Node) -> None:
        with self.graph.inserting_before(call):
            for operand in call.all_input_nodes:
                call.replace_input_with(operand, self._without_history(operand))

    def _without_history(self, operand: fx.Node) -> fx.Node:
        if operand not in self.attached or not isinstance(operand.meta.get("val"), Tensor):
            return operand
        if operand not in self.detached:
            node = self.graph.call_function(aten.detach.default, (operand,))
            node.meta["val"] = operand.meta["val"]
            self.detached[operand] = node
        return self.detached[operand]


def _gives_attached(call: fx.Node) -> bool:
    """Return whether ``call`` is an eager fallback whose results need a gradient although gradients are off."""
    return call.target is OPAQUE and calls[call.args[3]].attached  # type: ignore[index]
