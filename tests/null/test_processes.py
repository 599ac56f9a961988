"""`hf.train` on several CUDA devices, in one process or in one for each: all of them train, and no call is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.cluster.temporary_files import nothing_left, shared_memory
from tests.null.arrays import losses_of
from tests.null.calls import reset, since_reset

pytestmark = pytest.mark.null
pytest.importorskip("cloudpickle")


class Loader(list[Any]):
    """Minibatches that note in which process they are read."""

    def __init__(self, folder: Path) -> None:
        super().__init__([(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64))] * 5)
        self.folder = folder

    def __iter__(self) -> Any:
        (self.folder / str(os.getpid())).touch()
        return super().__iter__()


@pytest.mark.parametrize(("devices", "processes"), [(1, 1), (2, 1), (2, 2), (8, 1)])
def test_every_device_trains(devices: int, processes: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < devices:
        pytest.skip(f"needs {devices} devices: NULL_DEVICES={devices}")
    names = [f"cuda:{number}" for number in range(devices)]
    machine = hf.Machine([hf.Device(name, memory="1GiB") for name in names], disk=tmp_path / "spill")
    heard: list[Any] = []

    def made(name: str) -> hf.Task:
        models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
        loader = Loader(tmp_path)
        return hf.Task(
            models, losses_of, lambda p: hf.optim.AdamW(p, lr=0.1), loader, name=name, callbacks=(heard.append,)
        )

    tasks = [made(f"task{number}") for number in range(max(2, devices))]
    before = shared_memory()
    for path in tmp_path.glob("[0-9]*"):
        path.unlink()
    reset()
    report = hf.train(tasks, machine, processes=processes)
    assert since_reset().refused == ()
    readers = {int(path.name) for path in tmp_path.glob("[0-9]*")} - {os.getpid()}
    assert len(readers) == (0 if processes == 1 else processes)
    assert {span.device for span in report.timeline.actions} == set(names)
    assert len(heard) == 5 * len(tasks)
    assert all(next(model.parameters()).device.type == "cpu" for task in tasks for model in report[task.name].models)
    assert nothing_left(tmp_path, before)
