"""All pieces, by group; a group is drawn first, then one of its pieces."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.pieces_code import ATTRIBUTES, CONDITIONS, FUNCTIONS, METADATA, REDUCTIONS, SHAPES, VIEWS, WRITES
from tests.fuzz.pieces_modules import ACTIVATIONS, ISLANDS, LAYERS, STATE
from tests.fuzz.program import Piece

GROUPS: Mapping[str, tuple[Piece, ...]] = {
    "layers": LAYERS,
    "activations": ACTIVATIONS,
    "functions": FUNCTIONS,
    "reductions": REDUCTIONS,
    "shapes": SHAPES,
    "views": VIEWS,
    "writes": WRITES,
    "state": STATE,
    "islands": ISLANDS,
    "metadata": METADATA,
    "conditions": CONDITIONS,
    "attributes": ATTRIBUTES,
}
WEIGHTS: Mapping[str, int] = {
    "layers": 26,
    "activations": 10,
    "functions": 16,
    "reductions": 9,
    "shapes": 14,
    "views": 8,
    "writes": 10,
    "state": 6,
    "islands": 2,
    "metadata": 2,
    "conditions": 2,
    "attributes": 3,
}
