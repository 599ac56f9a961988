"""Runs that are killed at random instants and resumed: ``python -m tests.checkpoint.killed --kills 200``."""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import tempfile
import time
from hashlib import blake2b
from pathlib import Path

import torch

import hfusion as hf
from hfusion.checkpoint.files import digest, saves
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train

STEPS, EVERY = 40, 2


def run(root: Path, out: int) -> None:
    """Train to the end from wherever the last save is; tell of every save, and in the end of what there is."""
    torch.set_num_threads(1)
    batches = Batches()
    if saves(root):
        pop = hf.Population.load(root, Net, loader=batches, **OPTIONS)
        os.write(out, f"resumed {pop.steps}\n".encode())
    else:
        pop = population(3)
    while pop.steps < STEPS:
        os.write(out, f"at {pop.steps}\n".encode())
        train(pop, batches, EVERY)
        pop.save(root, loader=batches)
        os.write(out, f"saved {pop.steps}\n".encode())
    tensors = [*pop.fused.state_dict().values()]
    tensors += [value for entry in pop.optimizer.state.values() for _, value in sorted(entry.items())]
    os.write(out, f"done {blake2b(' '.join(map(digest, tensors)).encode()).hexdigest()}\n".encode())


def start(root: Path, seconds: float | None) -> list[list[str]]:
    """Run in a process of its own, killed after so many seconds; what it has told."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ours)
        try:
            run(root, theirs)
        finally:
            os._exit(0)
    os.close(theirs)
    told, end = b"", None if seconds is None else time.monotonic() + seconds
    while True:
        left = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([ours], [], [], left)[0]:
            os.kill(child, signal.SIGKILL)
            end = None
            continue
        got = os.read(ours, 65536)
        if not got:
            break
        told += got
    os.close(ours)
    os.waitpid(child, 0)
    return [line.split() for line in told.decode().splitlines()]


def last(told: list[list[str]], what: str) -> int:
    return max((int(line[1]) for line in told if line[0] == what), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    draw, killed, runs = random.Random(options.seed), 0, 0
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        expected = start(Path(folder) / "whole", None)[-1]
        whole = time.monotonic() - begin
        assert expected[0] == "done"
        while killed < options.kills:
            root, saved, reached, runs = Path(folder) / f"run-{runs}", 0, 0, runs + 1
            while True:
                told = start(root, draw.uniform(0, whole) if killed < options.kills else None)
                resumed = last(told, "resumed")
                assert told == [] or last(told[:1], "resumed") == 0 or resumed >= saved, f"{resumed} after {saved}"
                if any(line[0] == "resumed" for line in told):
                    assert reached - resumed <= EVERY, f"resumed at {resumed}, and step {reached} was reached"
                saved, reached = max(saved, last(told, "saved")), max(reached, last(told, "at"))
                if told and told[-1][0] == "done":
                    assert told[-1] == expected, "a resumed run is not the uninterrupted one"
                    break
                killed += 1
    print(f"{killed} kills of {runs} runs of {STEPS} steps that save every {EVERY}: each resumed, and equal in the end")


if __name__ == "__main__":
    main()
