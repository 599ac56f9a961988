"""Shapes of members' own tensors in a save, where members differ in submodules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from hfusion.checkpoint.files import Saved
from hfusion.core.row_indices import cut_rows

OwnShapes = Mapping[str, Sequence[Sequence[int] | None]]
"""By the key of a tensor, its shape in each member; None where a member has no such tensor."""


def saved_shapes(saved: Saved, indices: Sequence[int]) -> OwnShapes:
    """Return the shapes of the tensors in which members of a save differ, for the members at ``indices``."""
    shapes: OwnShapes = saved.body["module"].get("shapes", {})
    return {name: [member_shapes[index] for index in indices] for name, member_shapes in shapes.items()}


def held_names(saved: Saved, indices: Sequence[int]) -> set[str]:
    """Return the keys of the tensors that at least one of the members at ``indices`` has."""
    missing = {
        name
        for name, member_shapes in saved_shapes(saved, indices).items()
        if all(shape is None for shape in member_shapes)
    }
    return set(saved.body["module"]["stacked"]) - missing


def differing(shapes: OwnShapes) -> OwnShapes:
    """Return the entries of tensors whose shape differs between members."""
    return {
        name: member_shapes
        for name, member_shapes in shapes.items()
        if any(shape != member_shapes[0] for shape in member_shapes)
    }


def cut_to_members(rows: Tensor, shapes: OwnShapes, name: str) -> Tensor:
    """Cut rows of a tensor, or of its optimizer state, to the largest shape of the members in ``shapes``."""
    member_shapes = [shape for shape in shapes.get(name, ()) if shape is not None]
    return cut_rows(rows, list(map(max, zip(*member_shapes, strict=True)))) if member_shapes else rows
