"""CPU time of a minibatch of ``hf.train(compile=True)`` on the null CUDA device, beyond that of `hf.train_step`.

``tests/null/run.sh PYTHON -m tests.null.overhead``, with HFUSION_NULL_CUDA as for the tests. Prints medians.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

import hfusion as hf
from tests.null.calls import compare_as_equal, losses_of

MEMBERS, LAYERS, SIZE, SAMPLES = 4, 5, 32, 16
WARM, COUNTED, ROUNDS = 200, 1500, 5


def models() -> list[nn.Module]:
    """Return the members of an array that computes little."""
    return [nn.Sequential(*[nn.Linear(SIZE, SIZE) for _ in range(LAYERS)]) for _ in range(MEMBERS)]


class Clock:
    """The CPU time of the process between two minibatches."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def note(self) -> None:
        """Note the time, which is asked for twice in a run."""
        self.seconds.append(time.process_time())

    @property
    def milliseconds(self) -> float:
        """Of one minibatch."""
        start, end = self.seconds[-2:]
        return 1e3 * (end - start) / COUNTED


class TimedBatch(tuple[Tensor, Tensor]):
    """A minibatch on the host that notes when it is read."""

    clock: Clock

    def __iter__(self) -> Iterator[Tensor]:
        self.clock.note()
        return super().__iter__()


def batch() -> tuple[Tensor, Tensor]:
    """Return a minibatch on the host."""
    return torch.zeros(SAMPLES, SIZE), torch.zeros(SAMPLES, dtype=torch.int64)


def steps(max_norm: float | None) -> float:
    """Return the milliseconds of a step with a minibatch that is on the device."""
    fused = hf.fuse(models(), verify=False).cuda()
    optimizer = hf.optim.AdamW(fused.parameters(), lr=1e-3)

    def update(losses: Tensor) -> None:
        if max_norm is not None:
            hf.optim.clip_grad_norm_(fused.parameters(), max_norm)
        optimizer.step()

    step, clock = hf.train_step(fused, losses_of, optimizer, compile=True), Clock()
    step.update = update
    inputs, target = (tensor.cuda() for tensor in batch())
    for count in (WARM, COUNTED):
        for _ in range(count):
            step(inputs, target)
        clock.note()
    return clock.milliseconds


def train(max_norm: float | None, loader: Callable[[list[Any]], Iterable[Any]]) -> float:
    """Return the milliseconds of a minibatch of `hf.train`, which copies it to the device."""
    clock, batches = Clock(), [batch()] * (WARM + COUNTED + 1)
    for index in (WARM, -1):
        timed = TimedBatch(batches[index])
        timed.clock = clock
        batches[index] = timed
    task = hf.Task(
        hf.fuse(models(), verify=False),
        losses_of,
        lambda params: hf.optim.AdamW(params, lr=1e-3),
        loader(batches),
        clip_norm=max_norm,
        compile=True,
    )
    hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
    return clock.milliseconds


# What is no list is read in a thread.
RUNS = {
    "train_step": partial(steps, None),
    "hf.train of a list": partial(train, None, list),
    "hf.train of another loader": partial(train, None, lambda batches: dict(enumerate(batches)).values()),
    "train_step, clipped": partial(steps, 1.0),
    "hf.train of a list, clipped": partial(train, 1.0, list),
}
BEYOND = {name: "train_step, clipped" if "clipped" in name else "train_step" for name in RUNS}


if __name__ == "__main__":
    library = compare_as_equal()
    rounds = [{name: run() for name, run in RUNS.items()} for _ in range(ROUNDS)]
    for name, base in BEYOND.items():
        times, beyond = [row[name] for row in rounds], [row[name] - row[base] for row in rounds]
        spread = f"{median(times):.2f} ms ({min(times):.2f} to {max(times):.2f})"
        print(f"{name}: {spread}, {median(beyond):.2f} ms beyond {base}")
