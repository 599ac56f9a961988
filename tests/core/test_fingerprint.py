"""The fingerprint of the state that a function reads changes with each value that it reads."""

from __future__ import annotations

import pytest

from hfusion.core.fingerprint import read_state
from tests.forwards.outside import READS


@pytest.mark.parametrize("kind", READS)
def test_another_value_gives_another_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    put(1.0)
    before = read_state(read)
    put(0.5)
    # None: more than can be compared, so that nothing is reused.
    assert before is None or read_state(read) != before
    put(1.0)
    assert read_state(read) == before
