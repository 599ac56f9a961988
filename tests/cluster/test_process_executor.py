"""A cluster of processes gives what one machine gives, bit for bit, whatever is killed, and leaves nothing behind."""

from __future__ import annotations

import enum
import inspect
import multiprocessing
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.core.event_log import read_events
from hfusion.schedule.actions import Act
from tests.cluster.temporary_files import nothing_left, processes_of, shared_memory, use_temporary

pytest.importorskip("cloudpickle")

RATES = [0.1, 0.03, 0.01]


class Net(nn.Module):
    def __init__(self, hidden: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fc, self.norm, self.drop = nn.Linear(5, hidden), nn.BatchNorm1d(hidden), nn.Dropout(0.2)
        self.out = nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.drop(self.norm(self.fc(x)).relu()))


def samples(count: int = 48) -> TensorDataset:
    generator = torch.Generator().manual_seed(9)
    return TensorDataset(torch.randn(count, 5, generator=generator), torch.randint(3, (count,), generator=generator))


def tasks(callback: Any = None, epochs: int = 3) -> list[hf.Task]:
    """Members of two shapes, an own clip, scheduler, seeds given and drawn, shuffled and evaluated."""
    loader = DataLoader(samples(), batch_size=12, shuffle=True)
    heard = () if callback is None else (callback,)
    mixed = hf.Task(
        [Net(hidden, seed) for seed, hidden in enumerate((6, 8, 6))],
        F.cross_entropy,
        lambda params: hf.optim.Adam(params, lr=RATES),
        loader,
        epochs=epochs,
        eval_loader=DataLoader(samples(), batch_size=12),
        name="mixed",
        clip_norm=[0.5, 1.0, 2.0],
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 1, 0.5),
        callbacks=heard,
    )
    plain = hf.Task(
        [Net(4, seed) for seed in range(2)],
        F.cross_entropy,
        lambda params: hf.optim.SGD(params, lr=[0.1, 0.2], momentum=0.9),
        loader,
        epochs=epochs,
        name="plain",
        seed=3,
        callbacks=heard,
    )
    return [mixed, plain]


def machine(folder: Path, devices: int) -> hf.Machine:
    return hf.Machine([hf.Device(f"cpu:{n}", memory="1GiB") for n in range(devices)], host="2GiB", disk=folder)


def assert_same(actual: Any, expected: Any) -> None:
    assert list(actual) == list(expected)
    for name in expected:
        for numbers in ("losses", "eval_losses"):
            pair = getattr(actual[name], numbers), getattr(expected[name], numbers)
            torch.testing.assert_close(*pair, rtol=0, atol=0, equal_nan=True)
        for model, expected_model in zip(actual[name].models, expected[name].models, strict=True):
            assert type(model) is type(expected_model)
            torch.testing.assert_close(model.state_dict(), expected_model.state_dict(), rtol=0, atol=0)


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files of this process and of those that it starts."""
    # Longer than the path of a socket may be.
    return use_temporary(tmp_path / "temporary" / ("long" * 30), monkeypatch)


def alone(folder: Path) -> Any:
    torch.manual_seed(1)
    return hf.train(tasks(), machine(folder, 1))


def test_two_processes_give_what_one_machine_gives(
    tmp_path: Path, temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, heard = shared_memory(), []
    expected = alone(tmp_path)
    torch.manual_seed(1)
    report = hf.train(tasks(heard.append), hf.Cluster(machine(tmp_path, 2)), progress=True)
    assert_same(report, expected)
    assert nothing_left(temporary, before)
    shown = capsys.readouterr().out.splitlines()
    assert 1 <= len(shown) <= 10
    assert re.match(r"(\d+)/\1 minibatches of ", shown[-1])
    steps = [event for event in heard if isinstance(event, hf.Step)]
    assert len(steps) == 3 * 12
    for event in steps:
        row = report[event.task].losses[event.epoch * 4 + event.step, list(event.members)]
        assert torch.equal(event.losses, row)
    assert len([event for event in heard if isinstance(event, hf.Evaluation)]) == 2 * 3
    report.timeline.validate(report.plan)
    assert {span.device for span in report.timeline.actions} == {"cpu:0", "cpu:1"} == set(report.peak)
    assert min(report.peak.values()) > 0


class Slow(TensorDataset):
    """Gives a sample after a while; in a process of a cluster ``at`` so many samples it does something, once."""

    def __init__(self, act: str, at: int, mark: Path, always: bool = False) -> None:
        super().__init__(*samples().tensors)
        self.act, self.at, self.mark, self.always, self.given = act, at, mark, always, 0

    def __getitem__(self, index: Any) -> Any:
        if multiprocessing.parent_process() is not None:
            time.sleep(0.004)
            self.given += 1
            if self.given == self.at and (self.always or not self.mark.exists()):
                self.mark.touch()
                if self.act == "raise":
                    raise ValueError("the data set is gone")
                os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def with_slow(act: str, at: int, mark: Path, callback: Any = None, always: bool = False) -> list[hf.Task]:
    mixed, plain = tasks(callback)
    return [mixed, replace(plain, loader=DataLoader(Slow(act, at, mark, always), batch_size=12, shuffle=True))]


def test_who_is_killed_loses_an_interval_at_most(tmp_path: Path, temporary: Path) -> None:
    """In the ninth minibatch of twelve. Callbacks and logs have each result once."""
    before, heard, results = shared_memory(), list[Any](), list[Any]()
    expected = alone(tmp_path)
    torch.manual_seed(1)
    cluster = hf.Cluster(machine(tmp_path, 2), max_failures=1)
    failing = with_slow("kill", 100, tmp_path / "mark", heard.append)
    options: dict[str, Any] = {"checkpoint": tmp_path / "saves", "every": 5, "on_result": results.append}
    report = hf.train(failing, cluster, **options)
    assert_same(report, expected)
    assert nothing_left(temporary, before)
    steps = [event.epoch * 4 + event.step for event in heard if isinstance(event, hf.Step) and event.task == "plain"]
    assert steps == list(range(12)), "what is trained again is heard once, and nothing is missing"
    keys = [[(type(e), e.task, e.epoch, getattr(e, "step", 0)) for e in events] for events in (heard, results)]
    assert sorted(map(str, keys[0])) == sorted(map(str, keys[1]))
    again = {span.step for span in report.timeline.actions if span.task == "plain" and span.act is Act.FORWARD}
    # The ninth minibatch is read while the eighth is trained. Of what was heard only the fifth has been saved.
    assert min(again) >= 5
    logged = read_events(tmp_path / "saves/logs/arrays/plain.log")
    names = [event.event for event in logged]
    assert (names[0], names[-1]) == ("started", "finished")
    assert (names.count("lost"), names.count("resumed")) == (1, 1)
    progress = [(entry.event, entry.values["minibatch"]) for entry in logged if entry.event in ("trained", "saved")]
    assert len(progress) == len(set(progress))
    assert len({entry.values["process"] for entry in logged}) == 2


def test_a_task_that_fails_leaves_the_others_running(tmp_path: Path, temporary: Path) -> None:
    before = shared_memory()
    expected = alone(tmp_path)
    torch.manual_seed(1)
    failing = with_slow("raise", 5, tmp_path / "mark")
    with pytest.raises(hf.TrainError, match=r"task 'plain' failed: ValueError: the data set is gone") as caught:
        hf.train(failing, hf.Cluster(machine(tmp_path, 1)))
    assert isinstance(caught.value.__cause__, ValueError)
    assert any("in the process of 'cpu:0'" in note for note in caught.value.__cause__.__notes__)
    assert torch.equal(caught.value.report["mixed"].losses, expected["mixed"].losses)
    assert nothing_left(temporary, before)


def interrupt(event: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    before = shared_memory()
    with pytest.raises(KeyboardInterrupt):
        hf.train(with_slow("kill", 1000, tmp_path / "mark", interrupt), hf.Cluster(machine(tmp_path / "spill", 2)))
    assert nothing_left(temporary, before)
    assert not list(tmp_path.glob("spill/*"))


def test_a_driver_that_is_killed_leaves_nothing(tmp_path: Path, temporary: Path) -> None:
    # It imports this file, too.
    from tests.cluster.random_faults import Driver

    before = shared_memory()
    driver = Driver("trained", tmp_path, temporary)
    driver.wait_for_events()
    workers = processes_of("spawn_main", driver.process.pid)
    driver.process.kill()
    driver.process.wait()
    end = time.monotonic() + 10
    while set(workers) & set(processes_of("spawn_main")) and time.monotonic() < end:
        time.sleep(0.05)
    assert len(workers) == 2
    assert not set(workers) & set(processes_of("spawn_main"))
    assert nothing_left(temporary, before)
    assert not list(tmp_path.glob("spill/*"))


def broken_by_a_lock() -> hf.Task:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target) if lock is not None else output

    lock = threading.Lock()
    loader = DataLoader(samples(), batch_size=12)
    return hf.Task(Net(4, 0), loss, lambda params: hf.optim.SGD(params, lr=0.1), loader, name="locked")


class Computed(TensorDataset):
    """Samples that the process of the cluster computes, in the default dtype."""

    def __getitem__(self, index: Any) -> Any:
        return torch.linspace(-1, 1, 5) * index / 48, index % 3


def test_an_array_with_its_optimizer_is_trained_in_place(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float64)
    computed = DataLoader(Computed(*samples().tensors), batch_size=12)

    def make_array_and_task() -> tuple[hf.FusedModule, Any, hf.Task]:
        fused = hf.fuse([Net(4, seed) for seed in range(2)])
        opt = hf.optim.Adam(fused.parameters(), lr=[0.1, 0.2])
        return fused, opt, hf.Task(fused, F.cross_entropy, opt, computed, seed=2)

    (array, opt, task), (expected_array, other, second) = make_array_and_task(), make_array_and_task()
    hf.train(second, machine(tmp_path, 1))
    with pytest.raises(
        hf.TrainError,
        match="task 'locked' failed: PlanError: the task 'locked' cannot go to another process, as pickle fails",
    ) as caught:
        hf.train([task, broken_by_a_lock()], hf.Cluster(machine(tmp_path, 1)))
    assert list(caught.value.report) == ["task"]
    actual = [dict(array.state_dict()), [*opt.state.values()]]
    torch.testing.assert_close(actual, [dict(expected_array.state_dict()), [*other.state.values()]], rtol=0, atol=0)


# Objects from another process come back with the classes and functions of this one.
cloudpickle = pytest.importorskip("cloudpickle")

from hfusion.cluster.messages import pack, unpack  # noqa: E402
from hfusion.device.worker_process import Failure, pack_message, unpack_message  # noqa: E402


class Refused(Exception):
    """Is made with other arguments than its message."""

    def __init__(self, code: int) -> None:
        super().__init__(f"refused with {code}")


class Known(Exception):
    pass


class Color(enum.Enum):
    RED = 1


class Held(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.color = nn.Linear(2, 2), Color.RED


def doubled(x: Tensor) -> Tensor:
    return x * 2


def copied(name: str) -> Any:
    """A second class or function of this module with this name, as another process has that was sent it by value."""
    space = dict(globals())
    exec(inspect.getsource(space[name]), space)
    return space[name]


@pytest.mark.parametrize("name", ["Held", "Color", "doubled"])
def test_classes_and_functions_come_back_as_those_of_this_process(name: str) -> None:
    received, original = copied(name), globals()[name]
    assert received is not original
    assert unpack_message(pack_message(received)) is original


def test_objects_come_back_with_the_classes_of_this_process() -> None:
    sent = copied("Held")()
    sent.color = copied("Color").RED
    back = unpack_message(pack_message(sent))
    assert type(back) is Held
    assert back.color is Color.RED
    assert torch.equal(back.linear.weight, sent.linear.weight)


def test_a_function_that_this_process_lacks_is_an_error() -> None:
    def local() -> None:
        pass

    with pytest.raises(AttributeError, match="<locals>"):
        unpack_message(pack_message(local))


def local_error() -> Exception:
    class Local(Exception):
        pass

    return Local("no")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (KeyError("no"), KeyError, "'no'"),
        (hf.PlanError("no"), hf.PlanError, "no"),
        (copied("Known")("no"), Known, "no"),
        (Refused(3), hf.HFusionError, "Refused: refused with 3"),
        (local_error(), hf.HFusionError, "Local: no"),
        (ValueError(threading.Lock()), hf.HFusionError, "ValueError: <unlocked"),
    ],
    ids=["builtin", "package", "script", "other arguments", "local", "lock"],
)
def test_errors_come_back_with_their_traceback(error: Exception, kind: type[Exception], text: str) -> None:
    back: BaseException = unpack_message(pack_message(Failure(error))).error_of("a process")
    assert type(back) is kind
    assert str(back).startswith(text)
    assert back.__notes__[-1].startswith("in a process:\n")


def tensors() -> dict[str, Tensor]:
    base = torch.arange(12.0).reshape(3, 4)
    marked = nn.Parameter(base.clone())
    marked.no_decay = True  # type: ignore[attr-defined]
    return {
        "plain": base.clone(),
        "trained": base.clone().requires_grad_(),
        "parameter": nn.Parameter(base.clone()),
        "frozen": nn.Parameter(base.clone(), requires_grad=False),
        "marked": marked,
        "number": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "part": base[1:],
        "transposed": base.t(),
        "expanded": torch.zeros(1, 4).expand(3, 4),
        "half": base.to(torch.bfloat16),
        "whole": torch.tensor([[1, -2]]),
        "truth": torch.tensor([True, False]),
        "complex": torch.tensor([1 + 2j]),
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }


@pytest.mark.parametrize("name", tensors())
@pytest.mark.parametrize(
    "sent", [lambda value: unpack(pack("it", value, {})), lambda value: unpack_message(pack_message(value))]
)
def test_tensors_are_what_they_were(name: str, sent: Any) -> None:
    tensor = tensors()[name]
    first, second = sent([tensor, tensor])
    assert first is second
    assert type(first) is type(tensor)
    assert torch.equal(first, tensor)
    for attribute in ("dtype", "shape", "requires_grad"):
        assert getattr(first, attribute) == getattr(tensor, attribute)
    assert first.stride() == tensor.stride()
    assert vars(first) == vars(tensor)
    with torch.no_grad():
        first.untyped_storage().fill_(0)
