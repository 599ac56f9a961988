"""One name, one class: whoever reads or searches for it finds one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("hfusion", "ops", "passes")


def files() -> list[Path]:
    """The package's, each once: ``hfusion/ops`` and ``hfusion/passes`` are links."""
    return sorted({path.resolve() for room in ROOMS for path in (ROOT / room).rglob("*.py")})


def test_no_class_name_stands_for_two_classes() -> None:
    places = defaultdict(list)
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name.lstrip("_")].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
