"""The service by which processes share a GPU: started, found, and gone afterwards."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfusion.bench import mps
from hfusion.bench.gpu_state import gpu_state, throttled
from hfusion.bench.workload import Unavailable
from tests.bench.tiny import CPU, workload


@pytest.fixture
def daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the PATH for a program in the daemon's place, on a machine without a service."""
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "nvidia-cuda-mps-control"


def write_program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_it_is_started_for_the_processes_of_the_block(daemon: Path) -> None:
    write_program(daemon, 'touch "$CUDA_MPS_PIPE_DIRECTORY/control"; exec sleep 60')
    with mps.multi_process_service() as how:
        assert how == "started"
        folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
        assert folder != daemon.parent
    assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
    assert not folder.exists()


def test_one_that_runs_is_used(daemon: Path) -> None:
    (daemon.parent / "control").touch()
    with mps.multi_process_service() as how:
        assert how == "runs already"
        assert os.environ["CUDA_MPS_PIPE_DIRECTORY"] == str(daemon.parent)


def test_why_there_is_none(daemon: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_program(daemon, "exit 3")
    with mps.multi_process_service() as how:
        assert how == "none: nvidia-cuda-mps-control -f did not start, exit status 3"
    monkeypatch.setenv("PATH", "")
    with mps.multi_process_service() as how:
        assert how == "none: nvidia-cuda-mps-control is not installed"


def test_it_needs_a_cuda_device() -> None:
    with pytest.raises(Unavailable, match="needs --device cuda"):
        mps.start(workload())


def test_a_processor_has_no_state() -> None:
    assert gpu_state(CPU) == ""


@pytest.mark.parametrize(
    ("reasons", "words"),
    [(0, "not throttled"), (1, "throttled: idle"), (0x24, "throttled: power limit, thermal slowdown by software")],
)
def test_throttle_reasons(reasons: int, words: str) -> None:
    assert throttled(reasons) == words
