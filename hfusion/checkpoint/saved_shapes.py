"""Shapes of members' own tensors in a save, where members differ in submodules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hfusion.checkpoint.files import Saved
from hfusion.core.row_indices import cut_rows

OwnShapes = Mapping[str, Sequence[Sequence[int] | None]]
"""By the key of a tensor, its shape in each member; None where a member has no such tensor."""


def saved_shapes(saved: Saved, places: Sequence[int]) -> OwnShapes:
    """The shapes in the members at ``places`` of a save, of the tensors in which its members differ."""
    shapes: OwnShapes = saved.body["module"].get("shapes", {})
    return {name: [own[place] for place in places] for name, own in shapes.items()}


def held_names(saved: Saved, places: Sequence[int]) -> set[str]:
    """The keys of the tensors that at least one of the members at ``places`` has."""
    missing = {name for name, own in saved_shapes(saved, places).items() if all(shape is None for shape in own)}
    return set(saved.body["module"]["stacked"]) - missing


def differing(shapes: OwnShapes) -> OwnShapes:
    """Those of tensors that are there, and differ between members."""
    return {name: own for name, own in shapes.items() if any(shape != own[0] for shape in own)}


def cut_to_members(rows: Tensor, shapes: OwnShapes, name: str) -> Tensor:
    """Rows of a tensor, or of a state of it, without what only larger members of the save fill."""
    own = [shape for shape in shapes.get(name, ()) if shape is not None]
    return cut_rows(rows, list(map(max, zip(*own, strict=True)))) if own else rows
