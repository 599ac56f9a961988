"""A cluster of Ray, two nodes on this machine: the results of one machine, bit for bit, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hfusion as hf
from tests.cluster.test_process_executor import alone, assert_same, interrupt, tasks

pytestmark = [
    pytest.mark.cluster,
    # Of ray itself, about what a later version will do.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Nodes:
    """A head and nodes beside it, each with one CPU."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
        self.cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
        self.others = [self.cluster.add_node(**options) for _ in range(count - 1)]

    def kill(self) -> None:
        """One of those beside the head."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    found = Nodes(getattr(request, "param", 2))
    ray.init(address=found.cluster.address, log_to_driver=False)
    yield found
    ray.shutdown()
    found.cluster.shutdown()
    assert actors() == []


def actors() -> list[str]:
    """The processes of actors that are there, at most a while after they were told to end."""
    for _ in range(50):
        found = []
        for entry in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                text = entry.read_bytes().decode(errors="replace")
            except OSError:
                continue
            if "DeviceActor" in text:
                found.append(text)
        if not found:
            break
        time.sleep(0.2)
    return found


def cluster(folder: Path, **options: Any) -> hf.Cluster:
    return hf.Cluster(memory="1GiB", host="1GiB", disk=folder / "spill", **options)


def nothing_left(folder: Path) -> bool:
    return actors() == [] and not list(folder.glob("spill/*"))


def test_two_nodes_give_what_one_machine_gives(nodes: Nodes, tmp_path: Path) -> None:
    wanted = alone(tmp_path)
    torch.manual_seed(1)
    found = hf.train(tasks(), cluster(tmp_path), progress=True)
    assert_same(found, wanted)
    found.timeline.validate(found.plan)
    assert {span.device for span in found.timeline.actions} == {"node0/0", "node1/0"}
    assert nothing_left(tmp_path)
    # A second call, with one task that fails.
    torch.manual_seed(1)
    with pytest.raises(hf.TrainError, match="ValueError: the data set is gone") as caught:
        hf.train(raising(tmp_path), cluster(tmp_path))
    assert torch.equal(caught.value.report["mixed"].losses, wanted["mixed"].losses)
    assert nothing_left(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        hf.train(tasks(interrupt), cluster(tmp_path))
    assert nothing_left(tmp_path)
    with pytest.raises(hf.PlanError, match="no node of the Ray cluster has"):
        hf.train(tasks(), cluster(tmp_path, resources={"a device of another kind": 1.0}))


class Raising(list[Any]):
    """A loader that breaks in the processes of actors only."""

    def __init__(self, driver: int) -> None:
        from tests.cluster.test_process_executor import samples

        x, y = samples().tensors
        super().__init__(zip(x.chunk(4), y.chunk(4), strict=True))
        self.driver = driver

    def __iter__(self) -> Iterator[Any]:
        for index, pair in enumerate(super().__iter__()):
            if os.getpid() != self.driver and index == 3:
                raise ValueError("the data set is gone")
            yield pair


def raising(folder: Path) -> list[hf.Task]:
    mixed, plain = tasks()
    return [mixed, hf.Task(plain.models, plain.loss, plain.optimizer, Raising(os.getpid()), name="raising")]


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_node_that_is_killed_loses_an_interval_at_most(nodes: Nodes, tmp_path: Path) -> None:
    wanted = alone(tmp_path)
    killed: list[Any] = []

    def kill(event: Any) -> None:
        if not killed and isinstance(event, hf.Step) and event.epoch == 1:
            killed.append(event)
            nodes.kill()

    torch.manual_seed(1)
    found = hf.train(tasks(kill), cluster(tmp_path), checkpoint=tmp_path / "saves", every=1)
    assert_same(found, wanted)
    assert killed
    assert nothing_left(tmp_path)


def test_a_sweep_on_two_nodes_gives_what_one_machine_gives(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of them is killed while it trains, after the ninth trial was asked."""
    pytest.importorskip("optuna")
    from tests.tune import cases
    from tests.tune.test_cluster import assert_same_sweep, sweep

    killer = threading.Timer(0.1, nodes.kill)

    def space(trial: Any) -> dict[str, Any]:
        if trial.number == 8:
            killer.start()
        return cases.space(trial)

    monkeypatch.setenv("HFUSION_RATES", "standard")
    wanted = sweep(cases.MACHINE)
    assert_same_sweep(sweep(cluster(tmp_path)), wanted)
    assert nothing_left(tmp_path)
    assert_same_sweep(sweep(cluster(tmp_path), space=space, directory=tmp_path / "sweep"), wanted)
    assert killer.finished.is_set()
    assert nodes.others == []
    assert nothing_left(tmp_path)
