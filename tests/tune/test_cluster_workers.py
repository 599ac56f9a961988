"""What the driver of a sweep tells processes that are lost at an instant of one's choice."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.cluster.node import Answered, ArrayTrainer, DeviceInfo, Lost, Message
from hfusion.tune.cluster_workers import ClusterWorkers
from hfusion.tune.space import ModelMaker, Suggestion, TrialModel
from hfusion.tune.trial_rows import SweepRecipe
from tests.tune.cases import loaders, make_model

pytest.importorskip("cloudpickle")


class Here:
    """An executor whose processes are objects of this one; ``lose`` a device, and it is told after the next answer."""

    def __init__(self, count: int) -> None:
        self._machines = [hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB")], "1GiB") for n in range(count)]
        self._trainers = [ArrayTrainer(f"cpu:{n}", machine) for n, machine in enumerate(self._machines)]
        self.devices: list[DeviceInfo] = [trainer.info() for trainer in self._trainers]
        self.offsets = [0.0] * count
        self._messages: deque[tuple[int, Message]] = deque()
        self.lose: int | None = None

    def put(self, value: Any) -> Any:
        return value

    def begin(self, device: int, job: Any) -> None:
        self._messages.append((device, Answered(job.call(self._trainers[device], lambda kept: kept))))
        if device == self.lose:
            self.lose = None
            self._messages.append((device, Lost("killed")))

    def leave(self, device: int, name: str) -> None:
        raise AssertionError("no array of a sweep is asked to leave")

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        return [self._messages.popleft()]

    def revive(self, device: int) -> bool:
        self._trainers[device] = ArrayTrainer(f"cpu:{device}", self._machines[device])
        return True

    def close(self) -> None:
        pass


@pytest.mark.parametrize("lost", [None, "epoch", "save"])
def test_a_process_that_is_lost_after_it_answered(lost: str | None, tmp_path: Path) -> None:
    """It begins again where it was saved, and comes to what it had come to."""
    cpu = torch.device("cpu")
    given = loaders()
    recipe = SweepRecipe(hf.optim.SGD, F.cross_entropy, given["loader"], None, None, cpu, False, None)
    maker = ModelMaker(make_model, cpu)
    here = Here(2)
    workers = ClusterWorkers(here, recipe, maker, 1)
    members = {f"array-{n}": [TrialModel(n, Suggestion({"lr": 0.1}, {}, {}), maker)] for n in range(2)}
    for device, (name, own) in enumerate(members.items()):
        workers.open(name, device, {})
        workers.send(name, "join", own)

    def epoch(seed: int) -> dict[str, Any]:
        return workers.ask(dict.fromkeys(members, ("epoch", (seed,))))

    here.lose = 0 if lost == "epoch" else None
    first = epoch(0)
    here.lose = 0 if lost == "save" else None
    workers.save({name: tmp_path / name for name in members}, members)
    again = Here(1)
    alone = ClusterWorkers(again, recipe, maker, 1)
    for name, own in members.items():
        alone.open(name, 0, {})
        alone.send(name, "join", own)
    for seed, found in ((0, first), (1, epoch(1))):
        assert found == alone.ask(dict.fromkeys(members, ("epoch", (seed,))))
