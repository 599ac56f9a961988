"""Messages of the driver of a sweep to its processes, which are lost at chosen moments."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.cluster.messages import Answered, DeviceInfo, Lost
from hfusion.cluster.node import ArrayTrainer, Message
from hfusion.tune.cluster_workers import ClusterWorkers
from hfusion.tune.loaders import Loaders
from hfusion.tune.space import ArrayChoices, ModelMaker, Suggestion, TrialModel
from hfusion.tune.training_setup import SweepRecipe
from tests.tune.cases import loaders, make_model

pytest.importorskip("cloudpickle")


LOST = Lost("killed")


class Here:
    """An executor whose processes are local objects; the loss of device ``lose`` is reported after its next answer."""

    def __init__(self, count: int) -> None:
        self._machines: list[hf.Machine] = []
        self.trainers: list[ArrayTrainer] = []
        self.devices: list[DeviceInfo] = []
        for _ in range(count):
            self.join()
        self.offsets = [0.0] * count
        self.timeout, self.starting = 0.0, False
        self._messages: deque[tuple[int, Message]] = deque()
        self.lose: int | None = None
        self.revives = True

    def join(self) -> DeviceInfo:
        name = f"cpu:{len(self.devices)}"
        self._machines.append(hf.Machine([hf.Device(name, memory="1GiB")], "1GiB"))
        self.trainers.append(ArrayTrainer(name, self._machines[-1]))
        self.devices.append(self.trainers[-1].info())
        return self.devices[-1]

    def put(self, value: Any) -> Any:
        return value

    def start_job(self, device: int, job: Any) -> None:
        if (device, LOST) in self._messages:
            return
        self._messages.append((device, Answered(job.call(self.trainers[device], lambda value: value))))
        if device == self.lose:
            self.lose = None
            self._messages.append((device, LOST))

    def leave(self, device: int, name: str) -> None:
        raise AssertionError("no array of a sweep is asked to leave")

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        """Messages; a device joins where there is none."""
        if not self._messages:
            return [(len(self.devices), self.join())]
        return [self._messages.popleft()]

    def revive(self, device: int) -> bool:
        self.trainers[device] = ArrayTrainer(f"cpu:{device}", self._machines[device])
        return self.revives

    def close(self) -> None:
        pass


class Arrays:
    """Two arrays of one trial each on two such processes; ``alone``, both on one."""

    def __init__(self, *, alone: bool = False) -> None:
        cpu, data = torch.device("cpu"), loaders()
        recipe = SweepRecipe(F.cross_entropy, Loaders(data["loader"]), None, None, cpu, False)
        maker = ModelMaker(make_model, cpu)
        self.here = Here(1 if alone else 2)
        self.workers = ClusterWorkers(self.here, recipe, maker, 4)
        hypers = {"lr": 0.1, "momentum": 0.9}
        choices = ArrayChoices(hf.optim.SGD)
        suggestion = Suggestion(hypers, choices, {}, 4)
        self.members = {f"array-{n}": [TrialModel(n, suggestion, maker)] for n in range(2)}
        for number, (name, members) in enumerate(self.members.items()):
            self.workers.open(name, 0 if alone else number, choices)
            self.workers.send(name, "join", members)

    def epoch(self, seed: int) -> dict[str, Any]:
        results = self.workers.ask(dict.fromkeys(self.members, ("epoch", (seed,))))
        return {name: result.values for name, result in results.items()}


@pytest.mark.parametrize("lost", [None, "epoch", "save"])
def test_a_process_that_is_lost_after_it_answered(lost: str | None, tmp_path: Path) -> None:
    """It begins again where it was saved, and comes to what it had come to."""
    arrays, alone = Arrays(), Arrays(alone=True)
    arrays.here.lose = 0 if lost == "epoch" else None
    first = arrays.epoch(0)
    arrays.here.lose = 0 if lost == "save" else None
    arrays.workers.save({name: tmp_path / name for name in arrays.members}, arrays.members)
    assert [first, arrays.epoch(1)] == [alone.epoch(0), alone.epoch(1)]


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize("lost", [None, 0, 1])
def test_an_array_that_moves_goes_on(lost: int | None, saved: bool, tmp_path: Path) -> None:
    """There and back, and from where it was lost after that; a process lost after it answered is asked no more."""
    arrays, alone = Arrays(), Arrays(alone=True)
    values = []
    for seed, target in enumerate([0, 1, 0]):
        values.append(arrays.epoch(seed))
        assert seed != 2 or "array-1" not in arrays.here.trainers[0].call_state
        if saved:
            arrays.workers.save({name: tmp_path / name for name in arrays.members}, arrays.members)
        arrays.here.lose = lost
        assert arrays.workers.move({"array-1": target}, arrays.members) == {"array-1": target}
    values.append(arrays.epoch(3))
    assert values == [alone.epoch(seed) for seed in range(4)]


def test_an_array_stays_whose_target_is_gone() -> None:
    arrays, alone = Arrays(), Arrays(alone=True)
    first = arrays.epoch(0)
    arrays.here.revives, arrays.here.lose = False, 1
    second = arrays.epoch(1)
    assert arrays.workers.move(dict.fromkeys(arrays.members, 1), arrays.members) == dict.fromkeys(arrays.members, 0)
    assert [first, second, arrays.epoch(2)] == [alone.epoch(seed) for seed in range(3)]


def test_trials_wait_for_a_device_that_joins_while_all_are_lost() -> None:
    arrays, alone = Arrays(), Arrays(alone=True)
    first = arrays.epoch(0)
    arrays.workers.choose_device = lambda name: next(n for n in range(3) if n not in arrays.workers.lost_devices)
    arrays.here.revives, arrays.here.timeout = False, 60.0
    arrays.here.lose = 0
    second = arrays.epoch(1)
    assert len(arrays.here.devices) == 2
    arrays.here.lose = 1
    third, fourth = arrays.epoch(2), arrays.epoch(3)
    assert arrays.workers.lost_devices == {0, 1}
    assert [first, second, third, fourth] == [alone.epoch(seed) for seed in range(4)]
    assert set(arrays.here.trainers[2].call_state) >= set(arrays.members)
