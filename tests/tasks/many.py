"""CPU seconds of many small tasks beside the plain loop: ``python -m tests.tasks.many train --tasks 800``."""

from __future__ import annotations

import argparse
import resource
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

RATES = (1e-2, 1e-3)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(32, 8), torch.randint(4, (32,))) for _ in range(count)]


def cpu_seconds() -> float:
    """Of this process, and of those that it started and that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def plain_loop(models: list[nn.Module], loader: list[tuple[Tensor, Tensor]]) -> None:
    for each, rate in zip(models, RATES, strict=True):
        optimizer = torch.optim.Adam(each.parameters(), lr=rate)
        for inputs, target in loader:
            optimizer.zero_grad()
            F.cross_entropy(each(inputs), target).backward()
            optimizer.step()


def task(number: int, models: list[nn.Module], loader: list[tuple[Tensor, Tensor]]) -> hf.Task:
    name = f"task-{number}"
    return hf.Task(models, F.cross_entropy, lambda params: hf.optim.Adam(params, lr=RATES), loader, name=name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["loop", "plan", "train", "cluster"])
    parser.add_argument("--tasks", type=int, default=800)
    parser.add_argument("--minibatches", type=int, default=10)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    given: list[Any] = [([model() for _ in RATES], batches(options.minibatches)) for _ in range(options.tasks)]
    devices = [hf.Device(f"cpu:{n}", memory="1GiB") for n in range(2 if options.what == "cluster" else 1)]
    began, machine = cpu_seconds(), hf.Machine(devices)
    if options.what == "loop":
        for models, loader in given:
            plain_loop(models, loader)
    else:
        tasks = [task(number, *each) for number, each in enumerate(given)]
        if options.what == "plan":
            hf.plan(tasks, machine)
        else:
            hf.train(tasks, machine if options.what == "train" else hf.Cluster(machine))
    print(f"{options.what}: {options.tasks} tasks, {cpu_seconds() - began:.1f} s of CPU")


if __name__ == "__main__":
    main()
