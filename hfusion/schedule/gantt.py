"""A timeline on one screen: numbers by device and by task, and a small picture without matplotlib."""

from __future__ import annotations

from collections import defaultdict
from html import escape
from math import fsum
from typing import TYPE_CHECKING

from hfusion.core.text import aligned, readable

if TYPE_CHECKING:
    from hfusion.schedule.timeline import Timeline

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


def summary(timeline: Timeline) -> str:
    """Return the headline and both tables, at most MAX_SHOWN rows each."""
    tasks = len({span.task for span in timeline.actions})
    lines = [headline(timeline)]
    for rows, count, noun in (
        (device_rows(timeline), len(timeline.devices), "devices"),
        (task_rows(timeline), tasks, "tasks"),
    ):
        lines += aligned(rows, left=1)
        if count > MAX_SHOWN:
            lines.append(f"... {count - MAX_SHOWN} more {noun}")
    return "\n".join(lines)


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
