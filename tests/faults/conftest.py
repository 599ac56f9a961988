"""A machine to fail on; the arrays are put back after every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import hfusion as hf
from tests.faults.arrays import array, state_of
from tests.trained import machine


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Every test finds the arrays as they were made."""
    before = [state_of(array(index)) for index in range(3)]
    yield
    for index, state in enumerate(before):
        array(index).load_state_dict(state)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> hf.Machine:
    """A device, and a host with room for nothing: all state at rest is on the disk. The folder does not exist."""
    return machine(host="1B", disk=tmp_path_factory.mktemp("disk") / "spill")
