"""A cluster of Ray, two nodes on this machine: the results of one machine, bit for bit, and nothing left behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from tests.cluster.ray_environment import RAY_ENVIRONMENT
from tests.cluster.temporary_files import processes_of
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


@pytest.mark.parametrize("nodes", [(1, 0)], indirect=True)
def test_a_run_waits_for_a_node_while_there_is_none(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At the start, and when the only one is killed."""
    expected = alone(tmp_path)

    def come_and_go() -> None:
        wait_until(lambda: "waiting for a device of the Ray cluster" in caplog.text)
        nodes.add()
        wait_until((tmp_path / "first").exists)
        nodes.kill()
        wait_until(lambda: "wait for a device that they fit" in caplog.text)
        nodes.add()

    playing = threading.Thread(target=come_and_go)
    playing.start()
    torch.manual_seed(1)
    waiting = cluster(tmp_path, timeout=600, num_cpus=1)
    report = hf.train(waiting_tasks(tmp_path), waiting, checkpoint=tmp_path / "saves")
    playing.join()
    assert_same(report, expected)
    assert set(report.peak) == {"node1/0", "node2/0"}
    assert nothing_left(tmp_path)


@pytest.fixture
def autoscaled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A head without CPUs, and an autoscaler that may start two nodes of one CPU; there is none at first."""
    ray = pytest.importorskip("ray")
    autoscaler = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    for name, value in (RAY_ENVIRONMENT | autoscaler).items():
        monkeypatch.setenv(name, value)
    # All that Ray's schema asks for; its provider of local nodes ignores the rest.
    lists = "initialization_commands setup_commands head_setup_commands worker_setup_commands head_start_ray_commands "
    lists += "worker_start_ray_commands cluster_synced_files rsync_exclude rsync_filter"
    worker = {"resources": {"CPU": 1, "object_store_memory": 80_000_000}, "node_config": {}, "max_workers": 2}
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    config = {
        **{key: [] for key in lists.split()},
        **{key: {} for key in ("auth", "docker", "file_mounts")},
        "cluster_name": "local",
        "max_workers": 2,
        "provider": {"type": "fake_multinode", "disable_node_updaters": True, "worker_liveness_check": False},
        "available_node_types": {"worker": worker, "ray.head.default": head},
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 5,
        "file_mounts_sync_continuously": False,
    }
    (tmp_path / "cluster.json").write_text(json.dumps(config))
    # The command of this environment, which need not be on the path.
    ray_command = [sys.executable, "-m", "ray.scripts.scripts"]
    start = [*ray_command, "start", "--head", "--num-cpus=0", f"--autoscaling-config={tmp_path / 'cluster.json'}"]
    subprocess.run([*start, "--include-dashboard=false"], check=True)
    ray.init("auto", log_to_driver=False)
    yield
    ray.shutdown()
    subprocess.run([*ray_command, "stop", "--force"], check=True)
    assert actors() == []


def test_an_autoscaler_starts_the_nodes_that_are_asked_for(autoscaled: None, tmp_path: Path) -> None:
    expected = alone(tmp_path)
    torch.manual_seed(1)
    report = hf.train(waiting_tasks(tmp_path), cluster(tmp_path, timeout=600, num_cpus=1, devices=2))
    assert_same(report, expected)
    assert len(report.peak) == 2
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

    monkeypatch.setenv("HFUSION_RATES", "standard")
    expected = sweep(cases.MACHINE)
    assert_same_sweep(sweep(cluster(tmp_path)), expected)
    assert nothing_left(tmp_path)
    assert_same_sweep(sweep(cluster(tmp_path), space=space, directory=tmp_path / "sweep"), expected)
    assert killer.finished.is_set()
    assert nodes.others == []
    assert nothing_left(tmp_path)


@pytest.mark.parametrize("nodes", [(3, 0)], indirect=True)
def test_nodes_that_others_use_and_a_head_without_cpus_are_left_out(
    nodes: Nodes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    expected = alone(tmp_path)
    held = NodeAffinitySchedulingStrategy(nodes.others[0].node_id, soft=False)
    other = ray.remote(threading.Event).options(num_cpus=1, scheduling_strategy=held).remote()
    ray.get(other.is_set.remote())
    torch.manual_seed(1)
    report = hf.train(tasks(), cluster(tmp_path))
    assert_same(report, expected)
    assert len(report.peak) == 1
    assert "the run begins without 1 devices: 1 processes wait for their resources" in caplog.text
    last = NodeAffinitySchedulingStrategy(nodes.others[1].node_id, soft=False)
    another = ray.remote(threading.Event).options(num_cpus=1, scheduling_strategy=last).remote()
    ray.get(another.is_set.remote())
    monkeypatch.setattr("hfusion.cluster.ray_executor._BEGIN", 5.0)
    with pytest.raises(
        hf.PlanError, match=r"no process could begin on the Ray cluster: 2 processes wait for their resources"
    ):
        hf.train(tasks(), cluster(tmp_path))
    assert nothing_left(tmp_path)


class Wanting(list[Any]):
    """A loader that needs a variable of the environment, except in the driver."""

    def __init__(self, driver: int) -> None:
        super().__init__(Raising(driver))
        self.driver = driver

    def __iter__(self) -> Iterator[Any]:
        if os.getpid() != self.driver and os.environ.get("HFUSION_WANTED") != "yes":
            raise ValueError("HFUSION_WANTED is missing")
        return super().__iter__()


def test_a_process_that_is_connected_already(nodes: Nodes, tmp_path: Path) -> None:
    """Its cluster counts, and actors get the environment."""
    _, plain = tasks()
    task = hf.Task(plain.models, plain.loss, plain.optimizer, Wanting(os.getpid()), name="wanting")
    with pytest.raises(hf.PlanError, match="is connected to the Ray cluster at"):
        hf.train([task], cluster(tmp_path, where="10.0.0.1:6379"))
    connected = cluster(tmp_path, where=nodes.cluster.address, runtime_env={"env_vars": {"HFUSION_WANTED": "yes"}})
    assert hf.train([task], connected)["wanting"].losses.isfinite().all()
    assert nothing_left(tmp_path)
