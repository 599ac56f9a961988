"""The table of planted faults fits the code, and what plants them leaves no trace."""

from __future__ import annotations

import ast

from tests.planted_faults import ROOT, faults, record, room_tests

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
    for path, _, name in (test.partition("::") for tests in record().values() for test in tests):
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), (path, name)
