"""Files, names and rooms of the package, and the page that lists them."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import tomllib
from collections import Counter, defaultdict
from pathlib import Path

# One name, one class: whoever reads or searches for it finds one thing.
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


# No file is longer than a reader takes in at once, and a page lists every file with what it does.
MAX_LINES = 700
# A room that has shrunk by more than this share of its line in pyproject.toml gets a lower one.
ROOM_TO_GROW = 0.05


def test_no_file_is_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} == set()


def test_code_in_c_is_installed() -> None:
    package = ROOT / "hfusion"
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["hfusion"]
    sources = [path.relative_to(package) for kind in ("*.c", "*.h") for path in package.rglob(kind)]
    assert [path for path in sources if not any(path.match(pattern) for pattern in patterns)] == []


def test_every_file_begins_with_what_it_does() -> None:
    first_lines = {path: (ast.get_docstring(ast.parse(path.read_text())) or "").partition("\n")[0] for path in files()}
    assert [path for path, line in first_lines.items() if not line.endswith((".", ":"))] == []


def test_every_folder_is_on_the_page_of_the_code() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in files()} - {"hfusion"}
    # A folder within a room is named in the row of the room.
    named = set(re.findall(r"`([\w/]+)/`", text))
    assert [name for name in folders if not named & {name, name.rpartition("/")[2]}] == []
    listed = re.findall(r"^```{file-table} (\S+)$", text, re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert folders ^ (set(listed) - {"hfusion"}) == set()


def lines_of_code(source: str) -> int:
    """Return the number of lines without docstrings, comments and blank lines."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            first = node.body[0] if node.body else None
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                documented.update(range(first.lineno, (first.end_lineno or 0) + 1))
    no_code = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in no_code:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - documented)


def room_of(path: Path) -> str:
    """Return the folder of the package that a file is in; ``front`` for files beside the folders."""
    parts = path.relative_to(ROOT).parts
    inside = parts[1:] if parts[0] == "hfusion" else parts
    return inside[0] if len(inside) > 1 else "front"


LIMITS: dict[str, int] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hfusion"]["rooms"]


def test_no_room_outgrows_its_line() -> None:
    """A room that needs more lines raises its line in the same commit, whose body says why."""
    sizes = Counter[str]()
    for path in files():
        sizes[room_of(path)] += lines_of_code(path.read_text())
    assert sizes.keys() == LIMITS.keys()
    outgrown = {room: (lines, LIMITS[room]) for room, lines in sizes.items() if lines > LIMITS[room]}
    assert outgrown == {}, "raise the line of the room in [tool.hfusion.rooms] of pyproject.toml, and say why"
    generous = {
        room: (lines, LIMITS[room]) for room, lines in sizes.items() if lines < (1 - ROOM_TO_GROW) * LIMITS[room]
    }
    assert generous == {}, "lower the line of the room"
