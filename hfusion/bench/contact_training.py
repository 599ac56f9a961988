"""Checks of ``contact``: hf.train in each of its modes, against the loop over members on the same device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

import hfusion as hf
from hfusion.bench import models, serial
from hfusion.bench.cases import FuseCase, classified
from hfusion.bench.contact_item import CheckResult, ContactItem, compare_losses, computes
from hfusion.bench.workload import Workload
from hfusion.device.backend import accelerators

# Many layers, so that a shard needs little of what all need together.
_CASE = FuseCase("mlp-deep", "", partial(models.mlp, *[256] * 13, 10), partial(classified, 128, 256), tolerance=1e-2)
MEMBERS, MINIBATCHES, CLIP = 4, 6, 0.5
_SPILLED_PART = 4


@dataclass(frozen=True)
class TrainMode:
    """The settings of a run of hf.train.

    Attributes:
        name: of the check.
        compiled: minibatches are compiled.
        spilled: the device has a quarter of the memory that the task needs.
        clip: the largest norm of gradients.
        devices: logical devices, with a task for each.
    """

    name: str
    compiled: bool = False
    spilled: bool = False
    clip: float | None = None
    devices: int = 1


MODES = (
    TrainMode("resident"),
    TrainMode("spilled", spilled=True),
    TrainMode("compiled", compiled=True),
    TrainMode("clipped", clip=CLIP),
    TrainMode("compiled-clipped", compiled=True, clip=CLIP),
    TrainMode("two-devices", devices=2),
)
QUICK_MODES = ("spilled", "clipped", "two-devices")


def training_items(quick: bool) -> Iterator[ContactItem]:
    """Yield a check of each mode."""
    for mode in MODES:
        if not quick or mode.name in QUICK_MODES:
            yield ContactItem(f"hf.train {mode.name}", partial(check_training, mode), limit=180.0)


def check_training(mode: TrainMode, device: torch.device) -> CheckResult:
    """Train six minibatches, and compare all losses ``[6, B]`` with the loop's."""
    workload = Workload(_CASE, MEMBERS, device)
    expected = _train_alone(workload, mode.clip)
    present = [str(accelerator) for accelerator in accelerators() if accelerator.type == device.type] or [
        f"{device.type}:0"
    ]
    # Where there are fewer devices, several logical ones are on the same.
    names = [present[index % len(present)] for index in range(mode.devices)]
    tasks = [_task(workload, mode, f"task{index}") for index in range(mode.devices)]
    needed_bytes = hf.plan(tasks[:1], _machine(names[:1], 1 << 40)).tasks[0].device_bytes
    memory = needed_bytes // _SPILLED_PART if mode.spilled else 4 * needed_bytes
    report = hf.train(tasks, _machine(names, memory))
    peak, shards = max(report.peak.values()), max(len(task.shards) for task in report.plan.tasks)
    values = {"devices": names, "memory": memory, "needed": needed_bytes, "peak": peak, "shards": shards}
    losses = {name: task.losses.double() for name, task in report.items()}
    summary = f"{shards} shards, peak {peak} of {memory} bytes"
    result = compare_losses(device, expected, losses, _CASE.tolerance, summary, **values)
    if mode.spilled and shards == 1:
        return result.unless_fault(f"not spilled: {needed_bytes} bytes are needed, the device has {memory}")
    return result.unless_fault(f"took {peak} bytes of {memory}" if peak > memory else "")


def _task(workload: Workload, mode: TrainMode, name: str) -> hf.Task:
    """Return a task whose members and minibatches are on the host."""
    home = replace(workload, device=torch.device("cpu"))
    return hf.Task(
        hf.fuse(home.models(), verify=computes(workload.device)),
        workload.case.loss,
        optimizer=partial(hf.optim.Adam, lr=list(workload.rates)),
        loader=[home.batch()] * MINIBATCHES,
        name=name,
        clip_norm=mode.clip,
        compile=mode.compiled,
    )


def _machine(names: list[str], memory: int) -> hf.Machine:
    return hf.Machine([hf.Device(name, f"d{index}", memory=memory) for index, name in enumerate(names)])


def _train_alone(workload: Workload, clip: float | None) -> Tensor:
    """Return the losses ``[6, B]`` of the members alone."""
    loop = serial.SerialLoop.of(workload, range(workload.members))
    rows = []
    for _ in range(MINIBATCHES):
        row = []
        for model, optimizer in zip(loop.models, loop.optimizers, strict=True):
            optimizer.zero_grad()
            loss = loop.loss_of(model, loop.inputs, loop.target)
            loss.backward()
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(serial.trained(model), clip)
            optimizer.step()
            row.append(loss.detach())
        rows.append(torch.stack(row).cpu().double())
    return torch.stack(rows)
