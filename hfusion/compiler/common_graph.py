"""One graph for members that do the same, and an error that names who does not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn
from torch.utils._pytree import TreeSpec

from hfusion.capture.differences import differing_attributes
from hfusion.core.errors import ForwardsDiffer, FusionError
from hfusion.core.program import Capture
from hfusion.passes.align import align

# Models of a group that are compared with those of another one.
_COMPARED = 8
# Members that a message names.
_NAMED = 6


def common_graph(
    captures: Sequence[Capture], variants: Sequence[int], name: str, member: Callable[[int], nn.Module]
) -> fx.Graph:
    """Lay the graphs of all variants of an array over one another; ``member(b)`` gives member b.

    Raises:
        ForwardsDiffer: members that do different things, with the attributes in which they differ.
    """
    try:
        return _aligned(captures, variants)
    except FusionError as error:
        groups = _alike(captures)
        if len(groups) == 1:
            raise
        rows = [tuple(row for row, variant in enumerate(variants) if variant in group) for group in groups]
        ours, theirs = ([member(variants.index(variant)) for variant in group[:_COMPARED]] for group in groups[:2])
        attributes = differing_attributes(ours, theirs, (f"model {rows[0][0]}", f"model {rows[1][0]}"))
        raise ForwardsDiffer(
            f"the models of {name} do different things in forward: "
            + (f"{attributes}; " if attributes else "")
            + f"{error}. Fuse {' and '.join(map(_named, rows))} by themselves, or make them equal; "
            "hf.train and hf.sweep make an array of each",
            tuple(rows),
        ) from error


def _aligned(captures: Sequence[Capture], variants: Sequence[int]) -> fx.Graph:
    """Raises FusionError for members that do different things."""
    first = captures[0]
    graph = align([capture.graph for capture in captures], variants)
    for variant, capture in enumerate(captures):
        model = variants.index(variant)
        for what in ("out_spec", "modes", "slots"):
            mine, other = getattr(first, what), getattr(capture, what)
            if mine != other:
                words = {"out_spec": "returns", "modes": "sets train and eval modes", "slots": "reads"}[what]
                raise FusionError(f"forward {words} {_shown(mine)} in model 0 and {_shown(other)} in model {model}")
        for name, tensor in first.constants.items():
            kinds = [f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (tensor, capture.constants[name])]
            if kinds[0] != kinds[1]:
                raise FusionError(f"the tensor {name} is {kinds[0]} in model 0, {kinds[1]} in model {model}")
    return graph


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, TreeSpec) and value.is_leaf() else " ".join(str(value).split())


def _alike(captures: Sequence[Capture]) -> list[list[int]]:
    """Which variants do the same, in the order of their first ones."""
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
