"""Minibatches of `hfusion.train`, compiled, against a loop over `hfusion.train_step`.

python benchmarks/train_minibatches.py --threads 2
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from statistics import median

import hfusion as hf
from hfusion.bench import harness
from hfusion.bench.cases import CASES, Workload
from hfusion.bench.contenders import trained
from hfusion.bench.harness import Benchmark, Row

MODELS = ("mlp-small", "mlp-large", "cnn", "transformer")
# Seconds of a timed loop; minibatches of a short run, from which the cost of a run without its minibatches follows.
SECONDS, FEW = 2.0, 2


def row_of(workload: Workload, rounds: int) -> Row:
    """Return milliseconds of a minibatch both ways, medians, and the median of their ratios.

    ``first``: seconds of the first run of two minibatches, which captures and loads or compiles; ``again``: of one like
    it afterwards.
    """
    inputs, target = workload.batch()
    array = hf.fuse(workload.models())
    step = hf.train_step(
        array, workload.case.loss, hf.optim.Adam(trained(array), lr=list(workload.rates)), compile=True
    )

    def loop(count: int) -> float:
        began = time.perf_counter()
        for _ in range(count):
            losses = step(inputs, target)
        losses.tolist()
        return (time.perf_counter() - began) / count

    # On the host, as their minibatches: what is trained comes back to it.
    home = replace(workload, device=harness.CPU)
    moved = hf.fuse(home.models())
    memory = next(d.memory for d in hf.Machine.detect().devices if d.physical.type == workload.device.type)
    machine = hf.Machine([hf.Device(workload.device.type, memory=memory)])

    def train(count: int) -> float:
        make = lambda _: hf.optim.Adam(trained(moved), lr=list(home.rates))  # noqa: E731
        task = hf.Task(moved, home.case.loss, make, [home.batch()] * count, name=home.case.name, compile=True)
        began = time.perf_counter()
        hf.train(task, machine)
        return time.perf_counter() - began

    loop(5)
    count = max(FEW, int(SECONDS / loop(FEW)))
    first, loops, runs, again = train(FEW), [], [], []
    for _ in range(rounds):
        loops.append(loop(count))
        again.append(train(FEW))
        runs.append((train(FEW + count) - again[-1]) / count)
    times = {"step_ms": 1e3 * median(loops), "train_ms": 1e3 * median(runs), "ratio": harness.speedup(runs, loops)}
    return {"model": home.case.name, "members": home.members} | times | {"first": first, "again": median(again)}


def run(options) -> Iterator[Row]:
    chosen = [case for case in CASES if case.name in MODELS[: 1 if options.quick else None]]
    for case in options.models or chosen:
        for members in options.members or (16,):
            harness.say(f"{case.name} x {members}")
            yield row_of(Workload(case, members, options.device), options.repeats or (1 if options.quick else 3))


def table(rows):
    titles = {"step_ms": "train_step ms", "train_ms": "hf.train ms", "ratio": "ratio", "first": "first run s"}
    values = {title: lambda row, key=key: f"{row[key]:.3f}" for key, title in {**titles, "again": "later s"}.items()}
    return harness.row_table(
        "a minibatch in a loop over train_step, and in hf.train", rows, ("model", "members"), values
    )


BENCHMARK = Benchmark(__doc__, run, table, {"models": CASES}, members=True)

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))
