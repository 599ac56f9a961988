"""Nodes that are killed at random instants: ``python -m tests.cluster.killed --kills 20``.

Two processes train a sweep in a folder, and tasks with checkpoints; one of them is killed at an instant that is drawn
between its first and its last. Each run must end as one that nobody disturbs, having lost no trial, and leave neither
processes nor shared memory nor temporary files.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import optuna
import torch

import hfusion as hf
from tests.cluster.test_process_executor import assert_same, machine, tasks
from tests.tune.cases import MACHINE, accuracy
from tests.tune.test_cluster import assert_same_sweep, processes, sweep

Run = Callable[[Path, hf.Machine | hf.Cluster | None], Any]


def searched(folder: Path, cluster: hf.Machine | hf.Cluster | None) -> Any:
    return sweep(MACHINE if cluster is None else cluster, metric=accuracy, directory=folder / "sweep")


def trained(folder: Path, cluster: hf.Machine | hf.Cluster | None) -> Any:
    torch.manual_seed(1)
    if cluster is None:
        return hf.train(tasks(epochs=EPOCHS), machine(folder, 1))
    return hf.train(tasks(epochs=EPOCHS), cluster, checkpoint=folder / "saves", every=2)


EPOCHS = 20


class Killer(Thread):
    """Kills one of the processes that this one has, so many seconds after they got what they share; None: none."""

    def __init__(self, seconds: float | None, temporary: Path, draw: random.Random) -> None:
        super().__init__(daemon=True)
        self.seconds, self.temporary, self.draw = seconds, temporary, draw
        self.began, self.killed, self.over = 0.0, 0, False

    def run(self) -> None:
        while not any(self.temporary.glob("hfusion-run-*/*")):
            time.sleep(0.01)
        self.began = time.monotonic()
        if self.seconds is None:
            return
        time.sleep(self.seconds)
        children = sorted(child.pid or 0 for child in multiprocessing.active_children())
        if children and not self.over:
            self.killed = self.draw.choice(children)
            os.kill(self.killed, signal.SIGKILL)


def left(temporary: Path, before: set[str]) -> tuple[int, int, int]:
    """Processes, pieces of shared memory, temporary files that are there and were not."""
    for _ in range(50):
        children = multiprocessing.active_children()
        memory = {name for name in os.listdir("/dev/shm") if name not in before}
        files = [path for path in temporary.rglob("*") if "hfusion" in path.name]
        if not (children or memory or files):
            break
        time.sleep(0.2)
    return len(children), len(memory), len(files)


def soak(run: Run, same: Callable[[Any, Any], None], kills: int, draw: random.Random) -> None:
    """Kill so often; a run that ends before its instant comes does not count."""
    with tempfile.TemporaryDirectory() as name:
        expected, took, kills_done, runs = run(Path(name, "whole"), None), 0.0, 0, 0
        before = set(os.listdir("/dev/shm"))
        temporary = Path(name, "temporary")
        temporary.mkdir()
        os.environ["TMPDIR"] = tempfile.tempdir = str(temporary)
        while kills_done < kills:
            folder, runs = Path(name, f"run-{runs}"), runs + 1
            folder.mkdir()
            killer = Killer(draw.uniform(0, took) if took else None, temporary, draw)
            killer.start()
            found = run(folder, processes(2))
            killer.over, took = True, took or time.monotonic() - killer.began
            same(found, expected)
            rest = left(temporary, before)
            assert rest == (0, 0, 0), f"processes, shared memory, files left: {rest}"
            kills_done += bool(killer.killed)
            print(f"{run.__name__}: {kills_done} kills in {runs} runs, left: {rest}", flush=True)
        print(f"{run.__name__}: {kills_done} kills, each ended the same; processes, shared memory, files left: 0, 0, 0")
        os.environ.pop("TMPDIR")
        tempfile.tempdir = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=["searched", "trained"])
    options = parser.parse_args()
    os.environ["HFUSION_RATES"] = "standard"
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    for run, same in ((searched, assert_same_sweep), (trained, assert_same)):
        if options.only in (None, run.__name__):
            soak(run, same, options.kills, random.Random(options.seed))


if __name__ == "__main__":
    main()
