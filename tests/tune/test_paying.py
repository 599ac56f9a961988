"""The width of an array follows what its epochs took."""

from __future__ import annotations

import itertools

import pytest

from hfusion.tune.paying import PayingWidth


@pytest.mark.parametrize(
    ("start", "slope", "wanted"),
    [
        # (start + slope w) / w is a quarter above slope where w is 4 start / slope.
        (10.0, 1.0, 40),
        (0.0, 1.0, 1),
        (1000.0, 1.0, 256),
        (5.0, 0.0, 256),
    ],
)
def test_rows_go_where_a_member_is_nearly_cheapest(start: float, slope: float, wanted: int) -> None:
    width, seen = PayingWidth(8, 256), []
    for _ in range(40):
        seen.append(width.rows)
        width.measured(width.rows, start + slope * width.rows)
    assert width.rows == wanted
    assert seen[:2] == [8, 8]
    # At most twice what was measured.
    assert all(after <= 2 * before for before, after in itertools.pairwise(seen))


def test_an_epoch_that_takes_long_once_changes_nothing() -> None:
    width = PayingWidth(8, 256)
    for seconds in (90.0, 18.0, 17.0):
        width.measured(8, seconds)
    assert width.rows == 16
    for seconds in (80.0, 26.0):
        width.measured(16, seconds)
    # 8 + 9/8 w
    assert width.rows == round(4 * 8 / (9 / 8))
