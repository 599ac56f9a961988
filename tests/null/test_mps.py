"""Processes under MPS train on CUDA, and only they are under it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from hfusion.bench import mps
from hfusion.bench.cases import CASES
from hfusion.bench.command_line import named
from hfusion.bench.gpu_state import gpu_state
from hfusion.bench.workload import Unavailable, Workload

pytestmark = pytest.mark.null

CUDA = torch.device("cuda", 0)


def test_processes_share_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (case,) = named(CASES, ["mlp-small"])
    workload = Workload(case, 2, CUDA)
    daemon = tmp_path / "nvidia-cuda-mps-control"
    daemon.write_text("#!/bin/sh\nexit 1\n")
    daemon.chmod(0o755)
    with pytest.raises(Unavailable, match="MPS: nvidia-cuda-mps-control -f did not start"):
        mps.start(workload)
    daemon.write_text('#!/bin/sh\ntouch "$CUDA_MPS_PIPE_DIRECTORY/control"\nexec sleep 600\n')
    running = mps.start(workload)
    try:
        assert running.note == "MPS: started"
        assert "CUDA_MPS_PIPE_DIRECTORY" not in os.environ
        assert len(running.step()) == 2
    finally:
        running.close()


def test_there_is_no_nvml() -> None:
    assert gpu_state(CUDA) == ""
