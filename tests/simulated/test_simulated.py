"""hf.train over simulated devices: a few of the orders that ``python -m tests.simulated --orders 1000`` tries.

They run in a subprocess: a device that was added to torch cannot be removed.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulated.device import missing

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))


def call(*words: str) -> str:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-m", *words], cwd=root, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_any_order_gives_the_bits_of_the_serial_run() -> None:
    assert "5 orders" in call("tests.simulated", "--orders", "5", "--seed", "5")


def test_planted_faults_are_seen() -> None:
    assert "of 4 single ones seen" in call("tests.simulated", "--faults", "4")


def test_what_is_no_run() -> None:
    assert "a machine knows its devices" in call("tests.simulated.pieces")


def test_populations_step_as_members_alone() -> None:
    """Some rows with a scaler, a member left out, and samples of weight 0, which the host knows."""
    names = (
        "an_overflow_among_some_rows_lowers_the_scale_of_its_member",
        "the_others_keep_every_bit",
        "a_removed_sample_spoils_nothing[mse_loss]",  # torch drops weight= of l1_loss under a default device
    )
    chosen = [f"tests/population/test_own_pace.py::test_{name}" for name in names]
    assert "11 passed" in call("pytest", "-p", "tests.simulated.device", "-p", "no:cacheprovider", "-q", *chosen)
