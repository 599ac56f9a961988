"""No file is longer than a reader takes in at once, and a page lists every file with what it does."""

from __future__ import annotations

import ast
import re

from tests.test_names import ROOT, files

MAX_LINES = 700


def test_no_file_is_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} == set()


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
