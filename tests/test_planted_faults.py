"""The table of planted faults fits the code, and what plants them leaves no trace."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted_faults import ROOT, Fault, faults, planted, record, room_tests

FAULTS = faults()


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        path = fault.file_in(ROOT)
        text = path.read_text()
        changed = text.replace(fault.old, fault.new)
        assert changed != text, fault.name
        if path.suffix == ".py":
            ast.parse(changed, str(path))
        assert fault.symptom, fault.name
        assert room_tests(path.relative_to(ROOT).as_posix()), fault.name


def test_the_record_is_of_faults_in_the_table() -> None:
    assert record().keys() <= {fault.name for fault in FAULTS}


def test_a_text_that_is_not_there_once_is_refused(tmp_path: Path) -> None:
    (tmp_path / "hfusion").mkdir()
    file = tmp_path / "hfusion" / "a.py"
    for number, text in enumerate(("y = 1\n", "x = 1\nx = 1\n")):
        folder = tmp_path / str(number)
        (folder / "hfusion").mkdir(parents=True)
        (folder / "hfusion" / "a.py").write_text(text)
        with pytest.raises(ValueError, match=r"twice: 'x = 1' must have one place, and has (none|hfusion/a\.py \(2\))"):
            Fault("twice", "x = 1", "x = 2", "a wrong x").file_in(folder)
    file.write_text("x = 1\n")
    assert Fault("once", "x = 1", "x = 2", "a wrong x").file_in(tmp_path) == file


def test_a_planted_fault_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "a.py").write_text("x = 1\n")
    with planted(Fault("one", "x = 1", "x = 2", "a wrong x"), tmp_path) as path:
        assert path.read_text() == "x = 2\n"
    assert path.read_text() == "x = 1\n"
