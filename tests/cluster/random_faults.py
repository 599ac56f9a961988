"""Runs with faults at random instants: ``python -m tests.cluster.random_faults --faults 200``.

Two processes train tasks with checkpoints and a sweep in a folder. Meanwhile workers and drivers are killed, drivers
are interrupted, and disks are full; a driver that ends is started again on the same folder. Each run must end as one
without faults, tasks bit for bit, must give each result to ``on_result`` once, and must leave no processes, shared
memory or temporary files.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from tests.cluster import test_process_executor as trained_cases
from tests.cluster.temporary_files import processes_of
from tests.tune import cases
from tests.tune.test_cluster import sweep

# Of files, so that a save fails as on a full disk.
_FULL = 1000
_LIMIT = 300.0
# After these a driver is started again.
_ENDING = ("driver", "interrupted", "disk")


class SlowSamples(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.004)
        return super().__getitem__(index)


def slow_accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(0.02)
    return cases.accuracy(output, target)


def _trained(folder: Path, where: hf.Cluster, note: Callable[[str], None]) -> Any:
    torch.manual_seed(1)
    loader = DataLoader(SlowSamples(*trained_cases.samples().tensors), batch_size=12, shuffle=True)
    tasks = [replace(task, loader=loader) for task in trained_cases.tasks(epochs=8)]

    def on_result(result: Any) -> None:
        note(f"{type(result).__name__} {result.task} {result.epoch} {getattr(result, 'step', '')} {result.members}")

    report = hf.train(tasks, where, checkpoint=folder / "saves", every=2, on_result=on_result)
    return {
        name: [task_report.losses, task_report.eval_losses, *(model.state_dict() for model in task_report.models)]
        for name, task_report in report.items()
    }


def _searched(folder: Path, where: hf.Cluster, note: Callable[[str], None]) -> Any:
    def space(trial: Any) -> dict[str, Any]:
        note(f"trial {trial.number}")
        return cases.space(trial)

    result = sweep(where, space=space, metric=slow_accuracy, directory=folder / "sweep")
    trials = [
        (finished_trial.state.name, finished_trial.params, finished_trial.intermediate_values)
        for finished_trial in result.trials
    ]
    return {"trials": trials, "best": result.best_trial.number, "model": result.best_model.state_dict()}


RUNS = {"trained": _trained, "searched": _searched}


def drive(run: str, folder: Path) -> None:
    """The driver's process: train, and write the results into ``folder``."""
    os.environ["HFUSION_RATES"] = "standard"
    torch.set_num_threads(1)
    with ExitStack() as stack:
        events = stack.enter_context((folder / "events").open("w"))

        def note(event: str) -> None:
            events.write(event + "\n")
            events.flush()

        devices = [hf.Device(f"cpu:{number}", memory="1GiB") for number in range(2)]
        where = hf.Cluster(hf.Machine(devices, host="2GiB", disk=folder / "spill"))
        torch.save(RUNS[run](folder, where, note), folder / "results")


@dataclass(eq=False)
class Driver:
    """A driver in a separate process."""

    run: str
    folder: Path
    temporary: Path
    process: subprocess.Popen[str] = field(init=False)
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = time.monotonic()
        (self.folder / "events").write_text("")
        with (self.folder / "errors").open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.cluster.random_faults", "--drive", self.run, str(self.folder)],
                env={**os.environ, "TMPDIR": str(self.temporary)},
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
            )

    def events(self) -> list[str]:
        return (self.folder / "events").read_text().splitlines()

    def errors(self) -> str:
        return (self.folder / "errors").read_text()

    def wait_for_events(self) -> None:
        """Wait until the first result, or the end."""
        while self.process.poll() is None and not self.events():
            assert time.monotonic() < self.began + _LIMIT, f"no result in {_LIMIT} s\n{self.errors()}"
            time.sleep(0.02)


def strike(kind: str, driver: Driver, draw: random.Random) -> bool:
    """Let a fault happen; return whether there was anything that it could happen to."""
    workers = processes_of("spawn_main", driver.process.pid)
    if driver.process.poll() is not None:
        return False
    if kind == "worker":
        if workers:
            os.kill(draw.choice(workers), signal.SIGKILL)
        return bool(workers)
    if kind == "disk":
        for process in [driver.process.pid, *workers]:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (_FULL, resource.RLIM_INFINITY))
        return True
    driver.process.send_signal(signal.SIGKILL if kind == "driver" else draw.choice((signal.SIGINT, signal.SIGTERM)))
    return True


@dataclass
class Struck:
    """The faults of a run by kind, and its seconds beyond a run without faults."""

    faults: Counter[str]
    seconds: float


def same(actual: Any, expected: Any, limit: float) -> bool:
    """Return whether two results differ by no more than ``limit``, relative."""
    if isinstance(expected, torch.Tensor):
        return torch.allclose(actual, expected, rtol=limit, atol=1e-3 * limit)
    if isinstance(expected, float):
        return math.isclose(actual, expected, rel_tol=limit)
    if isinstance(expected, dict):
        return list(actual) == list(expected) and all(same(actual[key], expected[key], limit) for key in expected)
    if isinstance(expected, list | tuple):
        return len(actual) == len(expected) and all(same(*pair, limit) for pair in zip(actual, expected, strict=True))
    return bool(actual == expected)


class Soak:
    """Runs of one kind."""

    def __init__(self, run: str, folder: Path, draw: random.Random) -> None:
        self.run, self.folder, self.draw = run, folder, draw
        self.temporary = folder / "temporary"
        self.temporary.mkdir()
        self.count = 0
        began = time.monotonic()
        run_folder = self._new_folder()
        driver = Driver(self.run, run_folder, self.temporary)
        driver.wait_for_events()
        started = time.monotonic()
        self._end(driver)
        assert driver.process.returncode == 0, driver.errors()
        self.seconds, self.trains = time.monotonic() - began, time.monotonic() - started
        self.expected = torch.load(run_folder / "results", weights_only=True)
        self.events = sorted(driver.events())
        self._check_left()

    def _new_folder(self) -> Path:
        run_folder, self.count = self.folder / f"run-{self.count}", self.count + 1
        run_folder.mkdir()
        return run_folder

    def _end(self, driver: Driver) -> None:
        try:
            driver.process.wait(_LIMIT)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{driver.folder}: no end in {_LIMIT} s\n{driver.errors()}") from None

    def once(self, count: int) -> Struck:
        """A run with up to ``count`` faults; a driver that ends by one is started again."""
        began, faults = time.monotonic(), Counter[str]()
        run_folder = self._new_folder()
        instants = sorted(self.draw.uniform(0, self.trains) for _ in range(count))
        while True:
            driver = Driver(self.run, run_folder, self.temporary)
            driver.wait_for_events()
            start, ends = time.monotonic(), False
            while instants and not ends and driver.process.poll() is None:
                wait = instants[0] - (time.monotonic() - start)
                if wait > 0:
                    time.sleep(min(wait, 0.05))
                    continue
                kind = self.draw.choice(("worker", *_ENDING))
                instants.pop(0)
                if strike(kind, driver, self.draw):
                    faults[kind] += 1
                    ends = kind in _ENDING
            self._end(driver)
            if driver.process.returncode == 0:
                break
            ended = any(faults[kind] for kind in _ENDING)
            assert ended, f"{run_folder}: ended with {driver.process.returncode} by {dict(faults)}\n{driver.errors()}"
            instants = [self.draw.uniform(0, self.trains) for _ in instants]
            instants.sort()
        # The trials of a sweep are trained in arrays of other widths, where devices are others.
        limit = 0.0 if self.run == "trained" else 1e-9
        assert same(torch.load(run_folder / "results", weights_only=True), self.expected, limit), (
            f"{run_folder}: other results by {dict(faults)}"
        )
        if self.run == "trained":
            actual, expected = Counter(driver.events()), Counter(self.events)
            message = f"missing {[*(expected - actual)][:5]}, more often {[*(actual - expected)][:5]}"
            assert actual == expected, f"{run_folder}: {message} of {len(self.events)} events by {dict(faults)}"
        self._check_left()
        return Struck(faults, time.monotonic() - began - self.seconds)

    def _check_left(self) -> None:
        for _ in range(100):
            leaked = [*self._left()]
            if not leaked:
                return
            time.sleep(0.2)
        raise AssertionError(f"left: {leaked}")

    def _left(self) -> Iterator[str]:
        mark = f"TMPDIR={self.temporary}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (path / "environ").read_bytes():
                    yield f"process {path.name}: {(path / 'cmdline').read_bytes()!r}"
            except OSError:
                continue
        yield from (str(path) for path in self.temporary.rglob("*hfusion*"))
        yield from (str(path) for path in self.folder.glob("run-*/spill/*"))


def soak(run: str, faults: int, seed: int) -> None:
    """Run until so many faults have happened."""
    draw = random.Random(seed)
    memory = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory() as name:
        runs = Soak(run, Path(name), draw)
        total, extra = Counter[str](), list[float]()
        while total.total() < faults:
            struck = runs.once(draw.randint(1, 3))
            total += struck.faults
            if struck.faults:
                extra.append(struck.seconds / struck.faults.total())
            print(f"{run}: {total.total()} faults in {runs.count} runs: {dict(struck.faults)}", flush=True)
    assert set(os.listdir("/dev/shm")) <= memory
    print(
        f"{run}: {dict(total)}, each run ended the same, nothing left; a fault cost "
        f"{median(extra):.1f} s (median), {max(extra):.1f} at most, of runs of {runs.seconds:.1f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--faults", type=int, default=20, help="of each kind of run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", default=",".join(RUNS))
    parser.add_argument("--drive", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        run, folder = options.drive
        drive(run, Path(folder))
        return
    for run in options.runs.split(","):
        soak(run, options.faults, options.seed)


if __name__ == "__main__":
    main()
