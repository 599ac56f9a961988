"""Figures in the README and the pages are those that were measured."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import geometric_mean

import pytest

from docs.benchmarks import speedup

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
RESULTS = (DOCS / "benchmarks" / "README.md").read_text()

MEASURED = {
    "MLP 64-128-128-10, batch 32": "mlp-small",
    "MLP 784-512-512-10, batch 128": "mlp-large",
    "CNN with BatchNorm, 28x28": "cnn",
    "transformer, 2 layers, seq 32": "transformer",
    "LoRA on one frozen base": "lora",
    "GRU, seq 32": "gru",
}
# The models and members of the table in devices.md, in the order of its columns.
CASES = [("mlp-small", 16), ("mlp-small", 64), ("resnet8", 16), ("transformer", 16)]
H200 = [f"{model} B={members}" for model, members in CASES]
H200_ROWS = {
    "serial loop": "serial",
    "4 processes under MPS": "processes",
    "serial CUDA graphs": "serial-cuda-graph",
    "vmap under torch.compile": "vmap-compiled",
    "eager array": "hfusion",
    "`hf.train_step`": "hfusion-compiled",
}


def steps_on_h200() -> list[dict[str, float]]:
    """Return the milliseconds of each way, for each case of H200."""
    lines = map(json.loads, (DOCS / "benchmarks" / "contact-h200.json").read_text().splitlines())
    measured = {line["item"]: line["values"]["ms"] for line in lines if line["item"].startswith("speed ")}
    return [measured[f"speed {case}"] for case in H200]


def ratios_on_h200() -> list[float]:
    """Return how many times faster hf.train_step is than the fastest way that is not hfusion's."""
    return [
        min(ms for way, ms in case.items() if not way.startswith("hfusion")) / case["hfusion-compiled"]
        for case in steps_on_h200()
    ]


def table_rows() -> list[str]:
    ratios = [speedup.speedups(members) for members in (16, 64)]
    cells = {title: [f"{x:.2f}x" for each in ratios for x in each[model]] for title, model in MEASURED.items()}
    # Two CPU cores and an H200, both for the cases of H200.
    ours, best = zip(*(speedup.speedups(members)[model] for model, members in CASES), strict=True)
    times = steps_on_h200()
    cells["the loop, two CPU cores"] = [f"{x:.2f}x" for x in ours]
    cells["the loop, H200"] = [f"{case['serial'] / case['hfusion-compiled']:.0f}x" for case in times]
    cells["the best other way, two CPU cores"] = [f"{x / y:.2f}x" for x, y in zip(ours, best, strict=True)]
    cells["the best other way, H200"] = [f"{x:.1f}x" for x in ratios_on_h200()]
    return [f"| {title} | {' | '.join(row)} |" for title, row in cells.items()]


def seconds_of_a_job() -> str:
    """The headings of the two programs of the README: a whole job of 300 steps."""
    rows = json.loads((DOCS / "benchmarks" / "short.json").read_text())["rows"]
    took = {row["contender"]: f"{row['seconds']:.1f} s" for row in rows if row["model"] == "mlp-small"}
    return (
        f"<th>Loop: {took['serial']}</th><th>hfusion: {took['steps-cold']} in the first process, "
        f"{took['steps-warm']} in later ones</th>"
    )


def sentences() -> list[str]:
    """The sentences of the README with measured figures."""
    ratios = [speedup.speedups(members) for members in (16, 64)]
    loop = [geometric_mean(ours for ours, _ in measured.values()) for measured in ratios]
    best = [geometric_mean(ours / other for ours, other in measured.values()) for measured in ratios]
    h200 = ratios_on_h200()
    count = ("three", "four", "five")[len(h200) - 3]
    # Seconds until the first step of torchvision's models has ended.
    deep = [
        float(seconds) for seconds in re.findall(r"^\| \w+, \d+ \| [\d.]+ s \| ([\d.]+) s \|", RESULTS, re.MULTILINE)
    ]
    assert (len(ratios[0]), len(deep)) == (13, 7)
    return [
        f"over all thirteen models is {loop[0]:.2f}x at 16 models and {loop[1]:.2f}x at 64.",
        f"Over the best other way it is {best[0]:.2f}x and {best[1]:.2f}x.",
        f"it was {min(h200):.1f}x to {max(h200):.1f}x the best other way in the {count} cases",
        f"Capture and check of torchvision's deep models take {min(deep):.0f} to {max(deep):.0f} seconds.",
    ]


def test_figures_of_the_readme_are_those_measured() -> None:
    text = " ".join(README.split())
    assert [row for row in [*table_rows(), *sentences(), seconds_of_a_job()] if row not in text] == []


def test_no_figure_of_the_readme_is_left_out() -> None:
    text = " ".join(README.split())
    for checked in [*table_rows(), *sentences()]:
        text = text.replace(checked, "")
    assert re.findall(r"\b[\d.]+x|\d+ (?:times|seconds|ms)\b", text.replace("28x28", "")) == []


def test_a_small_mlp_starts_in_under_a_second() -> None:
    rows = json.loads((DOCS / "benchmarks" / "startup.json").read_text())["rows"]
    assert max(row["first_ms"] for row in rows if row["model"] == "mlp-small") < 1000


def test_the_summary_of_the_benchmarks_is_that_of_the_readme() -> None:
    for figure in (figure for sentence in sentences()[:2] for figure in re.findall(r"[\d.]+x", sentence)):
        assert figure in RESULTS.partition("## Training steps")[0]


def test_the_table_of_the_h200_is_that_measured() -> None:
    text = (DOCS / "devices.md").read_text()
    for title, way in H200_ROWS.items():
        row = re.search(rf"^\| {re.escape(title)} \| (.*) \|$", text, re.MULTILINE)
        assert row is not None
        shown = [float(cell) for cell in row[1].split(" | ")]
        assert shown == [pytest.approx(case[way], rel=0.02) for case in steps_on_h200()]
    assert f"| best other way / `hf.train_step` | {' | '.join(f'{x:.1f}' for x in ratios_on_h200())} |" in text


COMPARED = re.compile(r"\b\d+(?:\.\d+)?x\b|\b\d+(?:\.\d+)? times (?:as|what|faster|slower)|\b\d+% (?:faster|slower)")
TABLE = re.compile(
    r"\]\([^)]*benchmarks/[^)]*\)|\]\([^)]*devices\.md[^)]*\)|`python -m [\w. -]+`|`python examples/\w+\.py`"
)
# Pages that consist of measurements, and of counts of operators.
TABLES = {"benchmarks/README.md", "devices.md", "reference/coverage.md"}


@pytest.mark.parametrize("page", sorted({str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")} - TABLES))
def test_a_comparison_of_times_links_to_its_table(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", (DOCS / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    blocks = re.split(r"\n\s*\n|\n(?=- |\|)", text)
    assert [block for block in blocks if COMPARED.search(block) and not TABLE.search(block)] == []
