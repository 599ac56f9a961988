"""Timeline of a run, simulated or real, and the checks that every run must pass.

A device has three concurrent lanes, each with one action at a time: compute (FORWARD, RECOMPUTE, BACKWARD, STEP,
EVALUATE, SAVE), the link from the host (LOAD) and the link to it (EVICT).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape
from itertools import pairwise, zip_longest
from math import fsum
from pathlib import Path

from hfusion.core.errors import HFusionError
from hfusion.core.text import aligned, folded, html_table, paragraph, readable
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import PHASES, Phase, Plan, TaskPlan


class TimelineError(HFusionError):
    """A timeline breaks a rule of order, memory or exclusivity, or its text cannot be read."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a device on a shard of a task, from ``start`` to ``end`` in seconds.

    ``step`` is the minibatch. ``bytes``: a LOAD takes them on the device from its start, until the EVICT of the shard
    has given them back at its end; a computing action takes them while it runs.
    """

    act: Act
    task: str
    shard: int
    step: int
    device: str
    start: float
    end: float
    bytes: int

    def __str__(self) -> str:
        times = f"{self.start!r} {self.end!r}"
        return f"{times} {self.act} {self.device} {self.task} {self.shard} {self.step} {self.bytes}"

    @classmethod
    def parse(cls, line: str) -> Span:
        """Parse the printed form of a span. Raises TimelineError."""
        try:
            start, end, act, device, task, shard, step, size = line.split()
            return cls(Act(act), task, int(shard), int(step), device, float(start), float(end), int(size))
        except ValueError as error:
            form = "start end KIND device task shard step bytes"
            raise TimelineError(f"cannot read the action {line!r} ({error}): write {form!r}") from error


# A timeline on one screen: numbers by device and by task, and a small picture.

# The most rows of devices, and of tasks, in a summary and in a picture.
MAX_SHOWN = 10
_LANES = ("compute", "in", "out")
# Pixels. Actions on the same pixels are drawn once, so the size of the picture does not depend on the run's length.
_WIDTH, _ROW, _LABEL = 600, 30, 120
_HEIGHTS = {"compute": (0, 16), "in": (17, 4), "out": (22, 4)}


def headline(timeline: Timeline) -> str:
    """Return one line: seconds, devices, actions, the lower bound, and how busy the devices were."""
    counts = f"{len(timeline.devices)} devices, {len(timeline.actions)} actions"
    seconds = f"{timeline.makespan:.4g} s (lower bound {timeline.lower_bound:.4g} s)"
    return f"timeline  {seconds}, {counts}, computing {timeline.utilisation:.0%} of the time"


def device_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """Return a title, and for each device the share of the makespan that its lanes are busy, and its peak memory."""
    busy: dict[tuple[str, str], list[float]] = defaultdict(list)
    for span in timeline.actions:
        busy[span.device, span.act.lane].append(span.end - span.start)
    whole = timeline.makespan or 1.0
    rows: list[tuple[str, ...]] = [("device", "computing", "loading", "evicting", "peak")]
    for name in timeline.devices[:MAX_SHOWN]:
        shares = [f"{fsum(busy[name, lane]) / whole:.0%}" for lane in _LANES]
        rows.append((name, *shares, readable(timeline.peak[name])))
    return rows


def task_rows(timeline: Timeline) -> list[tuple[str, ...]]:
    """Return a title, and for each task when it began and ended, the seconds it computed and the bytes it loaded."""
    spans = defaultdict(list)
    for span in timeline.actions:
        spans[span.task].append(span)
    rows: list[tuple[str, ...]] = [("task", "began", "ended", "computed", "loaded")]
    for name, actions in list(spans.items())[:MAX_SHOWN]:
        computed = fsum(span.end - span.start for span in actions if span.act.lane == "compute")
        loaded = sum(span.bytes for span in actions if span.act.lane == "in")
        times = (min(span.start for span in actions), max(span.end for span in actions), computed)
        rows.append((name, *(f"{seconds:.4g} s" for seconds in times), readable(loaded)))
    return rows


def svg(timeline: Timeline) -> str:
    """Return a Gantt chart as SVG: a row per device, a colour per task, loads and evictions below computing."""
    rows = {name: number for number, name in enumerate(timeline.devices[:MAX_SHOWN])}
    hues = {task: number * 137 % 360 for number, task in enumerate(dict.fromkeys(s.task for s in timeline.actions))}
    last = max((span.end for span in timeline.actions), default=0.0)
    scale = _WIDTH / (last or 1.0)
    bars: dict[tuple[str, str, str], list[list[int]]] = defaultdict(list)
    for span in timeline.actions:
        if span.device in rows:
            _add(bars[span.device, span.act.lane, span.task], int(span.start * scale), int(span.end * scale))
    shapes = [
        f'<text x="0" y="{row * _ROW + 12}" font-size="11" fill="currentColor">{escape(name[:18])}</text>'
        for name, row in rows.items()
    ]
    for (device, lane, task), ranges in bars.items():
        low, height = _HEIGHTS[lane]
        top = rows[device] * _ROW + low
        path = "".join(
            f"M{_LABEL + start} {top}h{max(1, end - start)}v{height}h-{max(1, end - start)}z" for start, end in ranges
        )
        shapes.append(f'<path d="{path}" fill="hsl({hues[task]} 60% 50%)"><title>{escape(task)}: {lane}</title></path>')
    size = f'width="{_LABEL + _WIDTH}" height="{len(rows) * _ROW}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>{"".join(shapes)}</svg>'


def _add(ranges: list[list[int]], start: int, end: int) -> None:
    """Add pixels ``start`` to ``end`` to a sorted list of ranges, and merge ranges that touch."""
    if ranges and start <= ranges[-1][1] + 1:
        ranges[-1][1] = max(ranges[-1][1], end)
    else:
        ranges.append([start, end])


@dataclass(frozen=True, repr=False)
class Timeline:
    """The timeline of a run: its actions in order of start, the devices, and a lower bound of seconds for any schedule.

    ``print(timeline)`` shows numbers by device and by task; ``timeline.text()`` has every action.
    """

    actions: tuple[Span, ...]
    devices: tuple[str, ...]
    lower_bound: float

    @cached_property
    def makespan(self) -> float:
        """Seconds until the last computation ends; later write-backs do not count."""
        ends = [action.end for action in self.actions if action.act.lane == "compute"]
        return max(ends, default=0.0)

    @cached_property
    def utilisation(self) -> float:
        """Share of the devices' time until the makespan that is spent computing, 0 to 1."""
        if not self.makespan:
            return 0.0
        busy = math.fsum(a.end - a.start for a in self.actions if a.act.lane == "compute")
        return busy / (self.makespan * len(self.devices))

    @cached_property
    def peak(self) -> dict[str, int]:
        """The most bytes allocated at one time, by device."""
        changes = self._changes()
        return {name: max((level for _, level in levels(changes[name])), default=0) for name in self.devices}

    def _changes(self) -> dict[str, list[tuple[float, int]]]:
        """Return, by device, the times at which bytes are allocated (positive) and freed (negative)."""
        changes: dict[str, list[tuple[float, int]]] = defaultdict(list)
        for action in self.actions:
            if action.act is not Act.EVICT:
                changes[action.device].append((action.start, action.bytes))
            if action.act is not Act.LOAD:
                changes[action.device].append((action.end, -action.bytes))
        return changes

    def validate(self, plan: Plan) -> None:
        """Raise TimelineError for the first rule that is broken.

        Every unit of every task of ``plan`` runs once and in order, on one device at a time, and ends with a
        STEP where the plan has one; shards that compute are loaded; a shard is in one place only, and back on the
        host at the end; a lane does one action at a time; no budget is exceeded.
        """
        if set(self.devices) != set(plan.devices):
            raise TimelineError(f"the devices are {self.devices}, those of the plan are {tuple(plan.devices)}")
        shards = {task.name: len(task.shards) for task in plan.tasks}
        for action in self.actions:
            if action.device not in plan.devices or not 0 <= action.shard < shards.get(action.task, 0):
                raise TimelineError(f"the plan has no such device, task or shard: {action}")
            if not (0 <= action.start <= action.end < math.inf and action.bytes >= 0):
                raise TimelineError(f"time runs backwards or bytes are negative: {action}")
        by_task: dict[str, list[Span]] = {task.name: [] for task in plan.tasks}
        for action in sorted(self.actions, key=lambda action: action.start):
            by_task[action.task].append(action)
        for task in plan.tasks:
            _check_units(task, by_task[task.name])
            _check_places(task, by_task[task.name])
        lanes: dict[tuple[str, str], list[Span]] = defaultdict(list)
        for action in sorted(self.actions, key=lambda action: (action.start, action.end)):
            lanes[action.device, action.act.lane].append(action)
        for (device, lane), spans in lanes.items():
            _check_apart(spans, f"lane {lane} of device {device!r} does two things at a time")
        for name, peak in self.peak.items():
            if peak > plan.devices[name]:
                raise TimelineError(f"device {name!r} holds {peak:,} bytes, its budget is {plan.devices[name]:,}")

    def summary(self) -> str:
        """Return how busy each device was, its peak memory, and when each task ran: at most ten rows each."""
        lines, tasks = [headline(self)], len({span.task for span in self.actions})
        tables = ((device_rows(self), len(self.devices), "devices"), (task_rows(self), tasks, "tasks"))
        for rows, count, noun in tables:
            lines += aligned(rows, left=1)
            if count > MAX_SHOWN:
                lines.append(f"... {count - MAX_SHOWN} more {noun}")
        return "\n".join(lines)

    __str__ = summary

    def __repr__(self) -> str:
        return f"<{headline(self)}>"

    def _repr_html_(self) -> str:
        tables = [html_table(rows[0], rows[1:], len(rows) - 1) for rows in (device_rows(self), task_rows(self))]
        return paragraph(headline(self)) + svg(self) + folded("devices and tasks", "".join(tables))

    def text(self) -> str:
        """Return every action as a line of text, which `parse` reads."""
        head = ["timeline", f"lower_bound {self.lower_bound!r}", " ".join(["devices", *self.devices])]
        return "\n".join([*head, *map(str, self.actions)])

    @classmethod
    def parse(cls, text: str) -> Timeline:
        """Parse the output of `text`, exactly. Raises TimelineError."""
        lines = text.strip().split("\n")
        if len(lines) < 3 or lines[0] != "timeline":
            raise TimelineError(f"no timeline begins with {lines[0]!r}: give all of timeline.text()")
        bound, devices = lines[1].split(), lines[2].split()
        if len(bound) != 2 or bound[0] != "lower_bound" or devices[:1] != ["devices"]:
            raise TimelineError(f"expected 'lower_bound SECONDS' and 'devices NAMES', not {lines[1:3]}")
        return cls(tuple(map(Span.parse, lines[3:])), tuple(devices[1:]), float(bound[1]))

    def perfetto(self, path: str | Path) -> None:
        """Write a Chrome trace (JSON), which ui.perfetto.dev opens: a process per device, a thread per lane.

        Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
        """
        events: list[dict[str, object]] = []
        pids = {name: number for number, name in enumerate(self.devices)}
        tids = {lane: number for number, lane in enumerate(("compute", "in", "out"))}
        for name, pid in pids.items():
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}})
            for lane, tid in tids.items():
                args = {"name": lane}
                events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": args})
        for action in self.actions:
            what = {"name": f"{action.task} {action.act.lower()} {action.shard}", "cat": str(action.act)}
            times = {"ts": action.start * 1e6, "dur": (action.end - action.start) * 1e6}
            place = {"pid": pids[action.device], "tid": tids[action.act.lane]}
            detail = {"step": action.step, "bytes": action.bytes}
            events.append({**what, "ph": "X", **times, **place, "args": detail})
        for name, changes in self._changes().items():
            for time, level in levels(changes):
                held = {"bytes": level}
                events.append({"name": "memory", "ph": "C", "ts": time * 1e6, "pid": pids[name], "args": held})
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

    def draw(self, path: str | Path) -> None:
        """Write the picture that notebooks show: a Gantt chart as SVG, a colour per task, loads and evictions below."""
        Path(path).write_text(svg(self))


def levels(changes: Iterable[tuple[float, int]]) -> list[tuple[float, int]]:
    """Return running sums over time; releases come before allocations at the same time.

    >>> levels([(0.0, 3), (2.0, 4), (2.0, -3)])
    [(0.0, 3), (2.0, 0), (2.0, 4)]
    """
    level, sums = 0, []
    for time, change in sorted(changes):
        level += change
        sums.append((time, level))
    return sums


def _computing(task: TaskPlan) -> Iterator[tuple[Act, int, int]]:
    """Yield the computations of a task in order: act, step, shard."""
    for unit in map(task.unit, range(task.units)):
        for action in task.actions_of(unit).computes:
            yield action.act, unit.step, unit.shard


def _check_units(task: TaskPlan, actions: list[Span]) -> None:
    """Check that the computations are exactly those of the task's units, in order."""
    computations = [action for action in actions if action.act.lane == "compute"]
    for expected, action in zip_longest(_computing(task), computations):
        if expected is None:
            raise TimelineError(f"task {task.name!r} is done, its {task.units} units ran, but this comes: {action}")
        act, step, shard = expected
        if action is None:
            raise TimelineError(f"task {task.name!r} is not done: the {act} of shard {shard} in step {step} is missing")
        if expected != (action.act, action.step, action.shard):
            raise TimelineError(
                f"task {task.name!r} should do the {act} of shard {shard} in step {step}, not the {action.act} of "
                f"shard {action.shard} in step {action.step}: {action}"
            )
    _check_apart(computations, f"task {task.name!r} runs twice at a time")


def _check_apart(actions: list[Span], problem: str) -> None:
    for before, after in pairwise(actions):
        if after.start < before.end:
            raise TimelineError(f"{problem}: {before}, and {after}")


def _check_places(task: TaskPlan, actions: list[Span]) -> None:
    """Check that shards are loaded where they compute, and change devices only through the host."""
    loaded: dict[int, Span] = {}
    computed: dict[int, Span] = {}
    evicted: dict[int, Span] = {}
    left_at: tuple[str, int] | None = None
    for action in actions:
        load = loaded.get(action.shard)
        if action.act is Act.LOAD:
            if load is not None:
                raise TimelineError(f"the shard is already on a device by {load}: {action}")
            if action.shard in evicted and evicted[action.shard].end > action.start:
                raise TimelineError(f"the shard is loaded before it is evicted by {evicted[action.shard]}: {action}")
            loaded[action.shard] = action
        elif load is None or load.device != action.device or load.end > action.start:
            raise TimelineError(f"the shard is not loaded on {action.device!r} when this begins: {action}")
        elif action.act is Act.EVICT:
            if action.bytes != load.bytes:
                raise TimelineError(f"{load} took other bytes than are given back by {action}")
            if action.shard in computed and computed[action.shard].end > action.start:
                raise TimelineError(f"the shard is evicted while it computes {computed[action.shard]}: {action}")
            evicted[action.shard] = action
            del loaded[action.shard]
        else:
            computed[action.shard] = action
            if action.act is not Act.SAVE:
                phase = Phase.UPDATE if action.act is Act.STEP and task.clipped else PHASES[action.act]
                needed = task.unit_actions[phase, action.shard].evict.frees
                if load.bytes < needed:
                    raise TimelineError(f"{load} holds less than the {needed:,} bytes that this needs: {action}")
                device, last = left_at or (action.device, 0)
                out = evicted.get(last)
                if device != action.device and (out is None or out.device != device or out.end > load.start):
                    raise TimelineError(f"what the task left on {device!r} is not yet evicted when {load} begins")
            left_at = (action.device, action.shard)
    if loaded:
        raise TimelineError(f"the shard is never evicted after {next(iter(loaded.values()))}")
