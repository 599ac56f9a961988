"""Runs that are killed at random instants and resumed: ``python -m tests.checkpoint.killed --kills 200``.

A population that saves itself; and hf.train of three tasks on two devices: resident, spilled to the disk, and with a
shard that stays; with evaluations, schedules, and members and tasks that stop.
"""

from __future__ import annotations

import argparse
import os
import random
import select
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

import hfusion as hf
from hfusion.checkpoint.files import clean, pack, read, saves
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train
from tests.tasks.resumed import array, results, shuffled
from tests.trained import Way, adamw, machine, momentum, planned, task

STEPS, EVERY = 40, 2

Run = Callable[[Path, int], None]


def living(root: Path, out: int) -> None:
    """Train a population to the end from its last save; tell of every save, and in the end of what there is."""
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


def tell(out: int, event: str, value: object) -> None:
    os.write(out, f"{event} {value}\n".encode())


@cache
def planned_tasks() -> tuple[list[hf.Task], hf.Machine, Any]:
    """Three tasks, captured once for all processes; nothing of torch's threads is started."""
    variants = [Way(adamw), Way(momentum, 0.5, 2), Way(adamw, [0.1, 0.5, 2.0])]
    tasks = []
    for index, variant in enumerate(variants):
        fused = array(index)
        task_optimizer = variant.optimizer(list(fused.parameters()))
        task_way = Way(
            lambda params, default_optimizer=task_optimizer: default_optimizer, variant.clip, variant.accumulate
        )
        scheduler = None if index == 1 else lambda optimizer: CosineAnnealingLR(optimizer, 7)
        held_out = shuffled(9) if index == 2 else None
        tasks.append(
            task(fused, task_way, shuffled(index), f"t{index}", epochs=3, eval_loader=held_out, scheduler=scheduler)
        )
    on = machine(2)
    return tasks, on, planned(tasks, on, [1, 3, 4], [True, False, False], [False, False, True])


def stops(result: hf.Step | hf.Evaluation) -> list[int] | bool:
    """One member of the first task, and all of the last."""
    if isinstance(result, hf.Evaluation):
        return result.epoch == 1
    return [1] if (result.task, result.epoch, result.step) == ("t0", 1, 2) else False


def scheduled(root: Path, out: int) -> None:
    """Run the tasks to the end from their last saves; tell of every minibatch, and in the end of what there is."""
    tasks, on, plan = planned_tasks()
    saved = {path.name: read(path).step for path in root.glob("*") if saves(path)}
    for name, steps in saved.items():
        tell(out, f"resumed-{name}", steps)

    def asked(result: hf.Step | hf.Evaluation) -> list[int] | bool:
        if isinstance(result, hf.Step):
            tell(out, f"at-{result.task}", result.epoch * 5 + result.step + 1)
        return stops(result)

    disk = root.with_name(f"{root.name}-disk")
    report = hf.train(
        tasks, replace(on, host=2048, disk=disk), plan=plan, checkpoint=root, every=EVERY, on_result=asked
    )
    tensors = [tensor for trained in tasks for tensor in results(report[trained.name], trained)]
    tensors += [torch.tensor([*report[trained.name].stopped.items()]) for trained in tasks]
    # A run that was killed may have made the folder.
    remaining = [*disk.rglob("*")]
    assert not remaining, f"{remaining} are left"
    tell(out, "done", checksum(tensors))


def start(run: Run, root: Path, seconds: float | None) -> list[list[str]]:
    """Run ``run`` in a child process, kill it after ``seconds``, and return the events that it has printed."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        torch.set_num_threads(1)
        try:
            run(root, write_end)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(write_end)
    output, end = b"", None if seconds is None else time.monotonic() + seconds
    while True:
        remaining = None if end is None else max(0.0, end - time.monotonic())
        if not select.select([read_end], [], [], remaining)[0]:
            os.kill(child, signal.SIGKILL)
            end = None
            continue
        chunk = os.read(read_end, 65536)
        if not chunk:
            break
        output += chunk
    os.close(read_end)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert ended in (0, -signal.SIGKILL), "the run failed by itself"
    return [line.split() for line in output.decode().splitlines()]


def last(events: list[list[str]], event: str) -> int:
    return max((int(line[1]) for line in events if line[0] == event), default=0)


def soak(run: Run, kills: int, draw: random.Random, folder: Path) -> str:
    """Kill so many times; each run is killed and resumed until it has ended."""
    killed, runs = 0, 0
    start_time = time.monotonic()
    expected = start(run, folder / "whole", None)[-1]
    whole = time.monotonic() - start_time
    assert expected[0] == "done", expected
    while killed < kills:
        root, events, runs = folder / f"run-{runs}", list[list[str]](), runs + 1
        while not events or events[-1][0] != "done":
            before, events = events, start(run, root, draw.uniform(0, whole) if killed < kills else None)
            killed += events[-1:] == [] or events[-1][0] != "done"
            for resumed in [line for line in events if line[0].startswith("resumed")]:
                name = resumed[0].removeprefix("resumed")
                reached, saved = last(before, f"at{name}"), last(before, f"saved{name}")
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
    planned_tasks()
    for run, about in ((living, f"a population of {STEPS} steps"), (scheduled, "hf.train of 3 tasks on 2 devices")):
        start_time = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            runs = soak(run, options.kills, draw, Path(folder))
        seconds = time.monotonic() - start_time
        print(
            f"{runs} of {about} that save every {EVERY}: each resumed, and equal in the end ({seconds:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
