"""One job of the sub-benchmark ``short``: a process that trains some steps, as a user's script does, and ends.

``python -m hfusion.bench.short_job MODEL MEMBERS STEPS THREADS WAY``: WAY is ``serial``, ``hfusion``, or ``fill``,
which leaves programs in the caches.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import torch

from hfusion.bench import serial
from hfusion.bench.cases import CASES
from hfusion.bench.workload import Workload


def main(arguments: Sequence[str]) -> None:
    """Train; print the last losses, and the processor time of this process alone."""
    model, members, steps, threads, way = arguments
    torch.set_num_threads(int(threads))
    (case,) = (case for case in CASES if case.name == model)
    workload = Workload(case, int(members), torch.device("cpu"))
    if way == "serial":
        step = serial.start(workload).step
        for _ in range(int(steps)):
            losses = step()
        _tell(list(map(float, losses)))
        return
    import hfusion as hf

    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    batch = workload.batch()
    train = hf.train_step(fused, case.loss, optimizer, steps=None if way == "fill" else int(steps))
    for _ in range(int(steps)):
        found = train(*batch)
    _tell(found.tolist())


def _tell(losses: Sequence[float]) -> None:
    print(*losses)
    print(time.process_time())


if __name__ == "__main__":
    main(sys.argv[1:])
