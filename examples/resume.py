"""A run that kills itself, and goes on where it was: the same losses, to the last bit.

    python examples/resume.py --steps 60

The first process saves every ten steps and is killed in the middle, as by a machine that fails. The second one finds
the last save by itself and trains to the end. A third run is never interrupted; both end with the same members.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

MEMBERS, EVERY = 4, 10


class Batches:
    """A loader that knows where it is; torchdata's StatefulDataLoader does, too."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.place)
            self.place += 1
            yield torch.randn(16, 8, generator=generator), torch.randint(4, (16,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 4))


def make_optimizer(params: Any) -> hf.optim.FusedOptimizer:
    return hf.optim.AdamW(params, lr=1e-2)


def train(folder: Path, steps: int, killed_at: int) -> None:
    """Train to the end, from the last save in ``folder`` if there is one; killed at a step if that is above 0."""
    batches = Batches()
    options: dict[str, Any] = {"optimizer": make_optimizer, "loss": F.cross_entropy, "compile": False}
    if folder.exists():
        pop = hf.Population.load(folder, make_model, loader=batches, **options)
        print(f"goes on at step {pop.steps}")
    else:
        torch.manual_seed(0)
        pop = hf.Population([make_model() for _ in range(MEMBERS)], **options)
    stream = iter(batches)
    while pop.steps < steps:
        losses = pop.step(*next(stream))
        if pop.steps % EVERY == 0:
            pop.save(folder, loader=batches, keep=2)
        if pop.steps == killed_at:
            print(f"is killed at step {pop.steps}", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
    print("ends with losses", *[f"{loss:.17g}" for loss in losses.tolist()])


def start(folder: Path, steps: int, killed_at: int = 0) -> str:
    """The same in a process of its own; what it printed."""
    command = [sys.executable, __file__, "--folder", str(folder), "--steps", str(steps), "--killed-at", str(killed_at)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    print(done.stdout, end="")
    return done.stdout


def main(arguments: Sequence[str] | None = None) -> tuple[str, str]:
    """The last lines of the run that was killed and of the one that was not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--killed-at", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.folder is not None:
        train(options.folder, options.steps, options.killed_at)
        return "", ""
    with tempfile.TemporaryDirectory() as folder:
        start(Path(folder) / "torn", options.steps, killed_at=options.steps // 2 + 3)
        resumed = start(Path(folder) / "torn", options.steps)
        whole = start(Path(folder) / "whole", options.steps)
    found = resumed.splitlines()[-1], whole.splitlines()[-1]
    print("the same, to the last bit" if found[0] == found[1] else "NOT the same")
    return found


if __name__ == "__main__":
    main()
