"""Measure how long members take to stop, start and be copied, and how long steps take after members were lost.

``python -m hfusion.bench.population_benchmark`` prints the CPU time of one thread, the least of several repeats, so
that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf

ROWS = [3, 9, 17, 22, 31, 40, 51, 60]


def _milliseconds(act: Callable[[], object]) -> float:
    start = time.process_time()
    act()
    return 1e3 * (time.process_time() - start)


def _large() -> nn.Module:
    """Return a model with a million parameters."""
    return nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 448), nn.ReLU(), nn.Linear(448, 32))


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def _steps(pop: hf.Population, x: torch.Tensor, y: torch.Tensor, count: int) -> None:
    for _ in range(count):
        pop.step(x, y)


def _population(models: list[nn.Module], compile: bool) -> hf.Population:
    return hf.Population(
        models,
        optimizer=lambda params: hf.optim.AdamW(params, lr=1e-3),
        loss=F.cross_entropy,
        on_nonfinite="ignore",
        compile=compile,
    )


def rows(repeats: int) -> dict[str, float]:
    """Milliseconds to stop, start and copy 8 of 64 members of a million parameters each, and to compact to a half."""
    samples: dict[str, list[float]] = {"stop": [], "start": [], "copy": [], "compact": []}
    x, y = torch.randn(8, 512), torch.randint(32, (8,))
    new = [_large() for _ in ROWS]
    pop = _population([_large() for _ in range(64)], compile=False)
    for _ in range(repeats):
        pop.step(x, y)
        samples["stop"].append(_milliseconds(lambda: pop.stop(ROWS)))
        samples["start"].append(_milliseconds(lambda: pop.start(ROWS, new)))
        samples["copy"].append(_milliseconds(lambda: pop.copy([row - 1 for row in ROWS], ROWS)))
        pop.step(x, y)
        pop.stop(list(range(0, 64, 2)))
        samples["compact"].append(_milliseconds(pop.compact))
        pop.grow(32)
        pop.start(pop._roll.free, [_large() for _ in pop._roll.free])
    return {name: min(times) for name, times in samples.items()}


def leaving(counts: list[int], repeats: int, compile: bool) -> dict[int, tuple[float, float]]:
    """Return ms per step by number of members: of a population of 64 that lost the others, and of a new array."""
    x, y = torch.randn(32, 64), torch.randint(10, (32,))
    pop, step_times = _population([_small() for _ in range(64)], compile), {}
    for count in counts:
        live = [row for row, tag in enumerate(pop.tags) if tag is not None]
        if len(live) > count:
            pop.stop(live[count:])
        pop.compact()
        ideal = _population([_small() for _ in range(count)], compile)
        times: list[list[float]] = [[], []]
        for population in (pop, ideal):
            for _ in range(3):
                population.step(x, y)
        for _ in range(repeats):
            for index, population in enumerate((pop, ideal)):
                times[index].append(_milliseconds(partial(_steps, population, x, y, 10)) / 10)
        step_times[count] = min(times[0]), min(times[1])
    print(f"programs compiled by the population: {pop._step.compilations}")
    return step_times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--counts", type=int, nargs="*", default=[64, 60, 52, 44, 36, 28, 20, 12, 6, 2])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name, milliseconds in rows(options.repeats).items():
        print(f"{name:8} {milliseconds:7.1f} ms")
    step_times = leaving(options.counts, options.repeats, not options.eager)
    for count, (compacted, ideal) in step_times.items():
        print(f"{count:3} members: {compacted:7.3f} ms, alone {ideal:7.3f} ms, {compacted / ideal:.2f}")
    sums = [sum(pair[index] for pair in step_times.values()) for index in range(2)]
    print(f"sum over these: {sums[0] / sums[1]:.3f} of an array of exactly those members")


if __name__ == "__main__":
    main()
