"""Check that a program compiled by Inductor computes the same as its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.differences import distance, norm
from hfusion.core.program import describe_value
from hfusion.ops.rule import hint
from hfusion.step.step_graph import StepGraph

# Perturbed inputs that are tried. A value that rounds to either side of zero changes its sign in about half of them.
_NEARBY = 12
# Inputs are perturbed by this power of the dtype's eps: 54 eps of float32, 3 of bfloat16. In a small CNN, whose program
# normalizes a batch differently, 8 eps were too few to flip a ReLU at zero that the program had flipped.
_OFF = 3 / 4
# A program may differ by this multiple of what the perturbed inputs change in the graph's own results.
_AS_MUCH = 2.0


class ByOperator(fx.Interpreter):
    """Interprets a graph for Inductor. Views become reshapes: Inductor ignores the strides that a view requires."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if target in views else target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run a node. Operators that need exact strides get operands in the memory order of the trace."""
        if torch.Tag.needs_exact_strides not in getattr(n.target, "tags", ()):
            return super().run_node(n)
        before = {operand: self.env[operand] for operand in n.all_input_nodes}
        self.env |= {
            operand: _in_order(value, operand.meta["val"]) if isinstance(value, Tensor) else value
            for operand, value in before.items()
        }
        try:
            return super().run_node(n)
        finally:
            self.env |= before


def _in_order(tensor: Tensor, example: Tensor) -> Tensor:
    """Return ``tensor`` with its dims in the same memory order as those of ``example``."""
    strides = [hint(stride) or 0 for stride in example.stride()]
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def disagreement(
    graph: StepGraph, actual: Sequence[Tensor], expected: Sequence[Tensor], nearby: Callable[[], Sequence[Tensor]]
) -> str:
    """Describe the first result that differs from the graph's by more than rounding; empty if there is none.

    A program sums in another order, and may flip a ReLU at zero, so norms of differences are compared. A relative
    difference above the cube root of eps, 0.5% in float32, indicates an error, with two exceptions. Gradients that
    consist of rounding errors only, such as that of a bias before a BatchNorm, are compared with the largest gradient.
    And a result may differ as much as the graph's own result changes if its inputs are perturbed by rounding.

    Args:
        actual: results of the compiled program: losses, gradients, written tensors.
        expected: results of the graph for the same inputs.
        nearby: returns the graph's results for freshly perturbed inputs at each call.
    """
    rounding = max(_rounding(node.meta.get("val")) for node in graph.module.graph.nodes)
    largest = max((norm(tensor) for tensor in expected[1 : 1 + len(graph.trained)]), default=0.0)
    least = max(largest, 1.0) * rounding ** (2 / 3)
    distances = [_apart(result, other) for result, other in zip(actual, expected, strict=True)]
    norms = list(map(norm, expected))
    suspects = [k for k, size in enumerate(norms) if not distances[k] <= max(size * rounding ** (1 / 3), least)]
    if not suspects:
        return ""
    moved = dict.fromkeys(suspects, 0.0)
    for _ in range(_NEARBY):
        other = nearby()
        moved = {k: max(most, _apart(other[k], expected[k])) for k, most in moved.items()}
    names = result_names(graph, len(actual))
    for k, most in moved.items():
        if not distances[k] <= _AS_MUCH * most:
            kind = describe_value(expected[k], None, 0)
            return f"{names[k]}, {kind} of norm {norms[k]:.3g}, differs by {distances[k]:.3g}"
    return ""


def shaken(tensors: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Return ``tensors`` with each number changed randomly by a few eps of its dtype; zeros stay zeros."""
    return [_shaken(tensor.detach(), _rounding(tensor) ** _OFF, generator) for tensor in tensors]


def _shaken(tensor: Tensor, most: float, generator: torch.Generator) -> Tensor:
    if not most:
        return tensor
    noise = 2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator, device="cpu") - 1
    return (tensor.cpu() * (1 + most * noise)).to(tensor.device, tensor.dtype)


def _apart(tensor: Tensor, reference: Tensor) -> float:
    """Return the norm of the difference; 0 if the tensors are empty or ``reference`` is not finite."""
    if tensor is reference or not (tensor.numel() and torch.isfinite(reference).all()):
        return 0.0
    return distance(tensor, reference)


def result_names(graph: StepGraph, count: int) -> list[str]:
    """Return the names of a step's losses, gradients and written tensors for messages."""
    names = ["the losses", *(f"the gradient of tensor {k}" for k in graph.trained)]
    return [*names, *(f"tensor {k} after it" for k in range(count - len(names)))]


def _rounding(value: object) -> float:
    """Return eps of the dtype of a floating-point or complex tensor; 0 for everything else."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return torch.finfo(value.dtype).eps
