"""`python -m hfusion status`: what the runs in a folder, and their arrays and trials, are doing, by their logs.

No lock is taken and no file is written, so runs are not affected.
"""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

from hfusion.checkpoint import files
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import ARRAYS, LOGS, RUN, TRIALS, LoggedEvent, is_running, read_events
from hfusion.tune.study import STATE

if TYPE_CHECKING:
    from rich.table import Table


# Folders that `python -m hfusion run --resume` creates.
_RESUMED = re.compile(r"(train|sweep)-(\d+)")
# States of arrays and trials by their last event; after any other event they are in training.
_ENDED = {"finished": "finished", "failed": "failed", "pruned": "pruned", "lost": "waiting", "moved": "waiting"}
_ACTIVE = ("training", "waiting", "not running", "unknown")
# The columns of a table after the name and the state: keys of the log, and "saved".
_COLUMNS = {
    "sweep": ("epoch", "value", "array", "device", "node"),
    "train": ("epoch", "minibatch", "members", "device", "node", "saved", "loss"),
}
# The most ended trials that a table shows. JSON contains all of them.
_MAX_ENDED = 20
_MAX_WIDTH = 1000


@dataclass(frozen=True)
class MemberStatus:
    """An array of `hf.train`, or a trial of a sweep.

    Attributes:
        name: the name of the array, or the number of the trial.
        state: training, waiting, finished (for trials: complete), pruned, failed, unknown; or "not running", if it
            had not ended when its run did.
        heard: the time of the last event that determined the state.
        saved: when the last save of the array was written.
        error: the first line of an error, or why the log cannot be read.
        values: the last value of each key in its log, as text, such as ``3/10`` for ``epoch``.
    """

    name: str
    state: str
    heard: datetime | None
    saved: datetime | None
    error: str | None
    values: Mapping[str, str]


@dataclass(frozen=True)
class RunStatus:
    """A folder of `hf.train` or `hf.sweep`.

    Attributes:
        kind: train or sweep.
        state: running, finished, failed, interrupted, "not running" if it was killed, unknown if that cannot be told.
        saved: when the last save of the sweep, or of one of the arrays, was written.
        values: of its log as text: ``process`` and ``node`` where it was called, ``error``, ``trials`` of a sweep.
    """

    folder: Path
    kind: str
    state: str
    started: datetime | None
    saved: datetime | None
    values: Mapping[str, str]
    members: tuple[MemberStatus, ...]

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
        if (run := _run(folder)) is not None:
            return [run]
        matches = [match for path in folder.iterdir() if (match := _RESUMED.fullmatch(path.name))]
        names = [match[0] for match in sorted(matches, key=lambda match: (match[1], int(match[2])))]
        runs = [run for name in names if (run := _run(folder / name)) is not None]
    if not runs:
        raise CheckpointError(
            f"{folder} holds no log of a run. Give the folder of hf.train(checkpoint=...), of hf.sweep(directory=...), "
            "or of python -m hfusion run --resume."
        )
    return runs


def _run(folder: Path) -> RunStatus | None:
    """Return the run in a folder; None if there is none."""
    state, last = _life(read_events(folder / LOGS / RUN))
    kind = None if last is None else last.values.get("kind")
    if last is None or kind not in _COLUMNS:
        return None
    is_sweep = kind == "sweep"
    paths = sorted((folder / LOGS / (TRIALS if is_sweep else ARRAYS)).glob("*.log"))
    if is_sweep:
        paths.sort(key=lambda path: len(path.stem))
    ended = state not in ("running", "unknown")
    members = tuple(_member(folder, path, last.time, is_sweep=is_sweep, ended=ended) for path in paths)
    saves = [_saved(folder / STATE)] if is_sweep else [member.saved for member in members]
    saved = max((time for time in saves if time is not None), default=None)
    return RunStatus(folder, kind, state, last.time, saved, last.values, members)


def _life(events: Sequence[LoggedEvent]) -> tuple[str, LoggedEvent | None]:
    """Return the state of the run that was started last, and its start event with the values of later events."""
    runs: dict[tuple[str | None, ...], LoggedEvent] = {}
    for event in events:
        key = event.values.get("node"), event.values.get("process")
        if event.event == "started":
            runs.pop(key, None)
            runs[key] = event
        elif key in runs:
            first = runs[key]
            runs[key] = LoggedEvent(first.time, event.event, {**first.values, **event.values})
    run_states: list[tuple[str, LoggedEvent | None]] = [
        (_alive(run) if run.event == "started" else run.event, run) for run in runs.values()
    ]
    # The ranks of torchrun may share a folder: the run goes on as long as one of them is running.
    return ([run for run in run_states if run[0] == "running"] or run_states or [("unknown", None)])[-1]


def _alive(first: LoggedEvent) -> str:
    """Return "running", "not running" or "unknown" for a run whose log has no end."""
    process = first.values.get("process", "")
    if not process.isdecimal() or first.values.get("node") != socket.gethostname():
        return "unknown"
    alive = is_running(int(process), first.values.get("start"))
    return "unknown" if alive is None else "running" if alive else "not running"


def _saved(folder: Path) -> datetime | None:
    """Return when the last save in a folder was written."""
    for path in reversed(files.saves(folder)):
        # A run deletes old saves meanwhile.
        with suppress(OSError):
            return datetime.fromtimestamp((path / files.MANIFEST).stat().st_mtime, UTC)
    return None


def _member(folder: Path, path: Path, started: datetime, *, is_sweep: bool, ended: bool) -> MemberStatus:
    """Return the status of an array or trial whose run ``started`` then, by its log ``path``.

    ``ended``: the run is no longer running.
    """
    events, error, values = list[LoggedEvent](), None, dict[str, str]()
    try:
        events = read_events(path)
    except OSError as failure:
        error = f"its log cannot be read: {failure}"
    for event in events:
        # A save may be of an earlier minibatch than the events before it.
        counts = ("epoch", "minibatch") if event.event == "saved" else ()
        values |= {key: text for key, text in event.values.items() if key not in counts}
    last = next((event for event in reversed(events) if event.event not in ("saved", "stopped")), None)
    state = "unknown" if last is None else _ENDED.get(last.event, "training")
    if state in _ACTIVE and ended:
        state = "not running"
    elif state == "training" and last is not None and last.time < started:
        state = "waiting"
    if state in ("failed", "waiting"):
        error = error or values.get("error")
    # The saves may be on another node, so that only the log knows about them.
    noted = [event.time for event in events if event.event == "saved"]
    saved = None if is_sweep else _saved(folder / path.stem) or (noted[-1] if noted else None)
    shown = "complete" if is_sweep and state == "finished" else state
    return MemberStatus(unquote(path.stem), shown, None if last is None else last.time, saved, error, values)


# Tables and JSON.


def print_status(runs: Iterable[RunStatus], now: datetime | None = None) -> None:
    """Print a line and a table for each run. Ages of saves are relative to ``now``, by default the current time."""
    from rich.console import Console

    console, now = Console(), now or datetime.now(UTC)
    if not console.is_terminal:
        # Files and pipes have no width: tables are as wide as they need.
        console.width = _MAX_WIDTH
    for run in runs:
        # Errors do not fit into a table.
        kind = "trial" if run.kind == "sweep" else "array"
        errors = [f"  {kind} {member.name}: {member.error}" for member in run.members if member.error is not None]
        for line in [headline(run, now), *errors]:
            console.print(line, highlight=False, markup=False, soft_wrap=True)
        if run.members:
            console.print(_table(run, now))


def to_json(runs: Iterable[RunStatus]) -> str:
    """Return the runs as a JSON list; times are ISO 8601, in UTC."""
    plain = lambda value: value.isoformat() if isinstance(value, datetime) else str(value)  # noqa: E731
    return json.dumps([{**asdict(run), "counts": run.counts} for run in runs], default=plain, indent=1)


def headline(run: RunStatus, now: datetime) -> str:
    """Return a run in one line: its folder, state, last save and counts."""
    state = run.state
    if state in ("running", "unknown"):
        state += f" (process {run.values.get('process')} on {run.values.get('node')})"
    if run.state == "failed":
        state += f" ({run.values.get('error')})"
    counts = ", ".join(f"{count} {state}" for state, count in sorted(run.counts.items()))
    size = len(run.members)
    shown = f"{size} of {run.values.get('trials', '?')} trials" if run.kind == "sweep" else f"{size} arrays"
    saved = "none"
    if run.saved is not None:
        local = run.saved.astimezone()
        is_today = local.date() == now.astimezone().date()
        saved = f"{local.strftime('%H:%M' if is_today else '%Y-%m-%d %H:%M')} ({_ago(run.saved, now)})"
    return f"{run.folder}: hf.{run.kind}, {state}: last save {saved}; {shown}: {counts or 'none begun'}"


def _table(run: RunStatus, now: datetime) -> Table:
    from rich.table import Table
    from rich.text import Text

    titles = ["trial" if run.kind == "sweep" else "array", "state", *_COLUMNS[run.kind]]
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title not in ("array", "loss"))
    ended = [member.name for member in run.members if run.kind == "sweep" and member.state not in _ACTIVE]
    left_out = set(ended[:-_MAX_ENDED])
    if left_out:
        table.add_row(f"... {len(left_out)} more", "ended, see --json")
    for member in run.members:
        if member.name not in left_out:
            saved = "" if member.saved is None else _ago(member.saved, now)
            cells = {**member.values, "saved": saved}
            # Text, so that brackets in names are not read as markup.
            texts = [member.name, member.state, *(cells.get(key, "") for key in _COLUMNS[run.kind])]
            table.add_row(*map(Text, texts))
    return table


def _ago(time: datetime, now: datetime) -> str:
    """Return how long ago a time was, in the largest unit: "40 s ago", "3 d ago"."""
    seconds = max(0, int((now - time).total_seconds()))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
