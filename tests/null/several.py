"""Minibatches a second of several null CUDA devices, in one process and in one for each: Python is all that they take.

``NULL_DEVICES=2 tests/null/run.sh PYTHON -m tests.null.several --devices 2``, with HFUSION_NULL_CUDA as for the tests.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import hfusion as hf
from tests.null.calls import losses_of

# Minibatches before those that are timed.
WARM = 100


class TimedLoader(list[Any]):
    """Minibatches, the reader of which notes the time and the seconds of its process."""

    def __init__(self, count: int, folder: Path, name: str) -> None:
        super().__init__([(torch.zeros(16, 32), torch.zeros(16, dtype=torch.int64))] * count)
        self.folder, self.name = folder, name

    def __iter__(self) -> Iterator[Any]:
        for index in range(len(self)):
            if index in (WARM, len(self) - 1):
                path = self.folder / f"{self.name}-{index == WARM}"
                path.write_text(json.dumps([time.time(), time.process_time(), os.getpid()]))
            yield self[index]


def measured(devices: int, count: int, processes: int) -> str:
    """Train a task for each device, and return its rate and seconds in words."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tasks = [
            hf.Task(
                [nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)]) for _ in range(4)],
                losses_of,
                lambda params: hf.optim.AdamW(params, lr=1e-3),
                TimedLoader(count, folder, f"task{number}"),
                name=f"task{number}",
            )
            for number in range(devices)
        ]
        machine = hf.Machine([hf.Device(f"cuda:{n}", memory="1GiB") for n in range(devices)], disk=folder / "spill")
        driver = time.process_time()
        hf.train(tasks, machine, processes=processes)
        driver = time.process_time() - driver
        rate, seconds = 0.0, dict[int, float]()
        for task in tasks:
            (start, start_cpu, process), (end, end_cpu, _) = (
                json.loads((folder / f"{task.name}-{warm}").read_text()) for warm in (True, False)
            )
            rate += (count - 1 - WARM) / (end - start)
            seconds[process] = max(seconds.get(process, 0.0), end_cpu - start_cpu)
    cpu_ms = 1e3 * sum(seconds.values()) / devices / (count - 1 - WARM)
    return (
        f"{devices} devices, {processes} processes: {rate:.0f} minibatches/s, {cpu_ms:.2f} ms of CPU each where they "
        f"are trained, {driver:.2f} s of CPU in the driver's process"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--minibatches", type=int, default=500)
    options = parser.parse_args()
    for processes in (1, options.devices) * 2:
        print(measured(options.devices, options.minibatches, processes), flush=True)
