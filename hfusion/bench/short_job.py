"""One job of the sub-benchmark ``short``: a process that trains some steps, as a user's script does, and ends."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

import hfusion as hf
from hfusion.bench import serial
from hfusion.bench.cases import CASES
from hfusion.bench.workload import Workload

LOADED = time.perf_counter(), time.process_time()

_OPTIONS: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "compiled": {"compile": True},
    "background": {"compile": "background"},
}


def main(arguments: Sequence[str], began: tuple[float, float]) -> None:
    """Train: MODEL MEMBERS STEPS THREADS VARIANT. ``began``: when hfusion was imported, by both clocks.

    Prints the last losses; then the processor time of this process alone, and the parts of the wall and the processor
    time that do not count: members that are trained one by one need no hfusion.
    """
    model, members, steps, threads, variant = arguments
    torch.set_num_threads(int(threads))
    (case,) = (case for case in CASES if case.name == model)
    workload = Workload(case, int(members), torch.device("cpu"))
    if variant == "serial":
        step = serial.start(workload).step
        for _ in range(int(steps)):
            losses = step()
        _tell(list(map(float, losses)), *(after - before for before, after in zip(began, LOADED, strict=True)))
        return
    options = _OPTIONS[variant] if variant != "steps" else {"steps": int(steps)}
    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    batch = workload.batch()
    train = hf.train_step(fused, case.loss, optimizer, **options)
    with warnings.catch_warnings():
        # Eager steps are in the table of steps.
        warnings.simplefilter("ignore")
        for _ in range(int(steps)):
            fused_losses = train(*batch)
    _tell(fused_losses.tolist())


def _tell(losses: Sequence[float], seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
    print(*losses)
    print(time.process_time(), seconds, cpu_seconds)
