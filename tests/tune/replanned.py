"""A sweep on a node of a Ray cluster that is slower than said: ``python -m tests.tune.replanned --repeats 3``.

Two nodes on this machine train trials of two shapes; the process that trains first takes four times as long for every
minibatch as it needs. Sweeps that go by what was measured and sweeps that go by estimates take turns.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import optuna
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.shape_array import ShapeArray
from hfusion.tune.sweep_runner import SweepRunner
from hfusion.tune.trial_placement import EpochSeconds
from tests.cluster.test_ray import Nodes, cluster

EPOCHS, TRIALS, ROWS = 8, 48, 16
SLOW = 4

# Of each round so far: trials and seconds of every device.
Rounds = list[dict[int, tuple[int, float]]]


class SlowWhereItBegins:
    """Minibatches after which the process that asked first waits, as if something else had its device meanwhile."""

    def __init__(self, mark: Path, driver: int) -> None:
        torch.manual_seed(0)
        x = torch.randn(4096, 64)
        samples = TensorDataset(x, (x[:, 0] * x[:, 1] > 0).long())
        self.mark, self.driver, self.loader = mark, driver, DataLoader(samples, batch_size=128, shuffle=True)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        slow = False
        if os.getpid() != self.driver:
            if not self.mark.exists():
                self.mark.write_text(str(os.getpid()))
            slow = self.mark.read_text() == str(os.getpid())
        for batch in self.loader:
            began = time.perf_counter()
            yield batch
            if slow:
                time.sleep((SLOW - 1) * (time.perf_counter() - began))


def make_model(hidden: int) -> nn.Module:
    return nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def space(trial: optuna.Trial) -> dict[str, Any]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-2, log=True),
        "hidden": trial.suggest_categorical("hidden", [192, 256]),
    }


def sweep(folder: Path, machine: Any) -> hf.SweepResult:
    return hf.sweep(
        make_model,
        space,
        F.cross_entropy,
        SlowWhereItBegins(folder / "mark", os.getpid()),
        trials=TRIALS,
        epochs=EPOCHS,
        rows=ROWS,
        sampler=optuna.samplers.RandomSampler(seed=0),
        pruner=optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=2),
        machine=machine,
    )


def watched(rounds: Rounds, *, measured: bool) -> Any:
    """Patch sweeps to note the seconds of rounds; unless ``measured``, sweeps get no measured times."""
    original_note, train = EpochSeconds.note, SweepRunner._train

    def note(seconds: EpochSeconds, array: ShapeArray, result: EpochResult) -> None:
        trials, before = rounds[-1].get(array.device, (0, 0.0))
        rounds[-1][array.device] = trials + len(array.slots), before + result.seconds + result.startup
        if measured:
            original_note(seconds, array, result)

    def began(runner: SweepRunner) -> None:
        rounds.append({})
        train(runner)

    return patch.multiple(EpochSeconds, note=note), patch.multiple(SweepRunner, _train=began)


def main() -> None:
    import ray

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    nodes = Nodes(2)
    ray.init(address=nodes.cluster.address, log_to_driver=False)
    totals: dict[str, list[float]] = {"estimated": [], "measured": []}
    shown: dict[str, Rounds] = {}
    with tempfile.TemporaryDirectory() as name:
        for repeat in range(repeats):
            states = []
            for kind, sums in totals.items():
                folder = Path(name, f"{kind} {repeat}")
                folder.mkdir()
                shown[kind] = []
                noting, training = watched(shown[kind], measured=kind == "measured")
                with noting, training:
                    result = sweep(folder, cluster(folder))
                states.append([(trial.number, trial.state, trial.params) for trial in result.trials])
                # Nothing is known in the first round, in which processes begin.
                sums.append(sum(max(seconds for _, seconds in devices.values()) for devices in shown[kind][1:]))
                print(f"{kind}: {sums[-1]:.1f} s in rounds after the first", flush=True)
            assert states[0] == states[1]
    ray.shutdown()
    nodes.cluster.shutdown()
    for kind, rounds in shown.items():
        print(f"{kind}: of each round the trials and seconds of the two devices, the last time")
        for number, devices in enumerate(rounds):
            measurements = [devices.get(device, (0, 0.0)) for device in range(2)]
            print(f"{number:3}  " + "   ".join(f"{trials:2} {seconds:6.2f} s" for trials, seconds in measurements))
    for kind, sums in totals.items():
        print(f"{kind}: median {median(sums):.1f} s, {min(sums):.1f} to {max(sums):.1f} s")


if __name__ == "__main__":
    main()
