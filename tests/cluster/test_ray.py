"""A cluster of Ray, two nodes on this machine: the results of one machine, bit for bit, and nothing left behind."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from tests.cluster.temporary_files import RAY_ENVIRONMENT, processes_of
from tests.cluster.test_process_executor import alone, assert_same, interrupt, samples, tasks

pytestmark = [
    pytest.mark.cluster,
    # Of ray itself, about what a later version will do.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::ResourceWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


class Nodes:
    """A head with ``head`` CPUs, and nodes beside it with one each."""

    def __init__(self, count: int, head: int = 1) -> None:
        from ray.cluster_utils import Cluster

        options: dict[str, Any] = {"num_cpus": 1, "object_store_memory": 80_000_000}
        first = {**options, "num_cpus": head, "include_dashboard": False}
        # Handlers of signals would allow the main thread only to add nodes.
        self.cluster = Cluster(initialize_head=True, head_node_args=first, shutdown_at_exit=False)
        self._options = options
        self.others = [self.cluster.add_node(**options) for _ in range(count - 1)]

    def add(self) -> None:
        """Another one, first of those beside the head."""
        self.others.insert(0, self.cluster.add_node(**self._options))

    def kill(self) -> None:
        """The last of those beside the head."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)


@pytest.fixture
def nodes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    ray = pytest.importorskip("ray")
    for name, value in RAY_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    started = Nodes(*getattr(request, "param", (2,)))
    ray.init(address=started.cluster.address, log_to_driver=False)
    yield started
    ray.shutdown()
    started.cluster.shutdown()
    assert actors() == []


def actors() -> list[int]:
    """The running processes of actors; waits a while for those that have been asked to end."""
    for _ in range(50):
        processes = processes_of("DeviceActor")
        if not processes:
            break
        time.sleep(0.2)
    return processes


def cluster(folder: Path, **options: Any) -> hf.Cluster:
    return hf.Cluster(memory="1GiB", host="1GiB", disk=folder / "spill", **options)


def nothing_left(folder: Path) -> bool:
    return actors() == [] and not list(folder.glob("spill/*"))


def test_two_nodes_give_what_one_machine_gives(nodes: Nodes, tmp_path: Path) -> None:
    expected = alone(tmp_path)
    torch.manual_seed(1)
    report = hf.train(tasks(), cluster(tmp_path), progress=True)
    assert_same(report, expected)
    report.timeline.validate(report.plan)
    assert {span.device for span in report.timeline.actions} == {"node0/0", "node1/0"}
    assert nothing_left(tmp_path)
    # A second call, with one task that fails.
    torch.manual_seed(1)
    with pytest.raises(hf.TrainError, match="ValueError: the data set is gone") as caught:
        hf.train(raising(tmp_path), cluster(tmp_path))
    assert torch.equal(caught.value.report["mixed"].losses, expected["mixed"].losses)
    assert nothing_left(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        hf.train(tasks(interrupt), cluster(tmp_path))
    assert nothing_left(tmp_path)
    with pytest.raises(hf.PlanError, match="no process could begin on the Ray cluster: 0 processes wait"):
        hf.train(tasks(), cluster(tmp_path, resources={"a device of another kind": 1.0}))


class Raising(list[Any]):
    """A loader that breaks in the processes of actors only."""

    def __init__(self, driver: int) -> None:
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


class WaitsForAnother(TensorDataset):
    """Gives nothing to the first process of a cluster that asks until a second one asks."""

    def __init__(self, folder: Path) -> None:
        super().__init__(*samples().tensors)
        self.driver, self.first, self.second = os.getpid(), folder / "first", folder / "second"

    def __getitem__(self, index: Any) -> Any:
        if os.getpid() != self.driver:
            if not self.first.exists():
                self.first.write_text(str(os.getpid()))
            if self.first.read_text() != str(os.getpid()):
                self.second.touch()
            wait_until(self.second.exists)
        return super().__getitem__(index)


def wait_until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 600
    while not is_so():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.1)


def waiting_tasks(folder: Path) -> list[hf.Task]:
    loader = DataLoader(WaitsForAnother(folder), batch_size=12, shuffle=True)
    return [replace(task, loader=loader) for task in tasks()]


@pytest.mark.parametrize("nodes", [(1,)], indirect=True)
def test_a_node_that_joins_trains_what_waits(nodes: Nodes, tmp_path: Path) -> None:
    """The first array cannot go on before another node trains one."""
    expected = alone(tmp_path)

    def join() -> None:
        wait_until((tmp_path / "first").exists)
        nodes.add()

    joining = threading.Thread(target=join)
    joining.start()
    torch.manual_seed(1)
    report = hf.train(waiting_tasks(tmp_path), cluster(tmp_path))
    joining.join()
    assert_same(report, expected)
    assert {span.device for span in report.timeline.actions} == {"node0/0", "node1/0"} == set(report.peak)
    report.timeline.validate(report.plan)
    assert nothing_left(tmp_path)


@pytest.mark.parametrize(("nodes", "replaced"), [((3,), False), ((2, 0), True)], indirect=["nodes"])
def test_a_node_that_is_killed_loses_an_interval_at_most(nodes: Nodes, replaced: bool, tmp_path: Path) -> None:
    """Others go on with its arrays, or, where it was the only one that trains, a node that has joined before."""
    expected = alone(tmp_path)
    killed: list[Any] = []

    def kill(event: Any) -> None:
        if not killed and isinstance(event, hf.Step) and event.epoch == 1:
            killed.append(event)
            if replaced:
                nodes.add()
            nodes.kill()

    torch.manual_seed(1)
    report = hf.train(tasks(kill), cluster(tmp_path), checkpoint=tmp_path / "saves", every=1)
    assert_same(report, expected)
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

    expected = sweep(cases.MACHINE)
    assert_same_sweep(sweep(cluster(tmp_path)), expected)
    assert nothing_left(tmp_path)
    assert_same_sweep(sweep(cluster(tmp_path), space=space, directory=tmp_path / "sweep"), expected)
    assert killer.finished.is_set()
    assert nodes.others == []
    assert nothing_left(tmp_path)
