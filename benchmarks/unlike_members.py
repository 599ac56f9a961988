"""A step of a population of unlike members against plain loops, in one process and in one for each core.

python benchmarks/unlike_members.py --members 4,12,36
"""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.bench import harness
from hfusion.bench.harness import Benchmark, Row

INPUTS = 784


def _model(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))


def _loop(widths, samples: int) -> Callable[[], None]:
    """Start plain torch, one model after another, with torch's fused optimizer. Return its step."""
    models = [_model(width) for width in widths]
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True) for model in models]
    x, y = torch.randn(samples, INPUTS), torch.randint(10, (samples,))

    def step() -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()

    return step


def _population(widths, samples: int, **options) -> Callable[[], object]:
    models = [_model(width) for width in widths]
    make = lambda params: hf.optim.AdamW(params, lr=1e-3)  # noqa: E731
    pop = hf.Population(models, optimizer=make, loss=F.cross_entropy, **options)
    return partial(pop.step, torch.randn(samples, INPUTS), torch.randint(10, (samples,)))


def _serve(pipe, widths, samples: int) -> None:
    torch.set_num_threads(1)
    step = _loop(widths, samples)
    while pipe.recv():
        step()
        pipe.send(None)


@contextmanager
def _processes(widths, samples: int) -> Iterator[Callable[[], None]]:
    """Context manager: the step of processes that each run a share of the models by a plain loop."""
    context, count = multiprocessing.get_context("spawn"), multiprocessing.cpu_count()
    pipes = [context.Pipe() for _ in range(count)]
    for index, (_, end) in enumerate(pipes):
        context.Process(target=_serve, args=(end, widths[index::count], samples), daemon=True).start()

    def step() -> None:
        for pipe, _ in pipes:
            pipe.send(True)
        for pipe, _ in pipes:
            pipe.recv()

    yield step
    for pipe, _ in pipes:
        pipe.send(False)


def measure(members: int, samples: int, slot: float, repeats: int) -> Iterator[Row]:
    """Yield the milliseconds of a step of all members by each contender: medians of interleaved repeats."""
    widths = [16 + 4 * member for member in range(members)]
    with _processes(widths, samples) as processes:
        contenders = {
            "loop": _loop(widths, samples),
            "loop, a process for each core": processes,
            "hf.Population, one process": _population(widths, samples, processes=1),
            "hf.Population": _population(widths, samples),
        }
        times = harness.interleave(contenders, repeats, slot, harness.CPU)
    for name, values in times.items():
        head = {"members": members, "samples": samples, "contender": name}
        yield head | {"ms": 1e3 * median(values), "speedup": harness.speedup(times["loop"], values)}


def run(options) -> Iterator[Row]:
    for members in options.members or ((4,) if options.quick else (4, 12, 36)):
        for samples in (32, 128):
            harness.say(f"{members} members, {samples} samples")
            yield from measure(members, samples, 0.02 if options.quick else 0.5, options.repeats or 7)


def table(rows):
    values = {"ms": lambda row: f"{row['ms']:.2f}", "over the loop": lambda row: harness.factor(row["speedup"])}
    return harness.row_table("a step of unlike members", rows, ("members", "samples", "contender"), values)


BENCHMARK = Benchmark(__doc__, run, table, {}, members=True)

if __name__ == "__main__":
    sys.exit(harness.run_command(BENCHMARK))
