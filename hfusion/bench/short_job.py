"""One job of ``short``: a process that trains some steps, as a user's script does, and ends."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch

import hfusion as hf
from hfusion.bench.cases import CASES, Workload
from hfusion.bench.contenders import start_serial, trained

_LOADED = time.perf_counter(), time.process_time()

_COMPILE = {"eager": False, "compiled": True, "default": None}


def main(arguments: Sequence[str], began: tuple[float, float]) -> None:
    """Train: MODEL MEMBERS STEPS THREADS VARIANT. ``began``: when the import of hfusion began, by both clocks.

    Prints the last losses; then the processor time of this process alone, and the wall and the processor time that do
    not count: members that are trained one by one need no hfusion.
    """
    model, members, steps, threads, variant = arguments
    torch.set_num_threads(int(threads))
    (case,) = (case for case in CASES if case.name == model)
    workload = Workload(case, int(members), torch.device("cpu"))
    uncounted: Sequence[float] = (0.0, 0.0)
    if variant == "serial":
        step = start_serial(workload).step
        uncounted = [after - before for before, after in zip(began, _LOADED, strict=True)]
    else:
        fused = hf.fuse(workload.models())
        optimizer = hf.optim.Adam(trained(fused), lr=list(workload.rates))
        inputs, target = workload.batch()
        train = hf.train_step(fused, case.loss, optimizer, compile=_COMPILE[variant])
        step = lambda: train(inputs, target)  # noqa: E731
    with warnings.catch_warnings():
        # Eager steps are in the table of steps.
        warnings.simplefilter("ignore")
        for _ in range(int(steps)):
            losses = step()
    print(*map(float, losses))
    print(time.process_time(), *uncounted)
