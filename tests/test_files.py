"""No file is longer than a reader takes in at once."""

from __future__ import annotations

from tests.test_names import ROOT, files

MAX_LINES = 400


def test_no_file_is_long() -> None:
    lengths = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in files()}
    assert {name for name, length in lengths.items() if length > MAX_LINES} == set()
