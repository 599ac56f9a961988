"""The state of the runs in a folder, and of their arrays and trials, as tables and JSON.

The state is read from the logs of a run. No lock is taken and no file is written, so runs are not affected.
"""

from __future__ import annotations

import json
import re
import socket
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from hfusion.checkpoint import files
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import ARRAYS, LOGS, RUN, TRIALS, LoggedEvent, is_running, read_events
from hfusion.tune.sweep_folder import STATE

if TYPE_CHECKING:
    from rich.table import Table


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


# Tables and JSON of the state of runs.

# The most ended trials that a table shows. JSON contains all of them.
_MAX_ENDED = 20
_MAX_WIDTH = 1000
_ACTIVE = ("training", "waiting", "not running", "unknown")


def print_status(runs: Iterable[RunStatus], now: datetime | None = None) -> None:
    """Print a line and a table for each run. Ages of saves are relative to ``now``, by default the current time."""
    from rich.console import Console

    console = Console()
    now = now or datetime.now(UTC)
    for run in runs:
        table = _trial_table(run.members) if run.kind == "sweep" else _array_table(run.members, now)
        if not console.is_terminal:
            # Files and pipes have no width: make tables as wide as they need.
            wide = console.options.update(max_width=_MAX_WIDTH)
            console.width = max(console.width, console.measure(table, options=wide).maximum)
        console.print(headline(run, now), highlight=False, markup=False, soft_wrap=True)
        for note in _notes(run):
            console.print(note, highlight=False, markup=False, soft_wrap=True)
        if run.members:
            console.print(table)


def to_json(runs: Iterable[RunStatus]) -> str:
    """Return the runs as a JSON list; times are ISO 8601, in UTC."""
    records = [{**asdict(run), "counts": run.counts} for run in runs]
    return json.dumps(records, default=_plain, indent=1)


def _plain(value: Any) -> str:
    assert isinstance(value, Path | datetime)
    return str(value) if isinstance(value, Path) else value.isoformat()


def headline(run: RunStatus, now: datetime) -> str:
    """Return a run in one line: its folder, state, last save and counts."""
    function = "hf.sweep" if run.kind == "sweep" else "hf.train"
    state = run.state
    if state in ("running", "unknown") and run.process is not None:
        state += f" (process {run.process} on {run.node})"
    if run.state == "failed":
        state += f" ({run.error})"
    counts = ", ".join(f"{count} {state}" for state, count in sorted(run.counts.items()))
    if run.kind == "sweep":
        counts = f"{len(run.members)} of {run.trials or '?'} trials: {counts or 'none begun'}"
    else:
        counts = f"{len(run.members)} array{'s' * (len(run.members) != 1)}: {counts or 'none begun'}"
    return f"{run.folder}: {function}, {state}: last save {_save(run.saved, now)}; {counts}"


def _notes(run: RunStatus) -> list[str]:
    """Return lines for errors of arrays and trials, which do not fit into a table."""
    kind = "trial" if run.kind == "sweep" else "array"
    return [f"  {kind} {member.name}: {member.error}" for member in run.members if member.error is not None]


def _array_table(members: Sequence[MemberStatus], now: datetime) -> Table:
    titles = ("array", "state", "epoch", "minibatch", "members", "device", "node", "saved", "last losses")
    rows = []
    for member in members:
        size = None if member.training is None or member.stopped is None else member.training + member.stopped
        rows.append(
            (
                member.name,
                member.state,
                _count(member.epoch, member.epochs),
                _count(member.done, member.total),
                _count(member.training, size),
                member.device or "",
                member.node or "",
                "" if member.saved is None else _ago(member.saved, now),
                member.value or "",
            )
        )
    return _table(titles, rows)


def _trial_table(members: Sequence[MemberStatus]) -> Table:
    titles = ("trial", "state", "epoch", "last value", "array", "device", "node")
    ended = [member for member in members if member.state not in _ACTIVE]
    left_out = {member.name for member in ended[: max(0, len(ended) - _MAX_ENDED)]}
    rows = [
        (
            member.name,
            member.state,
            _count(member.epoch, member.epochs),
            member.value or "",
            member.array or "",
            member.device or "",
            member.node or "",
        )
        for member in members
        if member.name not in left_out
    ]
    if left_out:
        rows.insert(0, (f"... {len(left_out)} more", "ended, see --json", "", "", "", "", ""))
    return _table(titles, rows)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold", no_wrap=title not in ("array", "last losses"))
    for row in rows:
        # Text, so that brackets in names are not read as markup.
        table.add_row(*map(Text, row))
    return table


def _count(done: int | None, total: int | None) -> str:
    if done is None:
        return ""
    return str(done) if total is None else f"{done}/{total}"


def _save(saved: datetime | None, now: datetime) -> str:
    """Return the local time of a save and its age."""
    if saved is None:
        return "none"
    local = saved.astimezone()
    shown = local.strftime("%H:%M" if local.date() == now.astimezone().date() else "%Y-%m-%d %H:%M")
    return f"{shown} ({_ago(saved, now)})"


def _ago(saved: datetime, now: datetime) -> str:
    return f"{_age((now - saved).total_seconds())} ago"


def _age(seconds: float) -> str:
    """Format seconds in their largest unit.

    >>> _age(59.9), _age(60), _age(3 * 86400)
    ('59 s', '1 min', '3 d')
    """
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
