"""Runs that are killed at random instants and resumed: ``python -m tests.checkpoint.killed --kills 200``.

Runs of a population that saves itself; those of hf.train are in tests/cluster/random_faults.py.
"""

from __future__ import annotations

import argparse
import random
import signal
import tempfile
import time
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path

import torch

import hfusion as hf
from hfusion.checkpoint.files import clean, pack, saves
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train

STEPS, EVERY = 40, 2


def living(root: Path, out: Path) -> None:
    """Train a population to the end from its last save; tell of every save, and in the end of what there is."""
    torch.set_num_threads(1)
    batches = Batches()
    if saves(root):
        pop = hf.Population.load(root, Net, loader=batches, **OPTIONS)
        tell(out, "resumed", pop.steps)
    else:
        pop = population(3)
    while pop.steps < STEPS:
        tell(out, "at", pop.steps)
        train(pop, batches, EVERY)
        pop.save(root, loader=batches)
        tell(out, "saved", pop.steps)
    tensors = [*pop.fused.state_dict().values()]
    tensors += [value for entry in pop.optimizer.state.values() for _, value in sorted(entry.items())]
    tell(out, "done", checksum(tensors))


def checksum(tensors: list[torch.Tensor]) -> str:
    packed, _ = pack({str(number): tensor.detach() for number, tensor in enumerate(tensors)})
    return blake2b(packed).hexdigest()


def tell(out: Path, event: str, value: object) -> None:
    with out.open("a") as file:
        file.write(f"{event} {value}\n")


def start(root: Path, seconds: float | None) -> list[list[str]]:
    """Train in a child process, kill it after ``seconds``, and return the events that it has told."""
    out = root.with_suffix(".events")
    out.write_text("")
    child = get_context("fork").Process(target=living, args=(root, out))
    child.start()
    child.join(seconds)
    child.kill()
    child.join()
    assert child.exitcode in (0, -signal.SIGKILL), "the run failed by itself"
    return [line.split() for line in out.read_text().splitlines()]


def last(events: list[list[str]], event: str) -> int:
    return max((int(line[1]) for line in events if line[0] == event), default=0)


def soak(kills: int, draw: random.Random, folder: Path) -> str:
    """Kill so many times; each run is killed and resumed until it has ended."""
    killed, runs = 0, 0
    start_time = time.monotonic()
    expected = start(folder / "whole", None)[-1]
    whole = time.monotonic() - start_time
    assert expected[0] == "done", expected
    while killed < kills:
        root, events, runs = folder / f"run-{runs}", list[list[str]](), runs + 1
        while not events or events[-1][0] != "done":
            before, events = events, start(root, draw.uniform(0, whole) if killed < kills else None)
            killed += events[-1:] == [] or events[-1][0] != "done"
            for resumed in [line for line in events if line[0] == "resumed"]:
                reached, saved = last(before, "at"), last(before, "saved")
                assert saved <= int(resumed[1]), f"resumed at {resumed}, saved at {saved}"
                assert reached - int(resumed[1]) <= EVERY, f"resumed at {resumed}, and {reached} was reached"
        assert events[-1] == expected, "a resumed run is not the uninterrupted one"
        for saved in {path.parent for path in root.rglob("save-*")}:
            # As the next save does: what was killed in its last one has had none.
            clean(saved)
        remaining = [path for path in root.rglob("*") if path.name.startswith(".")]
        assert not remaining, f"{remaining} are left"
    return f"{killed} kills of {runs} runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw = random.Random(options.seed)
    torch.set_num_threads(1)
    start_time = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        runs = soak(options.kills, draw, Path(folder))
    seconds = time.monotonic() - start_time
    print(f"{runs} of a population of {STEPS} steps that saves every {EVERY}: each resumed ({seconds:.0f} s)")


if __name__ == "__main__":
    main()
