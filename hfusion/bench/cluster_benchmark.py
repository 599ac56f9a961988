"""What a cluster costs in CPU seconds: ``python -m hfusion.bench cluster``.

Small tasks of two models each, trained by the plain loop, by hf.train and by hf.Cluster of two processes, each way in a
process of its own; and the driver's CPU time for each message of simulated nodes, as long as arrays wait and in the
tail of a run.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from hfusion.bench.machine_description import describe
from hfusion.bench.results import write_json
from hfusion.bench.simulated_executor import driver_cost
from hfusion.cluster.cluster import Cluster
from hfusion.cluster.train_tasks import plan, train
from hfusion.device.machine import Device, Machine
from hfusion.optim.adam import Adam
from hfusion.tasks.task import Task

RATES = (1e-2, 1e-3)
# Nodes and arrays of the simulated drivers.
DRIVERS = ((100, 1_000), (300, 3_000), (1_000, 10_000), (10_000, 20_000))
MINIBATCHES = 10

Data = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class CostRow:
    """CPU seconds of all processes of a run, or of a driver; of it microseconds for each message, and in the tail."""

    what: str
    count: int
    cpu_seconds: float
    us_per_message: float | None = None
    us_per_tail_message: float | None = None


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def _data() -> Data:
    return [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(MINIBATCHES)]


def _machine(devices: int) -> Machine:
    return Machine([Device(f"cpu:{n}", memory="1GiB") for n in range(devices)])


def _loop(workloads: Sequence[tuple[list[nn.Module], Data]]) -> None:
    for models, loader in workloads:
        for model, rate in zip(models, RATES, strict=True):
            optimizer = torch.optim.Adam(model.parameters(), lr=rate)
            for inputs, target in loader:
                optimizer.zero_grad()
                F.cross_entropy(model(inputs), target).backward()
                optimizer.step()


def _tasks(workloads: Sequence[tuple[list[nn.Module], Data]]) -> list[Task]:
    return [
        Task(models, F.cross_entropy, lambda params: Adam(params, lr=RATES), loader, name=f"task-{number}")
        for number, (models, loader) in enumerate(workloads)
    ]


WAYS: dict[str, Callable[[Sequence[tuple[list[nn.Module], Data]]], object]] = {
    "loop": _loop,
    "hf.plan": lambda workloads: plan(_tasks(workloads), _machine(1)),
    "hf.train": lambda workloads: train(_tasks(workloads), _machine(1)),
    "hf.Cluster": lambda workloads: train(_tasks(workloads), Cluster(_machine(2))),
}


def cpu_seconds() -> float:
    """Return the CPU time of this process, and of those that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure(contender: str, tasks: int) -> float:
    """Return the CPU seconds of ``tasks`` tasks by one of `WAYS` in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    workloads = [([_model() for _ in RATES], _data()) for _ in range(tasks)]
    began = cpu_seconds()
    WAYS[contender](workloads)
    return cpu_seconds() - began


def _elsewhere(contender: str, tasks: int) -> CostRow:
    """Measure in a new process, in which nothing is cached."""
    command = [sys.executable, "-m", "hfusion.bench", "cluster", "--way", contender, "--tasks", str(tasks)]
    ended = subprocess.run(command, check=True, capture_output=True, text=True)
    return CostRow(f"{tasks} tasks, {contender}", tasks, float(ended.stdout.split()[-1]))


def _driver(nodes: int, arrays: int) -> CostRow:
    cost = driver_cost(nodes, arrays)
    seconds = cost.messages * cost.us_per_message / 1e6
    return CostRow(
        f"driver, {arrays:,} arrays on {nodes:,} nodes", arrays, seconds, cost.us_per_message, cost.us_per_tail_message
    )


def table(rows: Sequence[CostRow]) -> Table:
    """A line for each row; seconds of tasks also as a multiple of the loop's."""
    shown = Table(title="CPU time of clusters")
    shown.add_column("what", no_wrap=True)
    for heading in ("CPU s", "x loop", "us / message", "in the tail"):
        shown.add_column(heading, justify="right")
    for row in rows:
        of_loop = "" if row.us_per_message is not None else f"{row.cpu_seconds / rows[0].cpu_seconds:.2f}"
        costs = ["" if us is None else f"{us:,.0f}" for us in (row.us_per_message, row.us_per_tail_message)]
        shown.add_row(row.what, f"{row.cpu_seconds:.1f}", of_loop, *costs)
    return shown


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark with the command line ``arguments``."""
    parser = argparse.ArgumentParser(prog="python -m hfusion.bench cluster", description=__doc__, allow_abbrev=False)
    parser.add_argument("--tasks", type=int, help="how many (default 800)")
    parser.add_argument("--quick", action="store_true", help="40 tasks, and 100 nodes")
    parser.add_argument("--way", choices=[*WAYS], help="this one alone, in this process: prints its CPU seconds")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
    parsed = parser.parse_args(arguments)
    tasks = parsed.tasks or (40 if parsed.quick else 800)
    if parsed.way:
        print(measure(parsed.way, tasks))
        return
    rows = [_elsewhere(contender, tasks) for contender in WAYS]
    rows += [_driver(*counts) for counts in DRIVERS[: 1 if parsed.quick else None]]
    Console(width=120, highlight=False).print(table(rows))
    if parsed.json:
        write_json(parsed.json, describe(torch.device("cpu")), rows)
