"""Tables and JSON of the state of runs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hfusion.status.runs import MemberStatus, RunStatus

if TYPE_CHECKING:
    from rich.table import Table

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
