"""Fixtures of the tests of steps."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hfusion.step import step_signatures


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_threads: None) -> Path:
    """A separate cache folder for programs and measured times, however busy the machine is."""
    monkeypatch.setattr(step_signatures, "_STEADY", math.inf)
    monkeypatch.delenv("HFUSION_CHECK")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hfusion"
