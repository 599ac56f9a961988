"""`hf.train` and `hf.Cluster` with a process for each CUDA device: every device trains, in a process of its own."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.schedule.plan import Processes
from tests.cluster.temporary_files import nothing_left, shared_memory
from tests.null.arrays import losses_of

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


@pytest.mark.parametrize("count", [1, 2])
def test_each_device_has_its_process(count: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices: NULL_DEVICES=2")
    machine = hf.Machine([hf.Device(f"cuda:{n}", memory="1GiB") for n in range(2)], disk=tmp_path / "spill")
    heard: list[Any] = []

    def made(name: str) -> hf.Task:
        models = [nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)) for _ in range(3)]
        loader = Loader(tmp_path)
        return hf.Task(
            models, losses_of, lambda p: hf.optim.AdamW(p, lr=0.1), loader, name=name, callbacks=(heard.append,)
        )

    tasks, before = [made("a"), made("b")], shared_memory()
    plan = hf.plan(tasks, machine)
    assert "of Python and" in str(plan.processes)
    for path in tmp_path.glob("[0-9]*"):
        path.unlink()
    report = hf.train(tasks, machine, plan=replace(plan, processes=Processes(count, "asked for")))
    readers = {int(path.name) for path in tmp_path.glob("[0-9]*")} - {os.getpid()}
    assert len(readers) == (0 if count == 1 else 2)
    assert {span.device for span in report.timeline.actions} == {"cuda:0", "cuda:1"}
    assert len(heard) == 10
    assert all(next(model.parameters()).device.type == "cpu" for name in "ab" for model in report[name].models)
    assert nothing_left(tmp_path, before)
