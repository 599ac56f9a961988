"""CPU seconds of many small tasks of two models each: the plain loop, hf.plan, hf.train, hf.Cluster of two processes.

python benchmarks/cluster_cpu.py               # 800 tasks
python benchmarks/cluster_cpu.py --way loop    # this one alone, in this process: prints its CPU seconds
"""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.bench import harness
from hfusion.bench.harness import Benchmark, Row

RATES = (1e-2, 1e-3)
MINIBATCHES = 10


def _machine(devices: int) -> hf.Machine:
    return hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(devices)])


def _loop(workloads) -> None:
    for models, loader in workloads:
        for model, rate in zip(models, RATES, strict=True):
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
            for inputs, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()


def _tasks(workloads) -> list[hf.Task]:
    optimizer = lambda params: hf.optim.Adam(params, lr=RATES)  # noqa: E731
    pairs = enumerate(workloads)
    return [hf.Task(models, F.cross_entropy, optimizer, loader, name=f"task-{n}") for n, (models, loader) in pairs]


WAYS = {
    "loop": _loop,
    "hf.plan": lambda workloads: hf.plan(_tasks(workloads), _machine(1)),
    "hf.train": lambda workloads: hf.train(_tasks(workloads), _machine(1)),
    "hf.Cluster": lambda workloads: hf.train(_tasks(workloads), hf.Cluster(_machine(2))),
}


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of those that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(way: str, tasks: int) -> float:
    """Return the CPU seconds of ``tasks`` tasks by one of `WAYS` in this process."""
    torch.manual_seed(0)
    model = lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))  # noqa: E731
    data = lambda: [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(MINIBATCHES)]  # noqa: E731
    workloads = [([model() for _ in RATES], data()) for _ in range(tasks)]
    began = cpu_seconds()
    WAYS[way](workloads)
    return cpu_seconds() - began


def run(options) -> Iterator[Row]:
    tasks = options.tasks or (40 if options.quick else 800)
    if options.way:
        print(measure(options.way, tasks))
        sys.exit()
    loop = None
    for way in WAYS:
        harness.say(way)
        # A new process, in which nothing is cached.
        command = [sys.executable, __file__, "--way", way, "--tasks", str(tasks)]
        seconds = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])
        loop = loop or seconds
        yield {"tasks": tasks, "contender": way, "cpu_seconds": seconds, "of_loop": seconds / loop}


def table(rows):
    values = {"CPU s": lambda row: f"{row['cpu_seconds']:.1f}", "x loop": lambda row: f"{row['of_loop']:.2f}"}
    return harness.row_table("CPU time of many small tasks", rows, ("tasks", "contender"), values)


def add_options(parser) -> None:
    parser.add_argument("--tasks", type=harness.count, help="how many (default 800)")
    parser.add_argument("--way", choices=[*WAYS], help="this one alone, in this process")


BENCHMARK = Benchmark(__doc__, run, table, {}, add_options=add_options)

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))
