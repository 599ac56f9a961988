"""What the tests of several recurrent layers share."""

from __future__ import annotations

import pytest

from hfusion.device import native
from hfusion.ops import rnn


@pytest.fixture
def kernels() -> None:
    """The C kernels of recurrent layers; a test that needs them is skipped where they cannot be compiled."""
    if isinstance(found := native.library(rnn.SOURCE), str):
        pytest.skip(found)
