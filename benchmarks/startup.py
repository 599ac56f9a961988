"""Milliseconds of an array's first acts: ``fuse``, the first steps, the first compiled steps, each timed once.

    python benchmarks/startup.py --models mlp-small,cnn,resnet8,transformer

Imports and the files that all arrays share on disk, native kernels and the compiler's header, are paid by a warm-up
that is not counted; torch's cache of compiled programs is empty before it.
"""

from __future__ import annotations

import gc
import sys
import time
import warnings
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch._inductor.utils import fresh_cache

import hfusion as hf
from hfusion.bench import fuse_benchmark, harness
from hfusion.bench.cases import CASES, Workload
from hfusion.bench.contenders import eager_step, trained
from hfusion.bench.harness import Row
from hfusion.device.backend import backend

STAGES = {
    "fuse_ms": "fuse()",
    "first_ms": "first step",
    "second_ms": "second step",
    "compiled_ms": "first compiled step",
    "next_ms": "second compiled step",
}


def measure(workload: Workload) -> Row:
    """Return the stages of one array; a note says why steps are not compiled."""
    torch.compiler.reset()
    gc.collect()
    inputs, target = workload.batch()
    times = []

    def clocked(act):
        backend(workload.device).wait()
        start = time.perf_counter()
        result = act()
        backend(workload.device).wait()
        times.append(1e3 * (time.perf_counter() - start))
        return result

    models = workload.models()
    fused = clocked(lambda: hf.fuse(models))
    optimizer = hf.optim.Adam(trained(fused), lr=list(workload.rates))
    eager = eager_step(workload, fused, optimizer)
    clocked(eager), clocked(eager)
    train = hf.train_step(fused, workload.case.loss, optimizer, compile=True)

    def compiled():
        with workload.autocast():
            return train(inputs, target)

    with warnings.catch_warnings():
        # The note says that it runs eagerly.
        warnings.simplefilter("ignore")
        compiled(), clocked(compiled), clocked(compiled)
    note = "; ".join(f"eager: {row.why}" for row in train.report().rows if row.why)
    head = {"model": workload.case.name, "members": workload.members, "note": note}
    return head | dict(zip(STAGES, times, strict=True))


def run(options) -> Iterator[Row]:
    amp = fuse_benchmark.AMP.get(options.amp)
    with fresh_cache():
        harness.say("warming up")
        measure(Workload(CASES[0], 2, options.device, amp))
        for case in options.models or CASES[: 1 if options.quick else None]:
            for members in options.members or ((4,) if options.quick else (4, 16, 64)):
                harness.say(f"{case.name} x {members}")
                yield measure(Workload(case, members, options.device, amp))


def table(rows):
    values = {title: lambda row, key=key: f"{row[key]:,.1f}" for key, title in STAGES.items()}
    return harness.row_table("start-up of arrays, ms", rows, ("model", "members"), values)


BENCHMARK = replace(fuse_benchmark.BENCHMARK, about=__doc__, run=run, table=table, choices={"models": CASES})

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))
