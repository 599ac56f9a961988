"""A node of a Ray cluster that has become slow: ``python -m tests.cluster.replanned --repeats 3``.

Two nodes on this machine train two tasks with checkpoints; where the second of them begins, a minibatch is read twenty
times slower than elsewhere. Runs with a revised plan and runs that keep their first plan alternate.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.cluster import driver
from hfusion.cluster.placement import Placement
from tests.cluster.test_process_executor import assert_same, machine, samples, tasks
from tests.cluster.test_ray import Nodes, cluster

EPOCHS = 50


class FirstPlan(Placement):
    """A placement that ignores measured progress."""

    def reach(self, device: int, steps: int, at: float) -> None:
        """Ignore the progress."""


class SlowWhereItBegins(TensorDataset):
    """Gives a sample after 20 ms in the process that asks first, and after 1 ms in others."""

    def __init__(self, mark: Path, driver: int) -> None:
        super().__init__(*samples().tensors)
        self.mark, self.driver = mark, driver

    def __getitem__(self, index: Any) -> Any:
        if os.getpid() != self.driver:
            if not self.mark.exists():
                self.mark.write_text(str(os.getpid()))
            time.sleep(0.02 if self.mark.read_text() == str(os.getpid()) else 0.001)
        return super().__getitem__(index)


def make_tasks(dataset: TensorDataset) -> list[hf.Task]:
    mixed, plain = tasks()
    return [mixed, replace(plain, loader=DataLoader(dataset, batch_size=12, shuffle=True), epochs=EPOCHS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    import ray

    nodes = Nodes(2)
    ray.init(address=nodes.cluster.address, log_to_driver=False)
    seconds: dict[str, list[float]] = {"first plan": [], "made anew": []}
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(1)
        expected = hf.train(make_tasks(samples()), machine(Path(name), 1))
        for repeat in range(repeats):
            for kind, placement in (("first plan", FirstPlan), ("made anew", Placement)):
                folder = Path(name, f"{kind} {repeat}")
                folder.mkdir()
                torch.manual_seed(1)
                with patch.object(driver, "Placement", placement):
                    began = time.monotonic()
                    slow = SlowWhereItBegins(folder / "mark", os.getpid())
                    report = hf.train(make_tasks(slow), cluster(folder), checkpoint=folder / "saves")
                    seconds[kind].append(time.monotonic() - began)
                assert_same(report, expected)
                print(f"{kind}: {seconds[kind][-1]:.1f} s", flush=True)
    ray.shutdown()
    nodes.cluster.shutdown()
    for kind, durations in seconds.items():
        print(f"{kind}: median {median(durations):.1f} s, {min(durations):.1f} to {max(durations):.1f} s")


if __name__ == "__main__":
    main()
