from __future__ import annotations

import io

import pytest
from rich.console import Console

from hfusion.core.progress_output import Tenths, redraws


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, False), ({"force_terminal": True}, True), ({"force_terminal": True, "_environ": {"TERM": "dumb"}}, False)],
    ids=["file", "terminal", "dumb"],
)
def test_only_terminals_are_drawn_over(options: dict[str, object], expected: bool) -> None:
    assert redraws(Console(file=io.StringIO(), **options)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("total", "begun", "lines"), [(1000, 0, 10), (3, 0, 3), (1000, 550, 5), (0, 0, 0), (10, 10, 0)]
)
def test_there_is_a_line_for_every_tenth(total: int, begun: int, lines: int) -> None:
    tenths = Tenths(begun, total)
    assert sum(tenths.reached(done, total) for done in range(begun + 1, total + 1)) == lines
