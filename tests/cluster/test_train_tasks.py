"""`hf.train` in a process for each device: the same results, callbacks, answers and saves as in one process."""

from __future__ import annotations

import itertools
import multiprocessing
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.cluster.driver import Placement
from tests.cluster.temporary_files import emptied_temporary
from tests.cluster.test_process_executor import Net, assert_same, machine, samples, tasks

pytest.importorskip("cloudpickle")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder for temporary files; no process and no file is left in the end."""
    yield from emptied_temporary(tmp_path / "temporary", monkeypatch)


def trained(task_list: list[hf.Task], folder: Path, processes: int, **options: Any) -> Any:
    torch.manual_seed(1)
    return hf.train(task_list, machine(folder, 2), processes=processes, **options)


def stopping(heard: list[Any]) -> Callable[[Any], Any]:
    """Stops members by what they lost, and all of one task in its second epoch."""

    def on_result(result: Any) -> Any:
        heard.append((type(result), result.task, result.epoch, result.members, result.losses))
        if isinstance(result, hf.Evaluation):
            return result.losses.mean(0) > 1.1
        return result.task == "plain" and (result.epoch, result.step) == (1, 2)

    return on_result


def by_array(heard: list[Any]) -> dict[Any, list[Any]]:
    results: dict[Any, list[Any]] = {}
    for kind, task, epoch, members, losses in heard:
        results.setdefault((task, members), []).append((kind, epoch, losses.nan_to_num(-1.0).tolist()))
    return results


def test_two_processes_give_what_one_gives(tmp_path: Path) -> None:
    """Callbacks hear the same in the same order, answers count from the next minibatch on."""
    heard: dict[str, list[Any]] = {"one": [], "two": [], "one asked": [], "two asked": []}

    def make_tasks(name: str) -> list[hf.Task]:
        def log(event: Any) -> None:
            heard[name].append((type(event), event.task, event.epoch, event.members, event.losses))

        return tasks(log)

    expected = trained(make_tasks("one"), tmp_path, 1, on_result=stopping(heard["one asked"]))
    report = trained(make_tasks("two"), tmp_path, 2, on_result=stopping(heard["two asked"]))
    assert_same(report, expected)
    assert [report[name].stopped for name in expected] == [expected[name].stopped for name in expected]
    assert expected["plain"].stopped
    assert by_array(heard["two"]) == by_array(heard["one"])
    assert by_array(heard["two asked"]) == by_array(heard["one asked"])
    assert {span.device for span in report.timeline.actions} == {"cpu:0", "cpu:1"}


class Broken(Exception):
    pass


def breaking(at: int) -> Callable[[Any], None]:
    def callback(event: Any) -> None:
        if isinstance(event, hf.Step) and event.task == "mixed" and (event.epoch, event.step) == divmod(at, 4):
            raise Broken("enough")

    return callback


def test_a_run_that_broke_off_goes_on_in_other_processes(tmp_path: Path) -> None:
    """Bit for bit. In one process the error of a callback ends the run; in several, the other arrays are trained."""
    whole: list[int] = []
    expected = trained(tasks(lambda event: whole.append(event.epoch)), tmp_path, 1)
    saves = {"checkpoint": tmp_path / "saves", "every": 2}
    with pytest.raises(hf.TrainError, match=r"task 'mixed(\.[01])?' failed: Broken: enough; finished") as caught:
        trained(tasks(breaking(9)), tmp_path, 1, **saves)
    assert isinstance(caught.value.__cause__, Broken)
    assert {path.name.split(".")[0] for path in (tmp_path / "saves").iterdir()} <= {"mixed", "plain", "logs"}
    heard: list[int] = []
    again = trained(tasks(lambda event: heard.append(event.epoch)), tmp_path, 2, **saves)
    assert_same(again, expected)
    # How far the other arrays were at the break depends on the machine.
    assert len(heard) < len(whole)


def test_an_array_is_trained_in_place_and_generators_go_on(tmp_path: Path) -> None:
    def make_tasks() -> list[Any]:
        new_tasks = []
        for seed in range(2):
            fused = hf.fuse([Net(4, seed), Net(4, seed + 2)])
            draws = torch.Generator().manual_seed(seed)
            loader = DataLoader(samples(), batch_size=12, shuffle=True, generator=draws)
            optimizer = hf.optim.Adam(fused.parameters(), lr=[0.1, 0.2])
            new_tasks.append(hf.Task(fused, F.cross_entropy, optimizer, loader, name=f"task{seed}", epochs=2))
        return new_tasks

    trained_tasks, expected_tasks = make_tasks(), make_tasks()
    trained(trained_tasks, tmp_path, 2)
    trained(expected_tasks, tmp_path, 1)
    actual, expected = (
        [(dict(t.models.state_dict()), [*t.optimizer.state.values()], t.loader.generator.get_state()) for t in made]
        for made in (trained_tasks, expected_tasks)
    )
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


SCRIPT = """
import torch, torch.nn.functional as F
from torch import nn
import hfusion as hf
print("begun")
SCALE = 2.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
    def forward(self, x):
        return self.linear(x) * SCALE
def loss(output, target):
    return F.mse_loss(output, target) * SCALE
def made():
    torch.manual_seed(0)
    loader = [(torch.ones(4, 3), torch.ones(4, 2))] * 3
    return [hf.Task([Net(), Net()], loss, lambda p: hf.optim.SGD(p, lr=0.1), loader, name=name) for name in "ab"]
machine = hf.Machine([hf.Device(f"cpu:{n}", memory="256MiB") for n in range(2)], host="1GiB", disk=FOLDER)
reports = []
for count in (1, 2):
    reports.append(hf.train(made(), machine, processes=count))
for name in "ab":
    for one, other in zip(*(report[name].models for report in reports)):
        assert type(one) is type(other) is Net
        assert torch.equal(one.linear.weight, other.linear.weight)
print("the same")
"""


@pytest.mark.parametrize("way", ["file", "-c"])
def test_a_script_without_a_guard(way: str, tmp_path: Path) -> None:
    """Its classes are its own, and it runs once."""
    path, text = tmp_path / "script.py", SCRIPT.replace("FOLDER", repr(str(tmp_path)))
    path.write_text(text)
    command = [str(path)] if way == "file" else ["-c", text]
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.stdout == "begun\nthe same\n"
    assert multiprocessing.active_children() == []


# Placing arrays: near the least that is possible, every array once, and none lost with a device.
def simulated(
    seconds: Sequence[float], devices: int, factor: Callable[[int], float] = lambda device: 1.0
) -> tuple[float, list[list[int]]]:
    """Return when all arrays have ended, and those of each device. ``factor``: how much slower a device is."""
    placement, now = Placement(seconds, [1] * devices, 0), 0.0
    ends: list[tuple[float, int]] = []
    taken: list[list[int]] = [[] for _ in range(devices)]
    while not placement.over:
        for device, number in placement.starts():
            taken[device].append(number)
            heappush(ends, (now + factor(device) * seconds[number], device))
        now, device = heappop(ends)
        assert placement.end(device) == taken[device][-1]
    assert sorted(itertools.chain.from_iterable(taken)) == list(range(len(seconds)))
    return now, taken


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=7), st.integers(1, 3))
@settings(max_examples=50)
def test_longest_first_is_within_a_third_of_the_best(seconds: list[float], devices: int) -> None:
    best = min(
        max(sum(s for s, d in zip(seconds, where, strict=True) if d == device) for device in range(devices))
        for where in itertools.product(range(devices), repeat=len(seconds))
    )
    # Graham's bound.
    assert simulated(seconds, devices)[0] <= best * (4 / 3 - 1 / (3 * devices)) * (1 + 1e-9)


def test_a_slow_device_takes_less() -> None:
    """Nothing waits behind it: the idle one takes what is left."""
    end, taken = simulated([1.0] * 12, 2, lambda device: (1.0, 5.0)[device])
    assert [len(numbers) for numbers in taken] == [10, 2]
    assert end == 10


def test_an_array_that_exceeds_a_device_goes_to_a_larger_one() -> None:
    placement = Placement([5.0, 1.0], [10, 20], 0)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.exceed(0)
    assert list(placement.starts()) == []
    assert placement.end(1) == 1
    assert list(placement.starts()) == [(1, 0)]
    assert not placement.exceed(1)
    assert placement.over


def test_the_arrays_of_a_task_that_is_divided_are_taken_too() -> None:
    placement = Placement([3.0, 2.0], [1, 1, 1], 0)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.add(1.0) == 2
    assert list(placement.starts()) == [(2, 2)]


@given(st.randoms(use_true_random=False), st.integers(1, 25), st.integers(1, 4), st.booleans())
@settings(max_examples=100)
def test_every_array_ends_once_whatever_is_lost(draw: random.Random, arrays: int, devices: int, returns: bool) -> None:
    """Devices are lost at random, and what arrays really take is not what was estimated."""
    seconds, now = [draw.uniform(1, 5) for _ in range(arrays)], 0.0
    placement = Placement(seconds, [1] * devices, 2)
    ends: list[tuple[float, int]] = []
    done, given_up, lost = [], [], set[int]()
    while not placement.over:
        for device, number in placement.starts():
            assert device not in lost
            heappush(ends, (now + draw.uniform(0.5, 2) * seconds[number], device))
        now, device = heappop(ends)
        if draw.random() < 0.2:
            back = returns or len(lost) == devices - 1
            given_up += placement.lose(device, back=back)
            lost |= set() if back else {device}
        else:
            done.append(placement.end(device))
    assert sorted(done + given_up) == list(range(arrays))
    assert all(placement.failures[number] == 3 for number in given_up)


def test_the_last_device_takes_all_with_it() -> None:
    placement = Placement([1.0, 1.0, 1.0], [1, 1], 5)
    assert list(placement.starts()) == [(0, 0), (1, 1)]
    assert placement.lose(0, back=False) == []
    assert placement.stranded == []
    assert placement.lose(1, back=False) == []
    assert not placement.over
    assert list(placement.starts()) == []
    assert placement.give_up_stranded() == [0, 1, 2]
    assert placement.over


def test_a_device_that_joins_takes_what_waits_and_what_is_stranded() -> None:
    placement = Placement([1.0, 2.0, 4.0], [10], 5)
    assert list(placement.starts()) == [(0, 2)]
    placement.join(5)
    assert list(placement.starts()) == [(1, 1)]
    # The largest array needs the first device.
    assert placement.lose(0, back=False) == []
    assert placement.end(1) == 1
    assert list(placement.starts()) == [(1, 2)]
    assert not placement.exceed(1)
    assert list(placement.starts()) == [(1, 0)]
