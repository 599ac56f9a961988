"""Whether a program that inductor compiled computes what its graph says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.program import describe_value
from hfusion.step.step_graph import StepGraph


class ByOperator(fx.Interpreter):
    """Runs a graph of the compiler's, to whom the strides in memory that a view asks for do not matter."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if target in views else target, args, kwargs)


def disagreement(graph: StepGraph, given: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """The first result of a step that is another than by its graph, beyond rounding, in words; empty if there is none.

    Sums are rounded in another order in a program, and a ReLU at zero may be on its other side: so what counts is the
    norm of the difference. By as much as the cube root of a dtype's rounding, 0.5% in float32, it differs by a mistake
    only; but for gradients of nothing but rounding, as of a bias before a BatchNorm, beside the largest.
    """
    rounding = max(_rounding(node.meta.get("val")) for node in graph.module.graph.nodes)
    largest = max((_norm(tensor) for tensor in expected[1 : 1 + len(graph.trained)]), default=0.0)
    least = max(largest, 1.0) * rounding ** (2 / 3)
    for name, one, other in zip(result_names(graph, len(given)), given, expected, strict=True):
        if one.numel() and torch.isfinite(other).all():
            wide = torch.complex128 if other.is_complex() else torch.float64
            norm, apart = _norm(other), _norm(one.to(wide) - other.to(wide))
            if not apart <= max(norm * rounding ** (1 / 3), least):
                return f"{name}, {describe_value(other, None, 0)} of norm {norm:.3g}, differs by {apart:.3g}"
    return ""


def result_names(graph: StepGraph, count: int) -> list[str]:
    """What the losses, gradients and written tensors that a step gives are called in messages."""
    names = ["the losses", *(f"the gradient of tensor {k}" for k in graph.trained)]
    return [*names, *(f"tensor {k} after it" for k in range(count - len(names)))]


def _rounding(value: object) -> float:
    """The relative rounding of a tensor of floating-point numbers; of others none."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return torch.finfo(value.dtype).eps


def _norm(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor if tensor.is_floating_point() else tensor.to(torch.complex128)))
