"""The state of the runs in a folder, and of their arrays and trials.

The state is read from the logs of a run. No lock is taken and no file is written, so runs are not affected.
"""

from __future__ import annotations

import re
import socket
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from hfusion.checkpoint import files
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import ARRAYS, LOGS, RUN, TRIALS, LoggedEvent, is_running, read_events
from hfusion.tune.sweep_folder import STATE

# Folders that `python -m hfusion run --resume` creates.
_RESUMED = re.compile(r"(train|sweep)-(\d+)")
# States of arrays and trials by their last event; after any other event they are in training.
_ENDED = {"finished": "finished", "failed": "failed", "pruned": "pruned", "lost": "waiting", "moved": "waiting"}


@dataclass(frozen=True)
class MemberStatus:
    """An array of `hf.train`, or a trial of a sweep. Unknown values are None.

    Attributes:
        name: the name of the array, or the number of the trial.
        state: training, waiting, finished (for trials: complete), pruned, failed, unknown; or "not running", if it
            had not ended when its run did.
        epoch, epochs: how many epochs were trained, and how many there are in all.
        done, total: the same in minibatches for an array, in epochs for a trial.
        training, stopped: for an array, how many of its members train, and how many have stopped.
        array: for a trial, the name of its array.
        value: the last losses of an array, or the last value of a trial, as text.
        heard: the time of the last event that determined the state.
        saved: when the last save was written.
        error: the first line of an error, or why the log cannot be read.
    """

    name: str
    state: str
    epoch: int | None = None
    epochs: int | None = None
    done: int | None = None
    total: int | None = None
    training: int | None = None
    stopped: int | None = None
    array: str | None = None
    device: str | None = None
    node: str | None = None
    process: int | None = None
    value: str | None = None
    heard: datetime | None = None
    saved: datetime | None = None
    error: str | None = None


@dataclass(frozen=True)
class RunStatus:
    """A folder of `hf.train` or `hf.sweep`.

    Attributes:
        kind: train or sweep.
        state: running, finished, failed, interrupted, "not running" if it was killed, unknown if that cannot be told.
        process, node: where `hf.train` or `hf.sweep` was called; workers may be elsewhere.
        saved: when the last save of the sweep, or of one of the arrays, was written.
        trials: the argument ``trials`` of the sweep.
    """

    folder: Path
    kind: str
    state: str
    process: int | None = None
    node: str | None = None
    started: datetime | None = None
    error: str | None = None
    saved: datetime | None = None
    trials: int | None = None
    members: tuple[MemberStatus, ...] = field(default=())

    @property
    def counts(self) -> dict[str, int]:
        """The number of arrays or trials in each state."""
        return dict(Counter(member.state for member in self.members))


def read_status(folder: Path) -> list[RunStatus]:
    """Return the run saved in a folder, or all runs of ``python -m hfusion run --resume FOLDER`` in their order.

    Raises:
        CheckpointError: it is not the folder of a run, or cannot be read.
    """
    with files.wrap_load_errors(folder):
        if not folder.is_dir():
            raise CheckpointError(f"{folder} is no folder: give the one that a run is saved to")
        kind = _kind(folder)
        if kind is not None:
            return [_run(folder, kind)]
        matches = [match for path in folder.iterdir() if (match := _RESUMED.fullmatch(path.name))]
        names = [match[0] for match in sorted(matches, key=lambda match: (match[1], int(match[2])))]
        runs = [_run(folder / name, kind) for name in names if (kind := _kind(folder / name)) is not None]
    if not runs:
        raise CheckpointError(
            f"{folder} holds no log of a run. Give the folder of hf.train(checkpoint=...), of hf.sweep(directory=...), "
            "or of python -m hfusion run --resume."
        )
    return runs


def _kind(folder: Path) -> str | None:
    """Return "train" or "sweep"; None if it is not the folder of a run."""
    for event in reversed(read_events(folder / LOGS / RUN)):
        if (kind := event.values.get("kind")) in ("train", "sweep"):
            return kind
    return None


def _run(folder: Path, kind: str) -> RunStatus:
    state, last = _life(read_events(folder / LOGS / RUN))
    started = None if last is None else last.time
    ended = state != "running"
    if kind == "sweep":
        saved = _saved(folder / STATE)
        members = _trials(folder, started, ended=ended and state != "unknown")
    else:
        members = _arrays(folder, started, ended=ended and state != "unknown")
        saved = max((member.saved for member in members if member.saved is not None), default=None)
    values = {} if last is None else last.values
    return RunStatus(
        folder,
        kind,
        state,
        _number(values.get("process")),
        values.get("node"),
        started,
        values.get("error"),
        saved,
        _number(values.get("trials")),
        tuple(members),
    )


def _life(events: Sequence[LoggedEvent]) -> tuple[str, LoggedEvent | None]:
    """Return the state of the run that was started last, and its start event with the values of later events."""
    runs: dict[tuple[str | None, ...], tuple[str, LoggedEvent]] = {}
    for event in events:
        key = event.values.get("node"), event.values.get("process")
        if event.event == "started":
            runs.pop(key, None)
            runs[key] = "", event
        elif key in runs:
            _, first = runs[key]
            merged = LoggedEvent(first.time, event.event, {**first.values, **event.values})
            runs[key] = event.event, merged
    if not runs:
        return "unknown", None
    run_states = [(state or _alive(first), first) for state, first in runs.values()]
    # The ranks of torchrun may share a folder: the run goes on as long as one of them is running.
    return ([run for run in run_states if run[0] == "running"] or run_states)[-1]


def _alive(first: LoggedEvent) -> str:
    """Return "running", "not running" or "unknown" for a run whose log has no end."""
    process = _number(first.values.get("process"))
    if process is None or first.values.get("node") != socket.gethostname():
        return "unknown"
    alive = is_running(process, first.values.get("start"))
    return "unknown" if alive is None else "running" if alive else "not running"


def _saved(folder: Path) -> datetime | None:
    """Return when the last save in a folder was written."""
    for path in reversed(files.saves(folder)):
        # A run deletes old saves meanwhile.
        with suppress(OSError):
            return datetime.fromtimestamp((path / files.MANIFEST).stat().st_mtime, UTC)
    return None


def _events(path: Path) -> tuple[list[LoggedEvent], str | None]:
    """Return the events of a log and None; or no events and why they cannot be read."""
    try:
        return read_events(path), None
    except OSError as error:
        return [], f"its log cannot be read: {error}"


def _arrays(folder: Path, started: datetime | None, *, ended: bool) -> list[MemberStatus]:
    members = []
    for path in sorted((folder / LOGS / ARRAYS).glob("*.log")):
        events, problem = _events(path)
        last, values = _last(events)
        # The saves may be on another node, so that only the log knows about them.
        noted = [event.time for event in events if event.event == "saved"]
        state = _state(last, started, ended=ended)
        done, total = _pair(values.get("minibatch"))
        epoch, epochs = _pair(values.get("epoch"))
        training, size = _pair(values.get("members"))
        members.append(
            MemberStatus(
                unquote(path.stem),
                state,
                epoch,
                epochs,
                done,
                total,
                training,
                None if size is None or training is None else size - training,
                value=values.get("loss"),
                heard=None if last is None else last.time,
                saved=_saved(folder / path.stem) or (noted[-1] if noted else None),
                error=problem or (values.get("error") if state in ("failed", "waiting") else None),
                **_location(values),
            )
        )
    return members


def _trials(folder: Path, started: datetime | None, *, ended: bool) -> list[MemberStatus]:
    logs = {int(path.stem): path for path in (folder / LOGS / TRIALS).glob("*.log") if path.stem.isdecimal()}
    members = []
    for number, path in sorted(logs.items()):
        events, problem = _events(path)
        last, values = _last(events)
        state = _state(last, started, ended=ended)
        epoch, epochs = _pair(values.get("epoch"))
        members.append(
            MemberStatus(
                str(number),
                "complete" if state == "finished" else state,
                epoch,
                epochs,
                epoch,
                epochs,
                array=values.get("array"),
                value=values.get("value"),
                heard=None if last is None else last.time,
                error=problem or (values.get("error") if state == "failed" else None),
                **_location(values),
            )
        )
    return members


def _last(events: Sequence[LoggedEvent]) -> tuple[LoggedEvent | None, dict[str, str]]:
    """Return the last event that determines the state, and the latest value of each key."""
    values: dict[str, str] = {}
    for event in events:
        # A save may be of an earlier minibatch than the events before it.
        counts = ("epoch", "minibatch") if event.event == "saved" else ()
        values |= {key: text for key, text in event.values.items() if key not in counts}
    states = [event for event in events if event.event not in ("saved", "stopped")]
    return (states[-1] if states else None), values


def _state(last: LoggedEvent | None, started: datetime | None, *, ended: bool) -> str:
    """Return the state of an array or trial whose run ``started`` then; ``ended``: the run is no longer running."""
    state = "unknown" if last is None else _ENDED.get(last.event, "training")
    if state in ("training", "waiting", "unknown") and ended:
        return "not running"
    is_earlier = last is not None and started is not None and last.time < started
    return "waiting" if state == "training" and is_earlier else state


def _location(values: dict[str, str]) -> dict[str, Any]:
    return {"device": values.get("device"), "node": values.get("node"), "process": _number(values.get("process"))}


def _pair(text: str | None) -> tuple[int | None, int | None]:
    """Read a count such as ``3/10``."""
    first, _, second = (text or "").partition("/")
    return _number(first), _number(second)


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() else None
