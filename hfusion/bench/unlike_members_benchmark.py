"""Measure a population of unlike members against plain loops, in one process and in one for each core.

``python -m hfusion.bench unlike-members``: wall time of a step of all members, interleaved medians.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench.machine_description import describe
from hfusion.bench.results import write_json


def _model(width: int, inputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _batch(inputs: int, samples: int) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, inputs), torch.randint(10, (samples,))


def _loop(widths: Sequence[int], inputs: int, samples: int) -> Callable[[], object]:
    """A step of plain torch, one model after another, with torch's fused optimizer."""
    models = [_model(width, inputs) for width in widths]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    x, y = _batch(inputs, samples)

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return step


def _population(widths: Sequence[int], inputs: int, samples: int, **options: Any) -> Callable[[], object]:
    models = [_model(width, inputs) for width in widths]
    make = lambda params: hf.optim.AdamW(params, lr=1e-3)  # noqa: E731
    pop = hf.Population(models, optimizer=make, loss=F.cross_entropy, **options)
    x, y = _batch(inputs, samples)
    return lambda: pop.step(x, y)


def _serve(pipe: Connection, widths: Sequence[int], inputs: int, samples: int) -> None:
    torch.set_num_threads(1)
    step = _loop(widths, inputs, samples)
    while steps := pipe.recv():
        for _ in range(steps):
            step()
        pipe.send(None)


class _PlainProcesses:
    """Processes that each step a share of the models by a plain loop."""

    def __init__(self, count: int, widths: Sequence[int], inputs: int, samples: int) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [parent_end for parent_end, _ in pipes]
        shares = [widths[index::count] for index in range(count)]
        arguments = [(worker_end, share, inputs, samples) for (_, worker_end), share in zip(pipes, shares, strict=True)]
        self._processes = [context.Process(target=_serve, args=args, daemon=True) for args in arguments]
        for process in self._processes:
            process.start()

    def run(self, steps: int) -> None:
        for pipe in self._pipes:
            pipe.send(steps)
        for pipe in self._pipes:
            pipe.recv()

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(0)
        for process in self._processes:
            process.join()


def _repeated(step: Callable[[], object]) -> Callable[[int], None]:
    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of a step of all members by one contender, the median of all repeats; over those of the loop."""

    members: int
    samples: int
    contender: str
    ms: float
    speedup: float


def measure(members: int, inputs: int, samples: int, steps: int, repeats: int) -> list[StepTime]:
    """Return the time of each contender, the loop first."""
    widths = [16 + 4 * member for member in range(members)]
    arguments = widths, inputs, samples
    processes = _PlainProcesses(multiprocessing.cpu_count(), *arguments)
    contenders: dict[str, Callable[[int], None]] = {
        "loop": _repeated(_loop(*arguments)),
        "loop, a process for each core": processes.run,
        "hf.Population, one process": _repeated(_population(*arguments, processes=1)),
        "hf.Population": _repeated(_population(*arguments)),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(max(30, steps))
    for _ in range(repeats):
        for name, run in contenders.items():
            began = time.perf_counter()
            run(steps)
            times[name].append(1e3 * (time.perf_counter() - began) / steps)
    processes.close()
    medians = {name: median(values) for name, values in times.items()}
    return [StepTime(members, samples, name, ms, medians["loop"] / ms) for name, ms in medians.items()]


def main(arguments: Sequence[str]) -> None:
    """Run the benchmark with the command line ``arguments``."""
    parser = argparse.ArgumentParser(prog="python -m hfusion.bench unlike-members", description=__doc__)
    parser.add_argument("--members", type=int, nargs="*", default=[4, 12, 36])
    parser.add_argument("--inputs", type=int, default=784)
    parser.add_argument("--samples", type=int, nargs="*", default=[32, 128])
    parser.add_argument("--steps", type=int, default=40, help="of a repeat")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", type=Path, help="write the rows to FILE")
    parsed = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[StepTime] = []
    shown = Table(title="A step of unlike members")
    for heading in ("members", "samples", "contender", "ms", "over the loop"):
        shown.add_column(heading)
    for members in parsed.members:
        for samples in parsed.samples:
            rows += measure(members, parsed.inputs, samples, parsed.steps, parsed.repeats)
    for row in rows:
        shown.add_row(str(row.members), str(row.samples), row.contender, f"{row.ms:.2f}", f"{row.speedup:.2f}x")
    Console(width=120, highlight=False).print(shown)
    if parsed.json:
        write_json(parsed.json, describe(torch.device("cpu")), rows)
