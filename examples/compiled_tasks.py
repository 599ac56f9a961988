"""A learning-rate sweep by hf.train, eagerly and compiled: the time of a minibatch, and how far the results are apart.

    python examples/compiled_tasks.py --members 16 --epochs 20

On scikit-learn's handwritten digits. Compiled, a minibatch is a step of hf.train_step: forward and backward of all
members are one program, which is made at the second minibatch and kept on disk for the next run.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf

BATCH = 64


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def digits() -> DataLoader[tuple[Tensor, ...]]:
    found = load_digits()
    images, labels = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    return DataLoader(TensorDataset(images, labels), BATCH, shuffle=True)


def sweep(members: int, epochs: int, compile: bool | str) -> tuple[hf.Task, list[float]]:
    """The task, and when its minibatches end."""
    ends: list[float] = []
    torch.manual_seed(0)
    task = hf.Task(
        [make_model() for _ in range(members)],
        F.cross_entropy,
        lambda params: hf.optim.Adam(params, lr=torch.logspace(-4, -2, members).tolist()),
        digits(),
        epochs=epochs,
        name=f"compile={compile}",
        seed=1,
        compile=compile,
        callbacks=[lambda step: ends.append(perf_counter())],
    )
    return task, ends


def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The losses ``[steps, B]`` of both ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--memory", default="1GiB", help="of the device; with too little a task is spilled, and eager")
    options = parser.parse_args(arguments)
    machine = hf.Machine([hf.Device("cpu", memory=options.memory)])
    losses = {}
    for compile in (False, True):
        task, ends = sweep(options.members, options.epochs, compile)
        report = hf.train(task, machine)[task.name]
        times = [after - before for before, after in pairwise(ends)]
        print(f"{median(times) * 1e3:.2f} ms per minibatch, {ends[-1] - ends[0]:.1f} s in all; {report.arrays[0]}")
        losses[task.name] = report.losses
    eager, compiled = losses.values()
    print(f"largest difference of a loss: {(eager - compiled).abs().max():.1e}")
    return losses


if __name__ == "__main__":
    main()
