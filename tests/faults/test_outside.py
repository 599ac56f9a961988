"""Disks that fail, processes that are killed, Ctrl-C: the error reaches the caller, and nothing is left behind."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import hfusion as hf
from hfusion.core.errors import SpillError
from hfusion.schedule.plan import Plan
from hfusion.tasks.task import Step
from tests.faults.arrays import LOADER, WAY, Pair, array, by_loop, equal_states, nothing_left, state_of
from tests.trained import BATCHES, EPOCHS, assert_same, fused, machine, plain, planned, task


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


@pytest.mark.parametrize("location", ["file", "file/inside/it"])
def test_a_disk_that_is_no_folder(location: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("taken")
    spilled_task, on = task(array(0), WAY, LOADER), machine(host="1B", disk=tmp_path / location)
    before = state_of(array(0))
    with pytest.raises(SpillError, match=r"cannot make a folder for spilled state in .*file.*as the machine's disk"):
        hf.train([spilled_task], on)
    assert equal_states(array(0), before)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("folder", [False, True], ids=["files", "folder"])
def test_spill_files_that_are_deleted_in_a_run_are_not_missed(folder: bool, on: hf.Machine) -> None:
    """A deleted file stays readable until its mapping ends."""
    deleted: list[Path] = []

    def delete(step: Step) -> None:
        for path in on.disk.rglob("*.safetensors"):
            deleted.append(path)
            path.unlink()
        if folder and on.disk.exists():
            for path in on.disk.iterdir():
                path.rmdir()
            on.disk.rmdir()

    spilled_task = task(array(0), WAY, LOADER, callbacks=[delete])
    with nothing_left(on):
        assert_same([array(0)], [spilled_task], [by_loop(0)], on, planned([spilled_task], on, [3], [False]))
    assert len(deleted) == 3


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
    code = "import sys; from tests.faults import test_outside; test_outside.train_until_killed(sys.argv[1])"
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


@dataclass(frozen=True)
class Blocks(Dataset[Pair]):
    """Sample ``at`` never comes; says so before. A process that reads it ignores what asks it to end."""

    at: int
    process: bool

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Pair:
        if index == self.at:
            if self.process:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            print("blocks", flush=True)
            threading.Event().wait()
        return LOADER[0][0][0], LOADER[0][1][0]


def blocking(where: str) -> DataLoader[Any]:
    """A loader that blocks where its name says: in the thread that reads, in a worker, or while this is planned."""
    # Workers read ahead, but planning does not wait for that.
    data = Blocks(0 if where == "plan" else 10, where != "thread")
    return DataLoader(data, 2, num_workers=int(data.process))


def train_until_blocked(disk: str, *places: str) -> None:
    """Train two tasks on two devices, one of whose loaders blocks; print what is left after each interrupt."""
    # A shell's background job ignores Ctrl-C, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for where in places:
        steady = task(array(0), WAY, LOADER, "steady", epochs=1000)
        tasks = [steady, task(array(1), WAY, blocking(where), "blocks")]  # type: ignore[arg-type]
        try:
            hf.train(tasks, machine(2, disk=disk))
        except KeyboardInterrupt:
            # torch.fx starts the monitor where tqdm is installed.
            remaining = {thread.name for thread in threading.enumerate()} - {"MainThread", "tqdm_monitor"}
            print(f"interrupted, left: {remaining or '{}'} {multiprocessing.active_children()}", flush=True)
    raise KeyboardInterrupt


def test_ctrl_c_while_a_loader_blocks(tmp_path: Path) -> None:
    """It ends the run, and those that read for it; only a thread that never comes back is left to the process's end."""
    code = "import sys; from tests.faults import test_outside; test_outside.train_until_blocked(*sys.argv[1:])"
    places = {"thread": "{'blocks reads'}", "worker": "{'blocks reads'}", "plan": "{'blocks reads'}"}
    command = [sys.executable, "-c", code, str(tmp_path / "disk"), *places]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        guard = threading.Timer(300, child.kill)
        guard.start()
        try:
            assert child.stdout is not None
            for remaining in places.values():
                assert child.stdout.readline() == "blocks\n"
                child.send_signal(signal.SIGINT)
                assert child.stdout.readline() == f"interrupted, left: {remaining} []\n"
            _, errors = child.communicate(timeout=60)
        finally:
            guard.cancel()
            child.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt"), errors
    assert child.returncode == -signal.SIGINT
    assert not (tmp_path / "disk").exists()


def test_progress(capsys: pytest.CaptureFixture[str], on: hf.Machine) -> None:
    tasks = [task(array(0), WAY, LOADER, "shown")]
    with nothing_left(on):
        report = hf.train(tasks, on, progress=True)
    assert torch.equal(report["shown"].losses, by_loop(0)[0])
    printed = capsys.readouterr().out
    assert "shown" in printed
    assert f"{EPOCHS * BATCHES}/{EPOCHS * BATCHES}" in printed
