"""A driver that is killed: its processes end, and the next run removes its temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cloudpickle")
pytestmark = pytest.mark.cluster

SCRIPT = """
import multiprocessing, os, signal, sys
import torch.nn.functional as F
from torch import nn
import hfusion as hf
from tests.cluster.test_process_executor import machine, samples
from torch.utils.data import DataLoader

def kill(event):
    if sys.argv[2:] == ["kill"]:
        print(*(child.pid for child in multiprocessing.active_children()), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    nets = [nn.Linear(5, 3) for _ in range(2)]
    loader = DataLoader(samples(), batch_size=12)
    sgd = lambda params: hf.optim.SGD(params, lr=0.1)
    options = {"callbacks": (kill,)}
    tasks = [hf.Task([net], F.cross_entropy, sgd, loader, name=name, **options) for net, name in zip(nets, "ab")]
    hf.train(tasks, hf.Cluster(machine(sys.argv[1], 2)))
"""


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # A zombie: an orphan that has not been reaped.
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_the_next_run_removes_what_a_killed_driver_left(tmp_path: Path) -> None:
    temporary, script = tmp_path / "temporary", tmp_path / "script.py"
    temporary.mkdir()
    script.write_text(SCRIPT)
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(tmp_path)]
    killed = subprocess.run([*command, "kill"], env=environment, capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    (leftover,) = temporary.glob("hfusion*")
    assert [*leftover.iterdir()], "the data set"
    workers = [int(process) for process in killed.stdout.split()]
    assert len(workers) == 2
    for _ in range(300):
        if not any(map(is_alive, workers)):
            break
        time.sleep(0.2)
    assert not any(map(is_alive, workers))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert not [*temporary.glob("hfusion*")]
