"""Draw the JSON files of ``fuse``: the speed-up over the loop against members.

    python -m hfusion.bench fuse --json fuse.json && python benchmarks/draw.py fuse.json fuse.png fuse.svg

Needs matplotlib.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

Row = dict[str, Any]

COLUMNS = 4
COLOURS = {"hfusion": "tab:red", "hfusion-compiled": "darkred"}
OTHERS = ("tab:blue", "tab:orange", "tab:green", "tab:purple", "tab:cyan", "tab:olive", "tab:gray", "tab:pink")
LEVELS = (0.25, 0.5, 1, 2, 4, 8, 16)


def draw(rows: Sequence[Row], paths: Sequence[Path]) -> None:
    """Write one panel per model with a line per contender, both axes logarithmic, to all ``paths``."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    contenders = list(dict.fromkeys(row["contender"] for row in rows))
    # One place more than there are models: the legend's.
    width = min(COLUMNS, len(models) + 1)
    height = math.ceil((len(models) + 1) / width)
    figure = Figure(figsize=(3.2 * width, 3.0 * height), layout="constrained")
    panels = list(figure.subplots(height, width, squeeze=False, sharey=True).flat)
    for panel, model in zip(panels, models, strict=False):
        _draw_model(panel, model, [row for row in rows if row["model"] == model], contenders)
    handles, labels = panels[0].get_legend_handles_labels()
    for panel in panels[len(models) :]:
        panel.axis("off")
    panels[len(models)].legend(handles, labels, loc="center", frameon=False)
    figure.supylabel(f"speed-up over {'serial'}")
    for path in paths:
        figure.savefig(path, dpi=110)


def _draw_model(panel: Any, model: str, chosen: Sequence[Row], contenders: Sequence[str]) -> None:
    panel.axhline(1.0, color="black", linewidth=1.0, label="serial")
    rivals = [contender for contender in contenders if contender not in ("serial", *COLOURS)]
    colours = COLOURS | dict(zip(rivals, itertools.cycle(OTHERS), strict=False))
    for contender in contenders:
        if contender != "serial":
            own = [row for row in chosen if row["contender"] == contender]
            cores = max((row["cores"] for row in own), default=1)
            # Rows that were timed against the serial loop.
            timed = [row for row in own if row["speedup"] is not None]
            members, speedups = ([row[name] for row in timed] for name in ("members", "speedup"))
            width, order = (2.5, 3) if contender in COLOURS else (1.2, 2)
            style = {"linewidth": width, "zorder": order, "color": colours[contender], "marker": "o", "markersize": 5}
            panel.plot(members, speedups, label=contender + (f" ({cores} cores)" if cores > 1 else ""), **style)
    panel.set(title=model, xlabel="members", xscale="log", yscale="log")
    ticks = sorted({row["members"] for row in chosen})
    panel.set_xticks(ticks, [str(tick) for tick in ticks])
    panel.set_xticks([], minor=True)
    panel.set_yticks(LEVELS, [f"{level:g}x" for level in LEVELS])
    panel.set_yticks([], minor=True)
    panel.grid(axis="y", alpha=0.3)


def main(names: Sequence[str]) -> None:
    """Draw the rows of all JSON files among ``names`` to the other files."""
    paths = [Path(name) for name in names]
    rows = [row for path in paths if path.suffix == ".json" for row in json.loads(path.read_text())["rows"]]
    draw(rows, [path for path in paths if path.suffix != ".json"])


if __name__ == "__main__":
    main(sys.argv[1:])
