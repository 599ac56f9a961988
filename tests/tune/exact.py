"""A large sweep against its trials alone, and killed at random: ``python -m tests.tune.exact --trials 256``."""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import tempfile
import time
from typing import Any

import optuna
import torch
import torch.nn.functional as F

import hfusion as hf
from tests.tune.cases import EPOCHS, MACHINE, alone, loaders, make_model, space
from tests.tune.killed import everything
from tests.tune.test_sweep import Recorded, decided_anew


def halving() -> Any:
    return optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2)


def search(trials: int, folder: str | None, pruner: Any) -> hf.SweepResult:
    data = loaders()
    return hf.sweep(
        make_model,
        space,
        F.cross_entropy,
        data.pop("loader"),
        **data,
        sampler=optuna.samplers.TPESampler(seed=0),
        pruner=pruner,
        trials=trials,
        epochs=EPOCHS,
        rows=64,
        machine=MACHINE,
        directory=folder,
    )


def largest_difference(result: hf.SweepResult) -> tuple[int, float]:
    """Return the number of reported values, and their largest relative difference to those of the trials alone."""
    count, largest = 0, 0.0
    for trial in result.trials:
        reference = alone(trial.params, trial.number, trial.user_attrs["hfusion:round"], len(trial.intermediate_values))
        for step, (_, expected, _) in enumerate(reference):
            count += 1
            largest = max(largest, abs(trial.intermediate_values[step] - expected) / abs(expected))
    return count, largest


def killed(trials: int, folder: str, seconds: float) -> bool:
    """Search in a process that is killed after so many seconds, and return whether it was killed."""
    child = os.fork()
    if child == 0:
        try:
            search(trials, folder, halving())
        finally:
            os._exit(0)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def compared(trials: int, folder: str) -> tuple[list[Any], float]:
    """Compare a sweep with its trials alone and its pruner, and return its results and the seconds that it took."""
    recorded, start = Recorded(halving()), time.monotonic()
    whole = search(trials, folder, recorded)
    took = time.monotonic() - start
    print(whole, f"{took:.1f} s", sep="\n", flush=True)
    count, largest = largest_difference(whole)
    print(f"{count} values, largest relative difference to trials alone {largest:.1e}", flush=True)
    assert largest < 1e-9
    assert decided_anew(whole, recorded.said, halving()) == recorded.said
    print(f"{len(recorded.said)} decisions are those of the pruner on these values", flush=True)
    return everything(whole), took


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=256)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        expected, took = compared(options.trials, folder)
    draw, kills = random.Random(options.seed), 0
    while kills < options.kills:
        with tempfile.TemporaryDirectory() as folder:
            while killed(options.trials, folder, draw.uniform(0.2, 0.7) * took if kills < options.kills else math.inf):
                kills += 1
            assert everything(search(options.trials, folder, halving())) == expected
            print(f"killed {kills} times, and ended the same", flush=True)


if __name__ == "__main__":
    main()
