"""Logs of runs: what is written is read, whatever happens to the files between."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hfusion.core.event_log import EventLog, first_line, read_events


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
