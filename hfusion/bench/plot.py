"""The results of the sub-benchmark ``fuse`` as a picture: speed-up over serial against members."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hfusion.bench.results import BASELINE, Comparison


def draw(comparisons: Sequence[Comparison], contenders: Sequence[str], path: Path) -> None:
    """Write one panel per model with a line per contender, both axes logarithmic, to ``path``.

    Raises ModuleNotFoundError without matplotlib.
    """
    from matplotlib.figure import Figure

    models = list(dict.fromkeys(comparison.model for comparison in comparisons))
    figure = Figure(figsize=(3.2 * len(models), 3.2), layout="constrained")
    panels = figure.subplots(1, len(models), squeeze=False, sharey=True)[0]
    for panel, model in zip(panels, models, strict=True):
        chosen = [comparison for comparison in comparisons if comparison.model == model]
        for contender in contenders:
            if contender != BASELINE:
                panel.plot(*_line(chosen, contender), marker="o", label=contender)
        panel.axhline(1.0, color="black", linewidth=1.0, label=BASELINE)
        panel.set(title=model, xlabel="members", xscale="log", yscale="log")
        ticks = sorted({comparison.members for comparison in chosen})
        panel.set_xticks(ticks, [str(tick) for tick in ticks])
        panel.set_xticks([], minor=True)
        panel.yaxis.set_major_formatter("{x:g}x")
        panel.yaxis.set_minor_formatter("{x:g}x")
    panels[0].set_ylabel(f"speed-up over {BASELINE}")
    panels[-1].legend(fontsize="small")
    figure.savefig(path)


def _line(comparisons: Sequence[Comparison], contender: str) -> tuple[list[int], list[float]]:
    """Members and speed-ups of the comparisons in which ``contender`` was timed against the serial loop."""
    points = []
    for comparison in comparisons:
        cell = comparison.cell(contender)
        speedup = comparison.speedup(cell) if cell else None
        if speedup is not None:
            points.append((comparison.members, speedup))
    return [members for members, _ in points], [speedup for _, speedup in points]
