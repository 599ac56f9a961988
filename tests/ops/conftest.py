"""Fixtures for the tests of recurrent layers."""

from __future__ import annotations

import pytest

from hfusion.device import native
from hfusion.ops import rnn


@pytest.fixture
def kernels() -> None:
    """The C kernels of recurrent layers; a test that needs them is skipped where they cannot be compiled."""
    if isinstance(library := native.library(rnn.SOURCE), str):
        pytest.skip(library)
