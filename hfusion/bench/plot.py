"""Results as pictures: of ``fuse`` the speed-up over serial against members, of ``sweep`` seconds as bars."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfusion.bench.results import BASELINE, OURS, FuseRow
from hfusion.bench.sweep_benchmark import SweepRow

COLUMNS = 4
COLOURS = {"hfusion": "tab:red", "hfusion-compiled": "darkred"}
OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:cyan", "tab:olive", "tab:gray", "tab:pink")
LEVELS = (0.25, 0.5, 1, 2, 4, 8, 16)


def draw(rows: Sequence[FuseRow], paths: Sequence[Path]) -> None:
    """Write one panel per model with a line per contender, both axes logarithmic, to ``paths``, as their suffixes say.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(row.model for row in rows))
    contenders = list(dict.fromkeys(row.contender for row in rows))
    # One place more than there are models: the legend's.
    width = min(COLUMNS, len(models) + 1)
    height = math.ceil((len(models) + 1) / width)
    figure = Figure(figsize=(3.2 * width, 3.0 * height), layout="constrained")
    panels = list(figure.subplots(height, width, squeeze=False, sharey=True).flat)
    for panel, model in zip(panels, models, strict=False):
        _draw_model(panel, model, [row for row in rows if row.model == model], contenders)
    handles, labels = panels[0].get_legend_handles_labels()
    for panel in panels[len(models) :]:
        panel.axis("off")
    panels[len(models)].legend(handles, labels, loc="center", frameon=False)
    figure.supylabel(f"speed-up over {BASELINE}")
    for path in paths:
        figure.savefig(path, dpi=110)


def _draw_model(panel: Any, model: str, chosen: Sequence[FuseRow], contenders: Sequence[str]) -> None:
    panel.axhline(1.0, color="black", linewidth=1.0, label=BASELINE)
    rivals = [contender for contender in contenders if contender not in (BASELINE, *OURS)]
    colours = COLOURS | dict(zip(rivals, itertools.cycle(OTHERS), strict=False))
    for contender in contenders:
        if contender != BASELINE:
            is_hfusion = contender in OURS
            style = {
                "linewidth": 2.5 if is_hfusion else 1.2,
                "zorder": 3 if is_hfusion else 2,
                "color": colours[contender],
            }
            label = contender + _cores(chosen, contender)
            panel.plot(*_line(chosen, contender), marker="o", markersize=5, label=label, **style)
    panel.set(title=model, xlabel="members", xscale="log", yscale="log")
    ticks = sorted({row.members for row in chosen})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.set_yticks(LEVELS, [f"{level:g}x" for level in LEVELS])
    panel.set_yticks([], minor=True)
    panel.grid(axis="y", alpha=0.3)


def _cores(rows: Sequence[FuseRow], contender: str) -> str:
    """Return how many processes a contender uses, for the legend; nothing for one."""
    cores = max((row.cores for row in rows if row.contender == contender), default=1)
    return f" ({cores} cores)" if cores > 1 else ""


def _line(rows: Sequence[FuseRow], contender: str) -> tuple[list[int], list[float]]:
    """Members and speed-ups of the rows in which ``contender`` was timed against the serial loop."""
    points = [(row.members, row.speedup) for row in rows if row.contender == contender and row.speedup is not None]
    return [members for members, _ in points], [speedup for _, speedup in points]


def draw_sweep(rows: Sequence[SweepRow], paths: Sequence[Path]) -> None:
    """Write one panel per case with a bar per contender, its seconds, and how many epochs it trained.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    cases = list(dict.fromkeys(row.case for row in rows))
    figure = Figure(figsize=(5.2 * len(cases), 0.36 * len(rows) / len(cases) + 1.2), layout="constrained")
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for panel, case in zip(panels, cases, strict=True):
        case_rows = [row for row in rows if row.case == case]
        colours = [
            COLOURS.get(row.contender, "indianred" if "hfusion" in row.contender else "tab:blue") for row in case_rows
        ]
        bars = panel.barh([row.contender for row in case_rows], [row.seconds for row in case_rows], color=colours)
        panel.bar_label(bars, [f" {row.seconds:.0f} s, {row.epochs} epochs" for row in case_rows], fontsize=8)
        panel.set(title=f"{case}, {case_rows[0].trials} trials", xlabel="seconds")
        panel.invert_yaxis()
        panel.margins(x=0.5)
    for path in paths:
        figure.savefig(path, dpi=110)
