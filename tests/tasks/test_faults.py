"""An error in a run is raised in the caller, harms no other task, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import hfusion as hf
from hfusion.core.errors import PlanError, SpillError
from hfusion.schedule.plan import Plan
from hfusion.tasks.reading import Reader, end_workers, reading
from hfusion.tasks.task import Step
from tests.trained import BATCHES, EPOCHS, Dropping, Way, assert_same, batches, fused, machine, plain, planned, task

# From Python 3.12 on fork warns where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@dataclass(frozen=True)
class Broken:
    """A loader that says it is as long as any, and does something else at minibatch ``at`` of the second epoch."""

    at: int
    act: Callable[[Pair], Pair]
    epochs: list[None]

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Pair]:
        self.epochs.append(None)
        for index, pair in enumerate(LOADER):
            # Planning reads the first minibatch.
            yield self.act(pair) if len(self.epochs) > 2 and index == self.at else pair


# Small arrays for runs that fail, what the plain loop makes of them, and what a run may not leave behind.

DTYPE = torch.float64
WAY = Way(clip=0.5, accumulate=2)
LOADER = batches(DTYPE)
Pair = tuple[Tensor, Tensor]


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


Result = tuple[Tensor, dict[str, Tensor]]


@cache
def made(index: int) -> tuple[hf.FusedModule, Result]:
    """An array for many runs, each of which puts its state back, and what the plain loop makes of it."""
    torch.manual_seed(index)
    module = fused(dropping)
    return module, plain(module, WAY, LOADER)


def array(index: int) -> hf.FusedModule:
    return made(index)[0]


def by_loop(index: int) -> Result:
    return made(index)[1]


def state_of(module: hf.FusedModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal_states(module: hf.FusedModule, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


@contextmanager
def nothing_left(on: hf.Machine) -> Iterator[None]:
    """No thread, no file, and torch's random numbers as they were."""
    threads, drawn = threading.enumerate(), torch.get_rng_state()
    yield
    assert set(threading.enumerate()) <= set(threads)
    assert not on.disk.exists()
    assert torch.equal(torch.get_rng_state(), drawn)


def breaks(act: Callable[[Pair], Pair], at: int = 1) -> dict[str, Any]:
    """Return the arguments of a task whose loader breaks."""
    return {"loader": Broken(at, act, [])}


def unreadable(pair: Pair) -> Pair:
    raise OSError("the data set is gone")


def interrupt(step: Step) -> None:
    if (step.epoch, step.step) == (1, 1):
        raise ValueError("stop at the second minibatch of epoch 1")


def at_the_end(step: Step) -> None:
    if (step.epoch, step.step) == (EPOCHS - 1, BATCHES - 1):
        raise ValueError("after the last minibatch")


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], type[BaseException], str]] = {
    "loss": (lambda: breaks(lambda pair: (pair[0], pair[1] + 3)), IndexError, "Target . is out of bounds"),
    "loader": (lambda: breaks(unreadable), OSError, "the data set is gone"),
    "first of an epoch": (lambda: breaks(unreadable, 0), OSError, "the data set is gone"),
    "not a pair": (lambda: breaks(lambda pair: (*pair, 1)), PlanError, "'bad': a minibatch of the loader is 3 values"),
    "another shape": (
        lambda: breaks(lambda pair: (pair[0][:, :5], pair[1])),
        RuntimeError,
        "shapes cannot be multiplied",
    ),
    "callback": (lambda: {"callbacks": [interrupt]}, ValueError, "stop at the second minibatch of epoch 1"),
    "last callback": (lambda: {"callbacks": [at_the_end]}, ValueError, "after the last minibatch"),
}


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Every test finds the arrays as they were made."""
    before = [state_of(array(index)) for index in range(3)]
    yield
    for index, state in enumerate(before):
        array(index).load_state_dict(state)


@pytest.fixture(scope="module")
def on(tmp_path_factory: pytest.TempPathFactory) -> hf.Machine:
    """A device, and a host with room for nothing: all state at rest is on the disk. The folder does not exist."""
    return machine(host="1B", disk=tmp_path_factory.mktemp("disk") / "spill")


# Half of them in each mode; where a unit itself fails, in both.
MODES = [*((fault, bool(index % 2)) for index, fault in enumerate(FAULTS)), ("loss", True), ("callback", False)]


@pytest.mark.parametrize(("fault", "resident"), MODES)
def test_a_fault_in_one_task(fault: str, resident: bool, on: hf.Machine) -> None:
    make, kind, words = FAULTS[fault]
    before = [state_of(array(index)) for index in range(3)]
    good, late = (task(array(index), WAY, LOADER, name) for index, name in ((0, "good"), (2, "late")))
    more = make()
    bad = task(array(1), WAY, more.pop("loader", LOADER), "bad", **more)
    tasks = [good, bad, late]
    plan = planned(tasks, on, [2, 3, 1], [resident] * 3)
    if isinstance(bad.loader, Broken):
        bad.loader.epochs.clear()
    with nothing_left(on), pytest.raises(hf.TrainError, match=r"task 'bad' failed: .*; finished: good ") as raised:
        hf.train(tasks, on, "fifo", plan=plan)
    cause, report = raised.value.__cause__, raised.value.report
    assert isinstance(cause, kind)
    with pytest.raises(kind, match=words):
        raise cause
    assert list(report) == ["good"]
    losses, after = by_loop(0)
    assert torch.equal(report["good"].losses, losses)
    assert equal_states(array(0), after)
    assert [type(model) for model in report["good"].models] == [nn.Sequential] * 3
    assert equal_states(array(2), before[2])
    for module, state in zip(map(array, range(3)), before, strict=True):
        assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
        module.load_state_dict(state)
    again = [task(array(index), WAY, LOADER, original.name) for index, original in enumerate(tasks)]
    with nothing_left(on):
        assert_same([array(index) for index in range(3)], again, [by_loop(index) for index in range(3)], on, plan)


def test_a_fault_on_one_of_two_devices(on: hf.Machine) -> None:
    """The other device's task is at its end when the fault comes, and in the report."""
    ended = threading.Event()

    def tell(step: Step) -> None:
        if (step.epoch, step.step) == (EPOCHS - 1, BATCHES - 1):
            ended.set()

    def fail(step: Step) -> None:
        ended.wait()
        raise ValueError("now")

    options = replace(WAY, clip=None)
    expected = plain(array(0), options, LOADER)
    tasks = [
        task(array(0), options, LOADER, "good", callbacks=[tell]),
        task(array(1), options, LOADER, "bad", callbacks=[fail]),
    ]
    two = machine(2, host="1B", disk=on.disk)
    plan = planned(tasks, two, [1, 2], [False, False])
    with nothing_left(on), pytest.raises(hf.TrainError, match=r"'bad' failed: ValueError: now; .*: good ") as raised:
        hf.train(tasks, two, plan=plan)
    assert torch.equal(raised.value.report["good"].losses, expected[0])
    assert equal_states(array(0), expected[1])


@pytest.mark.parametrize("fails", [False, True])
def test_processes_that_read_for_a_loader_are_gone(fails: bool, on: hf.Machine) -> None:
    x, y = (torch.cat(parts) for parts in zip(*LOADER, strict=True))
    loader = DataLoader(TensorDataset(x, y), 6, num_workers=1)
    loader_task = task(array(0), WAY, loader, callbacks=[interrupt] if fails else [], eval_loader=loader)  # type: ignore[arg-type]
    before = multiprocessing.active_children()
    with nothing_left(on), pytest.raises(hf.TrainError) if fails else nullcontext():
        hf.train([loader_task], on)
    assert set(multiprocessing.active_children()) <= set(before)


# Disks that fail, processes that are killed, Ctrl-C: the error reaches the caller, and nothing is left behind.


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """No file of this process can grow beyond ``most`` bytes, as on a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk(on: hf.Machine) -> None:
    """It is full when the second task's state is to go there."""
    large = fused(lambda: nn.Linear(6, 3000))
    before = [state_of(array(0)), state_of(large)]
    tasks = [task(array(0), WAY, LOADER, "small"), task(large, WAY, LOADER, "large")]
    plan = planned(tasks, on, [2, 1], [False, False])
    words = r"cannot spill [\d,]+ bytes to .*: File too large; free space there, .* more host memory"
    with nothing_left(on), small_files(1 << 18), pytest.raises(SpillError, match=words):
        hf.train(tasks, on, plan=plan)
    assert equal_states(array(0), before[0])
    assert equal_states(large, before[1])
    again = [task(array(0), WAY, LOADER, "small"), task(large, WAY, LOADER, "large")]
    expected = [by_loop(0), plain(large, WAY, LOADER)]
    with nothing_left(on):
        assert_same([array(0), large], again, expected, on, plan)


def spilled(disk: str, callback: Callable[[Step], None] | None = None) -> tuple[hf.Task, hf.Machine, Plan]:
    """A task, a machine, and a plan that spills to ``disk``."""
    spilled_task = task(array(0), WAY, LOADER, callbacks=[callback] if callback else [])
    on = machine(host="1B", disk=disk)
    return spilled_task, on, planned([spilled_task], on, [3], [False])


def train_until_killed(disk: str) -> None:
    """Train spilled, say so after a few minibatches, and go no further."""

    def wait(step: Step) -> None:
        if step.step == 2:
            print("training", flush=True)
            threading.Event().wait()

    spilled_task, on, plan = spilled(disk, wait)
    hf.train([spilled_task], on, plan=plan)


def test_a_killed_process(on: hf.Machine) -> None:
    code = "import sys; from tests.tasks.test_faults import train_until_killed; train_until_killed(sys.argv[1])"
    root = Path(__file__).parents[2]
    others: list[Path] = []
    spilled_task, _, plan = spilled(str(on.disk), lambda step: others.extend(on.disk.iterdir()))
    with subprocess.Popen([sys.executable, "-c", code, on.disk], cwd=root, stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == b"training\n"
            (leftover,) = on.disk.iterdir()
            assert_same([array(0)], [spilled_task], [by_loop(0)], on, plan)
            assert leftover in others
        finally:
            child.kill()
    assert len(list(leftover.glob("*.safetensors"))) == 3
    others.clear()
    assert_same([array(0)], [spilled_task], [by_loop(0)], on, plan)
    assert others
    assert leftover not in others
    assert not list(on.disk.iterdir())
    on.disk.rmdir()


@contextmanager
def interruptible(handled: threading.Semaphore) -> Iterator[None]:
    """Ctrl-C as Python handles it, which workers of pytest-xdist do not; releases ``handled``."""

    def handle(number: int, frame: Any) -> None:
        handled.release()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("times", [1, 2, 5])
@pytest.mark.parametrize("resident", [False, True], ids=["spilled", "resident"])
def test_ctrl_c(resident: bool, times: int, on: hf.Machine) -> None:
    handled = threading.Semaphore(0)

    def press(step: Step) -> None:
        if (step.epoch, step.step) == (0, 3):
            main = threading.main_thread().ident
            assert main is not None
            for _ in range(times):
                signal.pthread_kill(main, signal.SIGINT)
                handled.acquire()

    before = state_of(array(0))
    interrupted = task(array(0), WAY, LOADER, callbacks=[press])
    plan = planned([interrupted], on, [3], [resident])
    with nothing_left(on), interruptible(handled), pytest.raises(KeyboardInterrupt):
        hf.train([interrupted], on, plan=plan)
    assert not equal_states(array(0), before)
    storages = [tensor.untyped_storage() for tensor in array(0).state_dict().values()]
    sizes = [tensor.nbytes for tensor in array(0).state_dict().values()]
    assert [storage.nbytes() for storage in storages] == sizes
    assert all(tensor.isfinite().all() for tensor in array(0).state_dict().values())
    going_on = task(array(0), WAY, LOADER)
    assert hf.train([going_on], on)["task"].losses.isfinite().all()
    array(0).load_state_dict(before)
    with nothing_left(on):
        assert_same([array(0)], [task(array(0), WAY, LOADER)], [by_loop(0)], on, plan)


# Loaders: threads and processes that they start end, and each task draws as if it were alone.
# Threads and processes that a loader started end when it is no longer read.


class Numbers(Dataset[int]):
    """Numbers of which one cannot be read."""

    def __init__(self, unreadable: int) -> None:
        self.unreadable = unreadable

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == self.unreadable:
            raise OSError("gone")
        return index


@contextmanager
def nothing_of_a_loader_left() -> Iterator[None]:
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    yield
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= processes


@pytest.mark.parametrize("count", [1, 4])
def test_reading_part_or_all(count: int) -> None:
    """Often enough for a thread that is not awaited to be seen."""
    loader = DataLoader(Numbers(9), 2, num_workers=1)
    for _ in range(3):
        with nothing_of_a_loader_left(), reading(loader) as batches:
            assert [next(batches).tolist() for _ in range(count)] == [[2 * i, 2 * i + 1] for i in range(count)]
            assert count < 4 or next(batches, None) is None


class Hanging(Dataset[int]):
    """Its second number never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if index:
            threading.Event().wait()
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_hang_are_ended(persistent: bool) -> None:
    """They ignore the signals that ask them to end."""
    loader = DataLoader(Hanging(), 1, num_workers=2, persistent_workers=persistent)
    iterators: list[Any] = []

    def items() -> Generator[int, None, None]:
        with reading(loader) as iterator:
            iterators.append(iterator)
            yield from iterator

    number_reader = Reader(items(), "reads", lambda: end_workers(iterators[0]))
    with nothing_of_a_loader_left():
        assert number_reader.next().item() == 0  # type: ignore[attr-defined]
        stopper = threading.Timer(0.1, number_reader.stop)
        stopper.start()
        with pytest.raises(CancelledError):
            number_reader.next()
        stopper.join()
        with suppress(RuntimeError):
            number_reader.close()
    assert loader._iterator is None


# Each task draws as if it were alone.
X, Y = (torch.cat(parts) for parts in zip(*batches(torch.float64, 3), strict=True))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws for every item, as ``draw`` does."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Long enough for the other tasks to draw meanwhile.
        time.sleep(1e-4)
        return X[index] + self.draw(index), Y[index]


def noise(index: int) -> Tensor:
    return torch.randn(6, dtype=torch.float64)


def seeded(index: int) -> Tensor:
    torch.manual_seed(index)
    return noise(index)


ALL = TensorDataset(X, Y)

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(ALL, 5, shuffle=True),
    "own generator": lambda: DataLoader(ALL, 5, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "drawing": lambda: DataLoader(Noisy(noise), 5, shuffle=True),
    "seeding": lambda: DataLoader(Noisy(seeded), 5, shuffle=True),
    "workers": lambda: DataLoader(Noisy(noise), 5, shuffle=True, num_workers=1),
    "persistent workers": lambda: DataLoader(Noisy(noise), 5, shuffle=True, num_workers=1, persistent_workers=True),
}


def test_each_task_draws_as_if_alone() -> None:
    """Bit for bit, at once on several devices, with dropout in all of them."""
    arrays = [fused(Dropping) for _ in LOADERS]
    expected = [plain(array, Way(), make()) for array, make in zip(arrays, LOADERS.values(), strict=True)]
    tasks = [
        task(array, Way(), make(), name.replace(" ", "-"))
        for array, (name, make) in zip(arrays, LOADERS.items(), strict=True)
    ]
    on, count = machine(4), len(tasks)
    plan = planned(tasks, on, [2] * count, [index % 2 == 0 for index in range(count)])
    before = torch.get_rng_state()
    assert_same(arrays, tasks, expected, on, plan)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_loader_that_fails_while_the_run_is_planned(on: hf.Machine) -> None:
    class Missing:
        def __len__(self) -> int:
            return BATCHES

        def __iter__(self) -> Iterator[Any]:
            raise OSError("no such file")

    before = state_of(array(0))
    tasks = [task(array(0), WAY, LOADER, "good"), task(array(1), WAY, Missing(), "bad")]
    with nothing_left(on), pytest.raises(hf.TrainError, match="task 'bad' failed: OSError: no such file") as raised:
        hf.train(tasks, on)
    assert isinstance(raised.value.__cause__, OSError)
    assert not raised.value.report.tasks
    assert equal_states(array(0), before)
