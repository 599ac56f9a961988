"""Records of measurements that later processes read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from hfusion.device.measured_records import MAX_ROWS, RecordFile, TimeRecord, nearest


@dataclass(frozen=True)
class Sample:
    operators: int
    looped: bool
    ratio: float | None = None


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hfusion"


@pytest.mark.usefixtures("folder")
def test_the_latest_records_are_kept_per_machine() -> None:
    file = RecordFile(Sample, "samples", {"processor": "a"})
    records = [Sample(number + 1, bool(number % 2), None if number % 2 else 0.5) for number in range(MAX_ROWS + 2)]
    for record in records:
        file.add(record)
    assert file.read() == records[2:]
    assert RecordFile(Sample, "samples", {"processor": "b"}).read() == []
    assert RecordFile(TimeRecord, "times", {"processor": "a"}).read() == []


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"rows": [{"operators": 1}]}', '{"rows": [{"operators": 0, "looped": false, "ratio": 1.0}]}']
    + [f'{{"rows": [{{"operators": 1, "looped": false, "ratio": {value}}}]}}' for value in ("-1.0", "NaN", '"much"')],
)
def test_an_invalid_file_has_no_records(folder: Path, content: str) -> None:
    file = RecordFile(Sample, "samples", {})
    file.add(Sample(1, False))
    (path,) = folder.iterdir()
    path.write_text(content)
    assert file.read() == []
    file.add(Sample(2, True))
    assert file.read() == [Sample(2, True)]


def test_the_nearest_in_size_and_the_latest_of_them_count() -> None:
    records = [Sample(10, False, float(age)) for age in range(6)] + [Sample(1000, False)]
    assert [record.ratio for record in nearest(records, 12)] == [5.0, 4.0, 3.0, 2.0, 1.0]
    assert nearest(records, 900)[0] == Sample(1000, False)
