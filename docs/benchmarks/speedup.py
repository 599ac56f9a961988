"""Draw speedup.svg, the chart of the README, from fuse-cores.json: python docs/benchmarks/speedup.py."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib import rcParams
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
MEMBERS = 16
# Of hfusion's ways, only hf.train_step is shown.
OURS = ("hfusion", "hfusion-compiled", "hfusion-one-part")
NAMES = {
    "mlp-small": "MLP, small",
    "mlp-large": "MLP, large",
    "cnn": "CNN",
    "resnet8": "ResNet-8",
    "mobilenet-v2": "MobileNetV2-like",
    "mobilenet-v3": "MobileNetV3-like",
    "pointnet": "PointNet",
    "dcgan": "DCGAN generator",
    "transformer": "transformer",
    "bert": "BERT-like",
    "lora": "LoRA, one base",
    "lstm": "LSTM",
    "gru": "GRU",
}


def speedups(members: int) -> dict[str, tuple[float, float]]:
    """Return, for each model, the speed-up over the loop of hf.train_step and of the fastest other way."""
    rows = json.loads((FOLDER / "fuse-cores.json").read_text())["rows"]
    chosen = [row for row in rows if row["members"] == members and row["speedup"] is not None]
    ours = {row["model"]: row["speedup"] for row in chosen if row["contender"] == "hfusion-compiled"}
    others = {
        model: max(row["speedup"] for row in chosen if row["model"] == model and row["contender"] not in OURS)
        for model in ours
    }
    return {model: (ours[model], others[model]) for model in sorted(ours, key=ours.__getitem__)}


def draw(path: Path) -> None:
    """Draw two bars for each model, the largest speed-up on top."""
    rcParams["svg.hashsalt"] = "hfusion"
    values = speedups(MEMBERS)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    axes = figure.subplots()
    for row, (ours, other) in enumerate(values.values()):
        axes.barh(row + 0.2, ours, 0.38, color="tab:red", label="hfusion, hf.train_step" if row == 0 else None)
        axes.barh(row - 0.2, other, 0.38, color="tab:gray", label="fastest other way" if row == 0 else None)
        axes.text(ours + 0.1, row + 0.2, f"{ours:.1f}x", va="center", fontsize=8)
        axes.text(other + 0.1, row - 0.2, f"{other:.1f}x", va="center", fontsize=8, color="dimgray")
    axes.axvline(1.0, color="black", linewidth=1, label="plain loop over the models")
    axes.set_yticks(range(len(values)), [NAMES[model] for model in values])
    axes.set_xlabel(f"speed-up of a training step, {MEMBERS} models, two CPU cores")
    axes.legend(loc="lower right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, facecolor="white", metadata={"Date": None})


if __name__ == "__main__":
    draw(FOLDER / "speedup.svg")
