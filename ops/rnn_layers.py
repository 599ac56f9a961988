"""The parts that all computations of recurrent layers share: layers and directions, and the loop over members."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.core.layout import Listed
from hfusion.ops.random import dropout_stacked
from hfusion.ops.rule import call_per_member

aten = torch.ops.aten

Layer: TypeAlias = Callable[[bool, Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""From ``reverse``, inputs, first states and weights of a layer in one direction: ``[B, T, N, H]``, and last states."""


def through_layers(
    layer: Layer,
    members: int,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    options: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """Compute all layers and directions, with dropout between layers; arguments as of torch's operators."""
    directions, count = (2 if options["bidirectional"] else 1), (4 if options["has_biases"] else 2)
    values = x.transpose(-3, -2) if options["batch_first"] else x
    lasts: list[list[Tensor]] = [[] for _ in states]
    for index in range(options["num_layers"]):
        outputs: list[Tensor] = []
        for position in range(index * directions, (index + 1) * directions):
            first, layer_weights = (
                [state.select(-3, position) for state in states],
                weights[count * position : count * (position + 1)],
            )
            output, *after = layer(position % directions == 1, values, first, layer_weights)
            outputs.append(output)
            for column, state in zip(lasts, after, strict=True):
                column.append(state)
        values = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if options["dropout"] and options["train"] and index + 1 < options["num_layers"]:
            values = dropout_stacked(values, float(options["dropout"]), members, False, False)
    y = values.transpose(-3, -2) if options["batch_first"] else values
    return y, *(torch.stack(column, 1) for column in lasts)


def run_per_member(
    kind: str, members: int, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Compute the layers by torch's own operator, member by member."""
    params = [Listed(weight.unbind()) for weight in weights]
    member_x, *member_states = (tensor if tensor.dim() == 3 else Listed(tensor.unbind()) for tensor in (x, *states))
    target = getattr(aten, kind).input
    rows = call_per_member(
        target,
        members,
        (member_x, member_states if kind == "lstm" else member_states[0], params, *options.values()),
        {},
    )
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def has_all_weights(params: Sequence[object], options: Mapping[str, Any]) -> bool:
    """Return whether each layer and direction has its two matrices, its biases if there are any, and no projection."""
    per_layer = (4 if options["has_biases"] else 2) * (2 if options["bidirectional"] else 1)
    layers: int = options["num_layers"]
    return len(params) == per_layer * layers


def differentiable_gradients(
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the inputs, of which higher derivatives can be taken; None where ``needs_grad`` is False.

    Args:
        results: computed from ``inputs`` by torch's operators.
        grads: the gradient of each result, None where it has none.
    """
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    required_inputs = [
        tensor for tensor, required in zip(inputs, needs_grad, strict=True) if required and tensor is not None
    ]
    outputs, seeds = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outputs, required_inputs, seeds, create_graph=True, allow_unused=True))
    return [next(gradients) if required else None for required in needs_grad]
