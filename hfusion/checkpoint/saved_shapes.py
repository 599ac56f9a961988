"""Shapes of members' own tensors in a save, where members differ in submodules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hfusion.checkpoint.files import Saved
from hfusion.core.row_indices import cut_rows

OwnShapes = Mapping[str, Sequence[Sequence[int] | None]]
"""By the key of a tensor, its shape in each member; None where a member has no such tensor."""


def saved_shapes(saved: Saved, places: Sequence[int]) -> OwnShapes:
    """Return the shapes of the tensors in which members of a save differ, for the members at ``places``."""
    shapes: OwnShapes = saved.body["module"].get("shapes", {})
    return {name: [own[place] for place in places] for name, own in shapes.items()}


def held_names(saved: Saved, places: Sequence[int]) -> set[str]:
    """Return the keys of the tensors that at least one of the members at ``places`` has."""
    missing = {name for name, own in saved_shapes(saved, places).items() if all(shape is None for shape in own)}
    return set(saved.body["module"]["stacked"]) - missing


def differing(shapes: OwnShapes) -> OwnShapes:
    """Return the entries of tensors whose shape differs between members."""
    return {name: own for name, own in shapes.items() if any(shape != own[0] for shape in own)}


def cut_to_members(rows: Tensor, shapes: OwnShapes, name: str) -> Tensor:
    """Cut rows of a tensor, or of its optimizer state, to the largest shape of the members in ``shapes``."""
    own = [shape for shape in shapes.get(name, ()) if shape is not None]
    return cut_rows(rows, list(map(max, zip(*own, strict=True)))) if own else rows
