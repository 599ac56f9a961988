"""Values of programs: sizes that are assumed, ragged stacks, seeds of members, keys of what a function reads."""

from __future__ import annotations

import ast
import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.calls import Ragged
from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned, run_folder, temporary_folder
from hfusion.core.event_log import EventLog, first_line, read_events
from hfusion.core.fingerprint import read_state
from hfusion.core.guards import Assumptions, Guards
from hfusion.core.member_random import MemberSeeds
from tests.alone import Branch, Member, Own, close, normal
from tests.forwards.outside import READS
from tests.forwards.table import Sevenfold


# The fingerprint of the state that a function reads changes with each value that it reads.
@pytest.mark.parametrize("kind", READS)
def test_another_value_gives_another_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    put(1.0)
    before = read_state(read)
    put(0.5)
    # None: more than can be compared, so that nothing is reused.
    assert before is None or read_state(read) != before
    put(1.0)
    assert read_state(read) == before


# Assumptions of a trace about sizes, checked on numbers and on another trace's symbols.
class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).sum(1) + (y if y.shape[0] > 4 else y * 2).mean(0)


@pytest.mark.parametrize(
    ("shapes", "holds"),
    [
        ([(3, 8), (6, 4)], True),
        ([(2, 10), (7, 5)], True),
        ([(2, 9), (7, 5)], False),
        ([(2, 10), (7, 4)], False),
        ([(2, 10), (3, 5)], False),
        ([(1, 10), (7, 5)], False),
        ([(2, 10), (0, 5)], False),
    ],
)
def test_sizes(shapes: list[tuple[int, ...]], holds: bool) -> None:
    captured = capture(Halves(), (torch.ones(3, 8), torch.ones(6, 4)), {}, dims=[{1}, {1}])
    assert captured.guards(shapes) is holds
    assert isinstance(captured.guards, Guards)
    assumed = captured.guards.assumptions()
    assert assumed(shapes) is holds
    # They are plain values.
    assert Assumptions(*ast.literal_eval(repr((assumed.sizes, assumed.code)))) == assumed


# Tensors of different sizes, one per member, and what may be done with them.
def ragged(*sizes: int) -> Ragged:
    return Ragged([torch.arange(size * 2.0).view(size, 2) for size in sizes])


def test_it_is_a_sequence_of_the_members_tensors() -> None:
    y = ragged(3, 1)
    assert len(y) == 2
    assert y.sizes == (3, 1)
    assert [tensor.shape[0] for tensor in y] == [3, 1]
    assert y[-1] is y[1]
    assert y[:1].sizes == (3,)
    assert repr(y) == "Ragged(2 members: float32 [3, 2], [1, 2])"
    assert y.map(torch.Tensor.double)[0].dtype == torch.float64
    with pytest.raises(IndexError):
        y[2]
    with pytest.raises(TypeError, match="give a member first"):
        y[0, 1]  # type: ignore[call-overload]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_hold_the_same(copied: Any) -> None:
    y = ragged(3, 1)
    again = copied(y)
    assert again is not y
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))


def test_stacked_gives_it_for_batches_of_different_sizes() -> None:
    xs = [torch.zeros(3, 2), torch.zeros(5, 2)]
    assert isinstance(hf.stacked(xs), Ragged)
    assert hf.stacked(hf.stacked(xs)).sizes == (3, 5)
    nested = hf.stacked([{"x": x, "mask": (x[:, 0], 1)} for x in xs])
    assert nested["x"].sizes == nested["mask"][0].sizes == (3, 5)
    assert nested["mask"][1] == 1
    widths = hf.stacked([torch.zeros(3, 2), torch.zeros(3, 4)])
    assert isinstance(widths, Ragged)
    assert [list(tensor.shape) for tensor in widths] == [[3, 2], [3, 4]]


# Random numbers from seeds of the members: theirs alone, and as random as they should be.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeds(members: int) -> torch.Tensor:
    return torch.empty(members, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0))


@DTYPES
def test_the_numbers_of_a_member_are_its_own(dtype: torch.dtype) -> None:
    whole, row = MemberSeeds(seeds(5)), MemberSeeds(seeds(5)[3:4])
    for shape in ((2, 3), (7,)):
        draws = whole.uniform((5, *shape), dtype), row.uniform((1, *shape), dtype)
        assert torch.equal(draws[0][3:4], draws[1])
        assert draws[0].dtype is dtype
    assert not torch.equal(whole.uniform((5, 4), dtype), whole.uniform((5, 4), dtype))
    assert len(whole.uniform((5, 99), dtype)[:, 0].unique()) == 5


# Arrays in several threads: each trains as alone, and what else the process does goes on meanwhile.


def train(rounds: int) -> None:
    for _ in range(rounds):
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(2)]
        alone = [Member(model, torch.optim.SGD, F.mse_loss, Own(0.1)) for model in copy.deepcopy(models)]
        fused = hf.fuse(models)
        step = hf.train_step(
            fused, lambda out, y: F.mse_loss(out, y), hf.optim.SGD(fused.parameters(), 0.1), compile=False
        )
        x, y = normal(5, 4), normal(5, 1)
        for _ in range(2):
            close(step(x, y), [member.call(x, y)[0] for member in alone], "losses")
        hf.fuse([Branch(4, 1).double(), Branch(4, 1).double()])(x)


def chatter(stop: threading.Event) -> int:
    rounds = 0
    while not stop.wait(0.005):
        x = torch.ones(2, requires_grad=True)
        print(".", end="")
        Sevenfold.apply(x).sum().backward()
        assert x.grad is not None
        assert (x.grad == 7).all()
        nn.Linear(2, 2)(x.detach())
        rounds += 1
    return rounds


def test_threads_that_capture_and_one_that_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    before = torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr

    with ThreadPoolExecutor(3) as pool:
        talker = pool.submit(chatter, stop)
        try:
            list(pool.map(train, (2, 2)))
        finally:
            stop.set()
    assert (torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr) == before
    assert talker.result() == out.getvalue().count(".") > 0


# Files of runs: logs, folders that processes claim, and what is drawn in a terminal.
def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    claimed = ClaimedFolder(tmp_path, "run-")
    for name in ("run-left", "run-empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-left" / "inside").write_bytes(b"x")
    (tmp_path / "run-file").touch()
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {claimed.path.name, "other", "run-file"}
    claimed.drop()
    remove_abandoned(tmp_path, "run-")
    assert not claimed.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_links_and_folders_of_other_users_are_not_removed(tmp_path: Path) -> None:
    """In a folder shared by many users, a user who may remove the files of others does not."""
    tmp_path.chmod(0o1777)
    elsewhere, foreign, linked = (tmp_path / name for name in ("elsewhere", "run-theirs", "run-link"))
    for path in (elsewhere, foreign):
        path.mkdir()
    os.chown(foreign, 12345, -1)
    linked.symlink_to(elsewhere)
    os.mkfifo(tmp_path / "run-pipe")
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "run-theirs", "run-link", "run-pipe"}


KILLED = """
import os, signal
from hfusion.core.claimed_folder import run_folder
run_folder().path.joinpath("data").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_the_temporary_files_of_a_killed_one(tmp_path: Path) -> None:
    """Files of a run that goes on stay."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment)
    assert done.returncode == -signal.SIGKILL
    (abandoned,) = tmp_path.iterdir()
    assert (abandoned / "data").exists()
    first = run_folder(tmp_path)
    with temporary_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first.path, second}
    first.remove()
    assert not [*tmp_path.iterdir()]


# Logs of runs: what is written is read, whatever happens to the files between.
def test_written_events_are_read_back(tmp_path: Path) -> None:
    error = ValueError('a "quoted" line = one\nand another')
    with EventLog(tmp_path, "train", arrays=1) as log:
        log.array("../a b", "failed", {"device": "cpu:0", "loss": "0.5 nan", "error": first_line(error), "gone": None})
        log.trial(3, "started", {"epoch": "0/4", "name": "größer"})
    first, last = read_events(tmp_path / "logs/run.log")
    assert (first.event, first.values["kind"], first.values["arrays"]) == ("started", "train", "1")
    assert (last.event, last.values["process"]) == ("finished", str(os.getpid()))
    (event,) = read_events(tmp_path / "logs/arrays/%2E.%2Fa%20b.log")
    assert event.time.tzinfo is not None
    values = {key: text for key, text in event.values.items() if key not in ("process", "node")}
    assert values == {"device": "cpu:0", "loss": "0.5 nan", "error": 'ValueError: a "quoted" line = one'}
    assert read_events(tmp_path / "logs/trials/3.log")[0].values["name"] == "größer"
    assert (tmp_path / "logs/trials/3.log").read_bytes().isascii()


@pytest.mark.parametrize(
    ("error", "event"), [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted"), (None, "finished")]
)
def test_how_a_run_ended(error: BaseException | None, event: str, tmp_path: Path) -> None:
    def run() -> None:
        with EventLog(tmp_path, "train"):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    last = read_events(tmp_path / "logs/run.log")[-1]
    assert last.event == event
    assert last.values.get("error") == (None if error is None else first_line(error))


def test_a_torn_line_and_damage_cost_their_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs/arrays/a.log"
    EventLog(tmp_path, "train").array("a", "started", {})
    with path.open("ab") as file:
        file.write(b"2026-01-01T00:00:00.000Z evaluated loss=\xff\nno line\n2026-13-01T00:00:00Z saved\n2026-01-01T0")
    assert [event.event for event in read_events(path)] == ["started", "evaluated"]
    log = EventLog(tmp_path, "train")
    log.array("a", "resumed", {})
    log.array("a", "saved", {})
    assert [event.event for event in read_events(path)] == ["started", "evaluated", "resumed", "saved"]
    assert read_events(tmp_path / "logs/arrays/b.log") == []


def test_a_run_goes_on_where_no_line_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file of the user's")
    log = EventLog(tmp_path, "train")
    with pytest.warns(UserWarning, match="the run goes on without logs"):
        log.__enter__()
    # Warnings are errors: there is no other.
    log.array("a", "started", {})
    assert not log.writes
    with EventLog(None, "train") as log:
        log.array("a", "started", {})
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]
