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

# Inputs off by their rounding that are tried: of a value that rounds to either side of zero about half change its side.
_NEARBY = 12
# By what power of their dtype's rounding: 54 roundings of float32, 3 of bfloat16. Of a small CNN, 8 roundings moved no
# ReLU over zero at which a program was on the other side, as that has another way to normalize a batch.
_OFF = 3 / 4
# Of what the graph itself gives: what a program may give.
_AS_MUCH = 2.0


class ByOperator(fx.Interpreter):
    """Runs a graph of the compiler's, to whom the strides in memory that a view asks for do not matter."""

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
    """``tensor`` with dims in the order of memory that those of ``example`` have."""
    strides = [hint(stride) or 0 for stride in example.stride()]
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def disagreement(
    graph: StepGraph, given: Sequence[Tensor], expected: Sequence[Tensor], nearby: Callable[[], Sequence[Tensor]]
) -> str:
    """The first result of a step that is another than by its graph, beyond rounding, in words; empty if there is none.

    Sums are rounded in another order in a program, and a ReLU at zero may be on its other side: so what counts is the
    norm of the difference. By as much as the cube root of a dtype's rounding, 0.5% in float32, it differs by a mistake
    only; but for gradients of nothing but rounding, as of a bias before a BatchNorm, beside the largest, and where the
    graph itself gives others by as much for inputs that are off by their rounding, as by the one ReLU of few.
    ``nearby``: what it gives for other such inputs at each call.
    """
    rounding = max(_rounding(node.meta.get("val")) for node in graph.module.graph.nodes)
    largest = max((norm(tensor) for tensor in expected[1 : 1 + len(graph.trained)]), default=0.0)
    least = max(largest, 1.0) * rounding ** (2 / 3)
    apart = [_apart(one, other) for one, other in zip(given, expected, strict=True)]
    norms = list(map(norm, expected))
    suspects = [k for k, size in enumerate(norms) if not apart[k] <= max(size * rounding ** (1 / 3), least)]
    if not suspects:
        return ""
    moved = dict.fromkeys(suspects, 0.0)
    for _ in range(_NEARBY):
        other = nearby()
        moved = {k: max(most, _apart(other[k], expected[k])) for k, most in moved.items()}
    names = result_names(graph, len(given))
    for k, most in moved.items():
        if not apart[k] <= _AS_MUCH * most:
            kind = describe_value(expected[k], None, 0)
            return f"{names[k]}, {kind} of norm {norms[k]:.3g}, differs by {apart[k]:.3g}"
    return ""


def shaken(tensors: Sequence[Tensor], generator: torch.Generator) -> list[Tensor]:
    """Each of its numbers off by some of its rounding; a zero stays one."""
    return [_shaken(tensor.detach(), _rounding(tensor) ** _OFF, generator) for tensor in tensors]


def _shaken(tensor: Tensor, most: float, generator: torch.Generator) -> Tensor:
    if not most:
        return tensor
    off = 2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator, device="cpu") - 1
    return (tensor.cpu() * (1 + most * off)).to(tensor.device, tensor.dtype)


def _apart(one: Tensor, other: Tensor) -> float:
    """The norm of the difference; 0 where the second has none to compare with."""
    if one is other or not (one.numel() and torch.isfinite(other).all()):
        return 0.0
    return distance(one, other)


def result_names(graph: StepGraph, count: int) -> list[str]:
    """Return the names of a step's losses, gradients and written tensors for messages."""
    names = ["the losses", *(f"the gradient of tensor {k}" for k in graph.trained)]
    return [*names, *(f"tensor {k} after it" for k in range(count - len(names)))]


def _rounding(value: object) -> float:
    """The relative rounding of a tensor of floating-point numbers; of others none."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return torch.finfo(value.dtype).eps
