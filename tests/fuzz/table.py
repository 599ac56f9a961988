"""Rows of the tables of pieces."""

from __future__ import annotations

from typing import Any

from tests.fuzz.program import Piece


def piece(
    name: str, kinds: str, code: str = "{o} = {s}({0})", *, module: str = "", init: str = "", **more: Any
) -> Piece:
    """``kinds`` reads ``takes->gives``; other keywords than fields of `Piece` are placeholders and choices, ``a|b``."""
    takes, gives = (tuple(filter(None, part.split(","))) for part in kinds.split("->"))
    flags = {name: more.pop(name) for name in ("view", "writes", "island") if name in more}
    choices = {key: tuple(text.split("|")) for key, text in more.items()}
    return Piece(name, takes, gives, code, module, init, choices, **flags)
