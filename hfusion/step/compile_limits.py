"""Limits of compiled steps: too many operators, operators that Inductor cannot call, sizes that vary."""

from __future__ import annotations

import torch

from hfusion.compiler.arguments import BATCHED
from hfusion.compiler.bound_program import BoundProgram
from hfusion.step.step_graph import StepCall, StepGraph, captured_dims

# The most operators of one program: Inductor takes about 0.1 s per operator on two cores.
MAX_OPERATORS = 4000
# In training, oneDNN's kernel returns an undefined tensor, on which Inductor's code fails when it runs.
_NOT_COMPILED = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})


class Unprofitable(Exception):
    """A step should not be compiled, because it does not pay or would fail; the message gives the reason."""


class TooManyOperators(Unprofitable):
    """A program has too many operators; a program for fewer members may have few enough."""


def check_open(graph: StepGraph, forward: BoundProgram, loss: BoundProgram, call: StepCall) -> None:
    """Raise Unprofitable if sizes other than the batch size vary between calls, but the program would fix one."""
    dynamic_dims = captured_dims(forward, loss, call)
    # If only the target's sizes vary, the other sizes may come from other arrays that use the same loss.
    if not any(dims - {0} for dims in dynamic_dims[: sum(isinstance(leaf, BATCHED) for leaf in call.inputs.leaves)]):
        return
    rows = zip(dynamic_dims, call.stacked, graph.dims, strict=True)
    specialized = [
        f"dim {dim} of {call.batch()[k].dtype} {list(call.batch()[k].shape)}"
        for k, (dims, stacked, remaining) in enumerate(rows)
        for dim in sorted(dim + stacked for dim in dims if dim)
        if dim not in remaining
    ]
    if specialized:
        raise Unprofitable(
            f"its sizes vary, and a program would hold for one size only of {' and of '.join(specialized)}, "
            "which an operator needs to know"
        )


def check_operators(graph: StepGraph) -> None:
    operators = graph.operators
    refused = sorted(str(operator) for operator in _NOT_COMPILED & set(operators))
    if refused:
        raise Unprofitable(f"inductor cannot call {', '.join(refused)}, by which recurrent layers run")
    if len(operators) > MAX_OPERATORS:
        raise TooManyOperators(f"the step has {len(operators)} operators, and compilation pays up to {MAX_OPERATORS}")
