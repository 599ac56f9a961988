"""The table of planted faults fits the code, and what plants them leaves no trace."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.planted_faults import ROOT, Fault, faults, mirror, planted

FAULTS = faults()


def test_every_fault_can_be_planted() -> None:
    for fault in FAULTS:
        path = ROOT / fault.file
        text = path.read_text()
        changed = fault.planted(text)
        assert changed != text, fault.name
        ast.parse(changed, fault.file)
        assert fault.symptom, fault.name
        for tests in fault.tests:
            assert (ROOT / tests).exists(), (fault.name, tests)
        assert (ROOT / mirror(fault.file)[1]).is_dir(), fault.name


def test_a_text_that_is_not_there_once_is_refused() -> None:
    fault = Fault("twice", "a.py", "x = 1", "x = 2", "a wrong x")
    assert fault.planted("x = 1\n") == "x = 2\n"
    for text in ("y = 1\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"twice: a\.py has [02] places with 'x = 1'"):
            fault.planted(text)


def test_a_planted_fault_is_taken_back(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    with planted(Fault("one", "a.py", "x = 1", "x = 2", "a wrong x"), tmp_path):
        assert (tmp_path / "a.py").read_text() == "x = 2\n"
    assert (tmp_path / "a.py").read_text() == "x = 1\n"
