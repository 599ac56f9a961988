"""An array that trains from the first second: after five seconds, another process compiles while steps run eagerly.

    python examples/first_second.py --members 16 --seconds 30

Run it twice: the second process finds the program that the first has left in the cache folder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf


@dataclass(frozen=True)
class Change:
    """``eager`` and ``compiled``: milliseconds of the steps of either kind, in their order."""

    eager: tuple[float, ...]
    compiled: tuple[float, ...]

    def __str__(self) -> str:
        told = [f"{len(self.eager)} eager steps, {median(self.eager):.2f} ms each"]
        if self.compiled:
            told.append(f"then {len(self.compiled)} compiled ones, {median(self.compiled):.2f} ms each")
        return ", ".join(told)


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def train(members: int, goes_on: Callable[[int], bool]) -> tuple[Change, Tensor]:
    """Steps as long as ``goes_on`` says so of how many there were; their times, and the last losses ``[B]``."""
    fused = hf.build(make_model, seeds=range(members))
    optimizer = hf.optim.Adam(fused.parameters(), lr=1e-3)
    step = hf.train_step(fused, F.cross_entropy, optimizer)
    generator = torch.Generator().manual_seed(0)
    x, target = torch.randn(32, 64, generator=generator), torch.randint(10, (32,), generator=generator)
    times: dict[bool, list[float]] = {True: [], False: []}
    losses = torch.empty(members)
    while goes_on(len(times[True]) + len(times[False])):
        began = time.perf_counter()
        losses = step(x, target)
        seconds = time.perf_counter() - began
        times[step.report().rows[0].how == "eager"].append(1e3 * seconds)
    return Change(tuple(times[True]), tuple(times[False])), losses


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16, help="models in the array (default 16)")
    parser.add_argument("--seconds", type=float, default=30.0, help="how long to train (default 30)")
    given = parser.parse_args(arguments)
    end = time.monotonic() + given.seconds
    change, losses = train(given.members, lambda done: done < 2 or time.monotonic() < end)
    print(change)
    print(f"losses from {losses.min():.4f} to {losses.max():.4f}")


if __name__ == "__main__":
    main()
