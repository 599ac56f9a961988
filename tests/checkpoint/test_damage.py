"""Damaged, torn and impossible checkpoints: `make soak` tries more of each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import hfusion as hf
from hfusion.checkpoint.files import saves
from tests.checkpoint.damage import SURE, Trial
from tests.checkpoint.living import population


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    return Trial(tmp_path_factory.mktemp("saves"))


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from([*SURE, "forged"]), seed=st.integers(0, 1 << 20))
def test_every_damage_is_an_error_that_names_the_file(trial: Trial, name: str, seed: int) -> None:
    trial.damage(name, seed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_is_resumed_and_ends_the_same() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.killed", "--kills", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 kills of ")


def test_a_failed_write_leaves_the_last_save(tmp_path: Path) -> None:
    pop = population(2)
    pop.save(tmp_path / "good")
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.CheckpointError, match="could not write a checkpoint, and the last one stands"):
        pop.save(tmp_path / "file")
    assert len(saves(tmp_path / "good")) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_last_save(tmp_path: Path) -> None:
    """A limit of the size of files does in one process what a full disk does in all."""
    code = f"""
import resource, signal
from pathlib import Path
import hfusion as hf
from tests.checkpoint.living import population
pop, root = population(2), Path({str(tmp_path)!r})
pop.save(root)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    pop.save(root)
except hf.CheckpointError as error:
    assert "the last one stands" in str(error) and "too large" in str(error), error
    assert [path.name for path in root.iterdir()] == ["save-000000000001"], list(root.iterdir())
    hf.load(root, pop.fused)
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "told\n", done.stderr


def test_leftovers_of_a_killed_save_are_cleaned_up(tmp_path: Path) -> None:
    pop = population(2)
    leftover = tmp_path / ".aside-abc"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"torn")
    with pytest.raises(hf.CheckpointError, match="holds no save"):
        hf.load(tmp_path, pop.fused)
    pop.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["save-000000000001"]
