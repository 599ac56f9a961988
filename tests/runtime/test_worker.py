"""Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import cache
from pathlib import Path
from time import perf_counter, sleep
from typing import cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import SpillError
from hfusion.device.device_queues import Queue
from hfusion.runtime import worker
from hfusion.runtime.task_state import STATE, HostStore, SpillFolder
from hfusion.runtime.training import Training
from hfusion.schedule.actions import Section
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import Candidate, Order, Policy, State
from hfusion.tasks.task import Step
from tests.schedule.compared import COMPARED
from tests.trained import EPOCHS, Way, adamw, assert_same, batches, fused, machine, momentum, plain, planned, task

# Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget.
LOADER = batches(torch.float64, 2)
WAYS = (Way(adamw), Way(momentum, 0.5), Way(adamw, None, 2), Way(momentum, 0.5, 2))


class Small(nn.Module):
    """A tied weight, dropout, a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(torch.tanh(self.first(x)))
        return self.out(self.first(h) + x)


@cache
def fused_and_expected(index: int) -> tuple[hf.FusedModule, tuple[Tensor, dict[str, Tensor]]]:
    torch.manual_seed(index)
    array = fused(Small)
    return array, plain(array, WAYS[index], LOADER)


CUTS = st.tuples(st.integers(1, 5), st.booleans(), st.booleans())


@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(CUTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 600) | st.sampled_from([5_000, 50_000]), min_size=1, max_size=3),
    st.sampled_from(sorted(COMPARED)),
)
def test_any_plan_gives_the_same_bits(cuts: list[tuple[int, bool, bool]], spare: list[int], policy: str) -> None:
    """Each device has some bytes more than the largest task needs."""
    arrays, expected = zip(*(fused_and_expected(index) for index in range(len(cuts))), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(len(spare))
    plan = planned(tasks, on, *map(list, zip(*cuts, strict=True)))
    budgets = {name: size + more for (name, size), more in zip(plan.devices.items(), spare, strict=True)}
    assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), COMPARED[policy])


def thirds(order: Order, state: State) -> Candidate | None:
    """Two units of a task, then another's."""
    running = state.running
    return running if running is not None and running.unit % 3 else state.waiting.first(state.budget) or running


def test_tasks_may_leave_in_the_midst_of_a_minibatch() -> None:
    arrays, expected = zip(*(fused_and_expected(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine()
    plan = planned(tasks, on, [5, 5, 5], [False] * 3)
    budgets = {name: size + 50_000 for name, size in plan.devices.items()}
    policy = Policy("thirds", "two units of a task, then another's", lambda candidate: candidate.since, thirds)
    assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), policy)


def test_a_device_too_small_for_some_tasks_runs_the_others() -> None:
    arrays, expected = zip(*(fused_and_expected(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(3)
    plan = planned(tasks, on, [1, 3, 5], [True, False, False])
    needs = sorted(task_plan.device_bytes for task_plan in plan.tasks)
    small = Plan(plan.tasks, dict(zip(plan.devices, (needs[0] - 1, needs[0], needs[2]), strict=True)), 1.0, 1.0)
    report = assert_same(arrays, tasks, expected, on, small)
    assert report.peak["cpu:0"] == 0
    assert {action.device for action in report.timeline.actions} <= {"cpu:1", "cpu:2"}


def test_tasks_on_two_devices_run_at_the_same_time() -> None:
    """Each waits for the other in the midst of its minibatches."""
    meet = threading.Barrier(2, timeout=60)
    arrays, expected = zip(*(fused_and_expected(index) for index in range(2)), strict=True)

    def wait(step: Step) -> None:
        if step.step == 0 and step.epoch == 0:
            meet.wait()

    tasks = [task(array, WAYS[index], LOADER, f"t{index}", callbacks=[wait]) for index, array in enumerate(arrays)]
    on = machine(2)
    assert_same(arrays, tasks, expected, on, planned(tasks, on, [2, 3], [True, False]))


@pytest.mark.parametrize("resident", [False, True], ids=["spilled", "resident"])
def test_gradients_that_were_there_before_play_no_part(resident: bool) -> None:
    array, expected = fused_and_expected(0)
    for param in array.parameters():
        param.grad = torch.ones_like(param)
    trained_task, on = task(array, WAYS[0], LOADER), machine()
    try:
        assert_same([array], [trained_task], [expected], on, planned([trained_task], on, [3], [resident]))
    finally:
        array.zero_grad()


def test_a_task_that_has_finished_is_at_home_though_another_fails_before_it_has_left() -> None:
    """Its last callback is still running when the other task fails: what it changed is evicted all the same."""
    ended, on = threading.Event(), machine(2)
    arrays, expected = zip(*(fused_and_expected(index) for index in (0, 2)), strict=True)
    before = [{name: tensor.clone() for name, tensor in array.state_dict().items()} for array in arrays]

    def tell(step: Step) -> None:
        if (step.epoch, step.step) == (EPOCHS - 1, len(LOADER) - 1):
            ended.set()
            sleep(0.2)

    def fail(step: Step) -> None:
        ended.wait()
        raise ValueError("now")

    callbacks = zip(("good", "bad"), (0, 2), (tell, fail), arrays, strict=True)
    tasks = [task(array, WAYS[index], LOADER, name, callbacks=[call]) for name, index, call, array in callbacks]
    try:
        with pytest.raises(hf.TrainError, match="'bad' failed: ValueError: now; finished before: good ") as raised:
            hf.train(tasks, on, plan=planned(tasks, on, [2, 2], [False, False]))
        losses, after = expected[0]
        assert torch.equal(raised.value.report["good"].losses, losses)
        assert all(torch.equal(tensor, after[name]) for name, tensor in arrays[0].state_dict().items())
    finally:
        for array, state in zip(arrays, before, strict=True):
            array.load_state_dict(state)


def test_the_timeline_begins_with_the_run() -> None:
    array, expected = fused_and_expected(0)
    trained_task, on = task(array, WAYS[0], LOADER), machine()
    plan = planned([trained_task], on, [3], [False])
    begun = perf_counter()
    report = assert_same([array], [trained_task], [expected], on, plan)
    elapsed = perf_counter() - begun
    assert report.timeline.actions[0].start >= 0
    assert report.timeline.makespan <= elapsed


class Nothing:
    """A training in which nothing is left to do."""

    over = True

    def stop(self) -> None:
        return


def test_nothing_begins_before_what_the_engine_has_heard_of() -> None:
    """Two lanes may report their ends in reverse order."""
    array, _ = fused_and_expected(0)
    (plan,) = planned([task(array, WAYS[0], LOADER)], machine(), [1], [True]).tasks
    device, training = ("cpu", torch.device("cpu")), cast(Training, Nothing())
    with worker.DeviceWorker([device], [training], lambda task, unit: None, lambda task, unit: None) as device_worker:
        for ended in (2.0, 1.0):
            device_worker.ended.put(worker._Job(0, lambda: None, (), 0.0, ended=ended))
            device_worker.wait()
        ticket = device_worker.begin(0, 0, plan.unit(0), plan.actions_of(plan.unit(0)).computes[0], ())
        assert device_worker.wait() == (ticket,)
    assert ticket.started == 2.0


@pytest.mark.parametrize("lane", ["in", "compute", "out"])
def test_an_error_of_a_device_is_that_of_its_task(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """A device reports its errors when a thread waits for it."""

    def lost(self: Queue) -> None:
        if threading.current_thread().name == f"cpu:0 {lane}":
            raise RuntimeError("the device is lost")

    array, _ = fused_and_expected(0)
    on, trained_task = machine(), task(array, WAYS[0], LOADER, "t")
    plan = planned([trained_task], on, [3], [False])
    monkeypatch.setattr(Queue, "wait", lost)
    with pytest.raises(hf.TrainError, match="'t' failed: RuntimeError: the device is lost"):
        hf.train([trained_task], on, plan=plan)


WEIGHTS, OPTIMIZER, GRADIENTS = STATE
ALIGNMENT = 64


def tensors() -> dict[Section, dict[str, Tensor]]:
    """Sizes that are no multiples of the alignment, a dtype of one byte, an empty tensor, a number."""
    draw = torch.Generator().manual_seed(0)
    return {
        WEIGHTS: {
            "w": torch.randn(3, 5, generator=draw, dtype=torch.float64),
            "flags": torch.tensor([True, False, True]),
            "none": torch.empty(0, 4),
            "t": torch.randn(5, 2, generator=draw).T,
        },
        OPTIMIZER: {"w exp_avg": torch.randn(3, 5, generator=draw, dtype=torch.float64)},
        GRADIENTS: {"w": torch.randn(17, generator=draw).bfloat16(), "n": torch.tensor(7)},
    }


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> HostStore:
    return HostStore(tensors(), pinned=False, file=tmp_path / "0.safetensors" if request.param == "disk" else None)


def test_the_file_is_a_safetensors_file(tmp_path: Path) -> None:
    file = tmp_path / "0.safetensors"
    home = HostStore(tensors(), pinned=False, file=file)
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    size = sum(home.layout.sizes)
    assert header == {"shard": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    assert (8 + length) % ALIGNMENT == 0
    assert len(data) == 8 + length + size
    home.views[WEIGHTS]["w"].fill_(1)
    raw = torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.float64, count=15, offset=8 + length)
    assert raw.tolist() == [1.0] * 15


def test_a_file_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    words = r"cannot spill [\d,]+ bytes to .*gone/0.safetensors: No such file.*free space.*another folder.*more host"
    with pytest.raises(SpillError, match=words):
        HostStore(tensors(), pinned=False, file=tmp_path / "gone" / "0.safetensors")


@pytest.mark.parametrize("exists", [False, True])
def test_the_folder_is_there_from_the_first_file_to_the_end(tmp_path: Path, exists: bool) -> None:
    parent = tmp_path / "spill"
    if exists:
        parent.mkdir()
    folder = SpillFolder(parent)
    assert parent.exists() is exists
    files = [folder.file("0-0"), folder.file("0-1")]
    assert [file.name for file in files] == ["0-0.safetensors", "0-1.safetensors"]
    assert len({file.parent for file in files}) == 1
    assert files[0].parent.parent == parent
    files[0].write_bytes(b"x")
    folder.close()
    assert parent.exists() is exists
    assert not files[0].parent.exists()
    folder.close()


def test_a_parent_that_others_use_meanwhile_stays(tmp_path: Path) -> None:
    parent = tmp_path / "spill"
    folder = SpillFolder(parent)
    folder.file("0-0")
    (parent / "other").touch()
    folder.close()
    assert [path.name for path in parent.iterdir()] == ["other"]


@pytest.mark.parametrize("location", ["file", "file/inside/it"])
def test_a_folder_that_cannot_be_made(tmp_path: Path, location: str) -> None:
    (tmp_path / "file").touch()
    folder = SpillFolder(tmp_path / location)
    with pytest.raises(SpillError, match=r"cannot make a folder for spilled state in .*file.*: .*; name a folder"):
        folder.file("0-0")
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
