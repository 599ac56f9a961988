"""Build one graph for members with the same operators, or raise an error that names the member that differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import TreeSpec

from hfusion.capture.python_differences import differing_attributes
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.program import Capture, Kind, Slot
from hfusion.passes.align import align

# Largest number of models per group whose attributes are compared with another group.
_COMPARED = 8
# Largest number of members that a message names.
_NAMED = 6


@dataclass(frozen=True, eq=False)
class CommonGraph:
    """The graph of all members of an array.

    Attributes:
        slots: the slots of the placeholders.
        constants: the constants that the graph holds.
        differing: the names of the constants that differ between members and are stacked.
    """

    graph: fx.Graph
    slots: tuple[Slot, ...]
    constants: dict[str, Tensor]
    differing: frozenset[str]


def common_graph(
    captures: Sequence[Capture],
    variants: Sequence[int],
    name: str,
    member: Callable[[int], nn.Module],
) -> CommonGraph:
    """Combine the graphs of all variants of an array into one.

    Args:
        member: ``member(b)`` returns member b.

    Raises:
        ForwardsDiffer: members do different things; the message names the attributes in which they differ.
    """
    if len(captures) == 1:
        # Cached programs must not keep the user's tensors alive, so they hold aliases of them.
        constants = {name: tensor.detach() for name, tensor in captures[0].constants.items()}
        return CommonGraph(captures[0].graph, captures[0].slots, constants, frozenset())
    try:
        graph = _aligned(captures, variants)
        return CommonGraph(graph, captures[0].slots, *_constants(captures, variants))
    except FusionError as error:
        groups = _alike(captures)
        if len(groups) == 1:
            raise
        rows = [tuple(row for row, variant in enumerate(variants) if variant in group) for group in groups]
        first_models, second_models = (
            [member(variants.index(variant)) for variant in group[:_COMPARED]] for group in groups[:2]
        )
        attributes = differing_attributes(first_models, second_models, (f"model {rows[0][0]}", f"model {rows[1][0]}"))
        raise ForwardsDiffer(
            f"the models of {name} do different things in forward: "
            + (f"{attributes}; " if attributes else "")
            + f"{error}. Fuse {' and '.join(map(_named, rows))} by themselves, or make them equal; "
            "hf.Population, hf.train and hf.sweep make an array of each",
            tuple(rows),
        ) from error


def _aligned(captures: Sequence[Capture], variants: Sequence[int]) -> fx.Graph:
    """Return the common graph. Raises FusionError if members do different things."""
    first = captures[0]
    graph = align([capture.graph for capture in captures], variants)
    for variant, capture in enumerate(captures):
        model = variants.index(variant)
        for attribute in ("out_spec", "modes", "slots"):
            reference, other = getattr(first, attribute), getattr(capture, attribute)
            if reference != other:
                words = {"out_spec": "returns", "modes": "sets train and eval modes", "slots": "reads"}[attribute]
                raise FusionError(
                    f"forward {words} {_shown(reference)} in model 0 and {_shown(other)} in model {model}"
                )
        for name, (reference, other) in _sizes(first, capture):
            if reference != other:
                raise FusionError(f"{name} has shape {reference} in model 0 and {other} in model {model}")
        for name, tensor in first.constants.items():
            kinds = [f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (tensor, capture.constants[name])]
            if kinds[0] != kinds[1]:
                raise FusionError(f"the tensor {name} is {kinds[0]} in model 0, {kinds[1]} in model {model}")
    return graph


def _constants(captures: Sequence[Capture], variants: Sequence[int]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return the constants of the captures, stacked per member if they differ, and the names of the stacked ones."""
    constants, differing = {}, set()
    for name, tensor in captures[0].constants.items():
        rows = [c.constants[name] for c in captures]
        if all(torch.equal(row, tensor) for row in rows):
            constants[name] = tensor.detach()
        else:
            constants[name] = torch.stack([rows[v] for v in variants]).detach()
            differing.add(name)
    return constants, frozenset(differing)


def _sizes(first: Capture, capture: Capture) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """Yield the key of each parameter and buffer, with its shapes in two captures."""
    columns = [capture.graph.find_nodes(op="placeholder") for capture in (first, capture)]
    for slot, *nodes in zip(first.slots, *columns, strict=True):
        if slot.kind in (Kind.PARAMETER, Kind.BUFFER):
            first_shape, shape = (tuple(node.meta["val"].shape) for node in nodes)
            yield slot.name, (first_shape, shape)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, TreeSpec) and value.is_leaf() else " ".join(str(value).split())


def _alike(captures: Sequence[Capture]) -> list[list[int]]:
    """Group variants that run the same operators, in the order of the first variant of each group."""
    groups: list[list[int]] = []
    for variant, capture in enumerate(captures):
        for group in groups:
            try:
                _aligned([captures[group[0]], capture], (0, 1))
            except FusionError:
                continue
            group.append(variant)
            break
        else:
            groups.append([variant])
    return groups


def _named(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_NAMED])) + (", ..." if len(rows) > _NAMED else "")
    return f"model{'s' if len(rows) > 1 else ''} {shown}"
