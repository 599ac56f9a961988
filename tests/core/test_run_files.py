"""Files of runs: logs, folders that processes claim, and what is drawn in a terminal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned, run_folder, temporary_folder
from hfusion.core.event_log import EventLog, first_line, read_events


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
