"""Pages: what they show runs, what they say was measured, and every name, file and extra has its place."""

from __future__ import annotations

import ast
import itertools
import json
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from docs import api_reference, tutorial_outputs
from docs.benchmarks import speedup
from tests.test_files import files

# What the pages show runs as it stands there, every page can be found, and no link leads nowhere.
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(ROOT)): page for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *DOCS.rglob("*.md")]}
CODE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
# Of other packages, when they are used as the page shows.
WARNINGS = (
    "ignore:.*does not have many workers",
    "ignore:.*treespec",
    "ignore:.*LeafSpec",
    "ignore:.*The number of training batches",
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",
)
LINK = re.compile(r"\]\((?!\w+:|#)([^()#\s]+)(?:#[^()\s]*)?\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python of a page, each block with the line that it begins on."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in CODE.finditer(text)]


@pytest.fixture
def threads() -> Iterator[None]:
    """Restore torch's threads, which a page may set."""
    count = torch.get_num_threads()
    yield
    torch.set_num_threads(count)


@pytest.fixture
def plots(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Draw the plots of a page without a screen, and close them."""
    monkeypatch.setenv("MPLBACKEND", "agg")
    yield
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close("all")


@pytest.mark.filterwarnings(*WARNINGS)
@pytest.mark.usefixtures("threads", "plots")
@pytest.mark.parametrize(
    "page", [page for page, path in PAGES.items() if path not in tutorial_outputs.PAGES and blocks(path)]
)
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page one after the other, in one module, as they are printed."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "page"}
    for line, block in blocks(PAGES[page]):
        exec(compile("\n" * line + block, page, "exec"), space)


@pytest.mark.usefixtures("threads", "plots")
@pytest.mark.parametrize("page", tutorial_outputs.PAGES, ids=lambda page: page.stem)
def test_tutorials_show_what_they_print_and_draw(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first words of an output are compared: times, losses and the choices that follow from them differ."""
    for package in ("matplotlib", "pandas", "sklearn"):
        pytest.importorskip(package)
    monkeypatch.chdir(tmp_path)

    def form(text: str | None) -> list[str]:
        return re.findall("[A-Za-z]+", text or "")[:2]

    outputs = tutorial_outputs.run(page)
    for shown, output in zip(tutorial_outputs.BLOCK.finditer(page.read_text()), outputs, strict=True):
        assert form(shown[2]) == form(output.text), shown[1]
        assert re.findall(r"!\[(.*)\]", shown[3]) == [title for title, _ in output.figures], shown[1]


@pytest.mark.parametrize("page", api_reference.PAGES)
def test_the_reference_is_that_of_the_docstrings(page: str) -> None:
    """If they differ, run ``make reference``."""
    for package in ("lightning", "sklearn") if page == "integrations" else ():
        pytest.importorskip(package)
    text = (DOCS / "reference" / f"{page}.md").read_text()
    assert text.partition(api_reference.HEADING)[2].strip() == api_reference.generated(page).strip()


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_hold(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page].read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [link for link in LINK.findall(text) if not (PAGES[page].parent / link).exists()] == []


FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
ANCHOR = re.compile(r"\]\((?!\w+:)([^()#\s]*)#([^()\s]+)\)")
HEADING = re.compile(r"^#{1,3} (.+?)\s*$", re.MULTILINE)
INCLUDE = re.compile(r"^```{include} (\S+)$", re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Return the anchors of headings as GitHub and myst make them, to the depth of ``myst_heading_anchors``."""
    text = page.read_text()
    slugs: set[str] = set()
    for heading in HEADING.findall(FENCED.sub("", text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        repeats = (f"{slug}-{number}" for number in itertools.count(1))
        slugs.add(next(name for name in itertools.chain([slug], repeats) if name not in slugs))
    return slugs.union(*(anchors(page.parent / file) for file in INCLUDE.findall(text)))


@pytest.mark.parametrize("page", PAGES)
def test_links_to_headings_hold(page: str) -> None:
    path = PAGES[page]
    links = ANCHOR.findall(FENCED.sub("", path.read_text()))
    targets = [(path.parent / file if file else path, anchor) for file, anchor in links]
    assert [f"{target}#{anchor}" for target, anchor in targets if anchor not in anchors(target)] == []


def test_every_page_is_in_the_navigation() -> None:
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    listed = [line for line in lines if "<https:" not in line]
    there = [str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")]
    assert sorted(["index", *listed]) == sorted(there)


PROSE = [page for page in PAGES if page == "README.md" or page.startswith("docs/")]
MAX_SENTENCES, MAX_ITEM_SENTENCES = 5, 3


def prose(page: Path) -> list[tuple[bool, str]]:
    """The paragraphs and list items of a page, each with whether it is an item."""
    written = page.read_text().partition(api_reference.HEADING)[0]
    text = re.sub(r"^```.*?^```", "", written, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^(#|\|).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^\s*(?=(?:[-*]|\d+\.) )", "\n", text, flags=re.MULTILINE)
    blocks = [re.sub(r"`[^`]*`|\]\([^)]*\)", "x", block.strip()) for block in re.split(r"\n\s*\n", text)]
    return [(bool(re.match(r"[-*] |\d+\. ", block)), block) for block in blocks if block]


@pytest.mark.parametrize("page", PROSE)
def test_paragraphs_and_list_items_are_short(page: str) -> None:
    for is_item, block in prose(PAGES[page]):
        sentences = re.split(r"(?<=[.!?])\s+(?=[A-Zx*\[])", re.sub(r"^\d+\. ", "", block))
        assert len(sentences) <= (MAX_ITEM_SENTENCES if is_item else MAX_SENTENCES), block


def test_every_environment_variable_is_described() -> None:
    sources = "".join(path.read_text() for path in files())
    names = set(re.findall(r"\bHFUSION_[A-Z_]+[A-Z]\b", sources))
    text = (DOCS / "install.md").read_text()
    assert {name for name in names if f"`{name}" not in text} == set()


def test_every_example_is_listed() -> None:
    text = (DOCS / "index.md").read_text()
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    assert {name for name in scripts if f"(../examples/{name})" not in text} == set()


def test_every_public_name_has_an_entry_in_the_reference() -> None:
    entries = {name for names in api_reference.PAGES.values() for name in names.split()}
    schedulers = [f"optim.lr_scheduler.{name}" for name in hf.optim.lr_scheduler.__all__]
    names = {*hf.__all__, *(f"optim.{name}" for name in hf.optim.__all__), *schedulers} - {
        "optim",
        "optim.lr_scheduler",
    }
    assert names - entries == set()


def mistakes() -> dict[str, Callable[[], object]]:
    """Forget ``hf.per_model`` or ``sum``, in the ways of the table of debugging.md."""
    fused = hf.fuse([torch.nn.Linear(4, 2) for _ in range(3)])
    outputs, target = fused(torch.randn(32, 4)), torch.randint(2, (32,))
    losses = hf.per_model(F.cross_entropy)(outputs, target)
    return {
        "grad can be": losses.backward,
        "optimizer can": lambda: torch.optim.SGD(fused, lr=0.1),
        "Expected input": lambda: F.cross_entropy(outputs, target),
        "Expected target": lambda: F.cross_entropy(outputs[:, :3], target[:3]),
        "Target size": lambda: F.binary_cross_entropy_with_logits(outputs, torch.rand(32, 2)),
        "Using a target": lambda: F.mse_loss(outputs, torch.rand(32, 2)),
        "The size of": lambda: (outputs.argmax(1) == target).float(),
        "a Tensor with": losses.item,
        "unsupported": lambda: f"{losses:.3f}",
    }


def test_errors_in_torchs_words_are_those_of_torch() -> None:
    text = (DOCS / "reference" / "debugging.md").read_text().partition("## Errors in torch's words")[2]
    listed = [
        words
        for cell in re.findall(r"^\| (`.*?) \|", text.partition("\n## ")[0], re.MULTILINE)
        for words in re.findall("`([^`]+)`", cell)
    ]
    for (beginning, mistake), words in zip(mistakes().items(), listed, strict=True):
        assert words.startswith(beginning)
        with pytest.raises((RuntimeError, TypeError, ValueError, UserWarning), match=re.escape(words)):
            mistake()


# The extras of pyproject.toml are enough for the pages and scripts that name them.
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
# Those of users; the others are for work on hfusion itself.
FOR_USERS = set(re.findall(r"[\w-]+", EXTRAS["all"][0].partition("[")[2])) | {"all", "demo"}
# Modules whose package has another name.
PACKAGES = {"sklearn": "scikit-learn"}
# Parts of hfusion that import a package when they are used.
USES = {
    r"hf\.sweep\(|hf\.PBT\(": "optuna",
    r"\.trials_dataframe\(": "pandas",
    r"\.plot_\w+\(": "plotly",
    r"hf\.Cluster\(": "cloudpickle",
    r"hf\.lora\(": "peft",
    r"hf\.sklearn\.|hfusion\.sklearn": "scikit-learn",
    r"hf\.lightning\.|hfusion\.lightning": "lightning",
}


def name_of(requirement: str) -> str:
    """Return the name of the package in a requirement such as ``optuna>=4.0``."""
    found = re.match(r"[\w-]+", requirement)
    assert found is not None
    return found[0]


def brought(package: str) -> set[str]:
    """The packages that a package requires, if it is installed: peft brings transformers."""
    try:
        requirements = requires(package) or []
    except PackageNotFoundError:
        return set()
    return {name_of(requirement) for requirement in requirements if "extra ==" not in requirement}


def installed_by(extras: set[str]) -> set[str]:
    """The packages of extras, and those that these require."""
    direct = {package for extra in extras for package in packages(extra)}
    return direct.union(*map(brought, direct))


def packages(extra: str) -> set[str]:
    """The packages of an extra, without versions."""
    if extra == "all":
        return set().union(*(packages(name) for name in FOR_USERS - {"all", "demo"}))
    return {name_of(requirement) for requirement in EXTRAS[extra]}


def needed(source: str) -> set[str]:
    """The packages besides hfusion's own requirements that a piece of code imports, or lets hfusion import."""
    modules = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            modules.add(node.module)
    names = {module.partition(".")[0] for module in modules} - {"hfusion", "__future__", *sys.stdlib_module_names}
    used = {PACKAGES.get(name, name) for name in names}
    used |= {package for pattern, package in USES.items() if re.search(pattern, source)}
    return used - {name_of(requirement) for requirement in PROJECT["dependencies"]}


def named(text: str) -> set[str]:
    """The extras that a text tells the reader to install, such as ``.[sweep]``."""
    return {name for found in re.findall(r"(?:\.|hfusion)\[([\w,]+)\]", text) for name in found.split(",")}


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if blocks(path)])
def test_a_page_names_the_extras_that_its_code_needs(page: str) -> None:
    text = PAGES[page].read_text()
    code = "".join(block for _, block in blocks(PAGES[page]))
    assert needed(code) - installed_by(named(text)) == set()


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_the_extra_of_examples_covers_a_script(script: Path) -> None:
    source = script.read_text()
    extras = {"examples", *named(ast.get_docstring(ast.parse(source)) or "")}
    assert needed(source) - installed_by(extras) == set()


def test_the_page_on_installation_names_the_versions_of_python_that_are_tested() -> None:
    versions = [re.search(r":: (3\.\d+)$", classifier) for classifier in PROJECT["classifiers"]]
    rows = re.findall(r"^\| [^|]+ \| (3\.[\d., ]+) \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert sorted({found[1] for found in versions if found}) == sorted(", ".join(rows).split(", "))


def test_the_page_on_installation_lists_the_packages_of_every_extra() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \| ([^|]+) \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    listed = {
        name: {package.strip() for package in cell.split(",")} for name, cell in rows if name in FOR_USERS - {"all"}
    }
    assert listed == {extra: packages(extra) for extra in FOR_USERS - {"all"}}


# Figures in the README and the pages are those that were measured.
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
        f"<th>Loop: {took['serial']}</th><th>hfusion: {took['eager-cold']} in the first process, "
        f"{took['eager-warm']} in later ones</th>"
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


def test_the_table_of_the_h200_is_that_measured() -> None:
    text = (DOCS / "devices.md").read_text()
    for title, way in H200_ROWS.items():
        row = re.search(rf"^\| {re.escape(title)} \| (.*) \|$", text, re.MULTILINE)
        assert row is not None
        shown = [float(cell) for cell in row[1].split(" | ")]
        assert shown == [pytest.approx(case[way], rel=0.02) for case in steps_on_h200()]
    assert f"| best other way / `hf.train_step` | {' | '.join(f'{x:.1f}' for x in ratios_on_h200())} |" in text


# Every public name shows how it is used.
# The examples of `hf.fuse` and `hf.build` show the arrays that these make.
NAMES = [name for name in hf.__all__ if callable(getattr(hf, name)) and name != "FusedModule"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(hf, name).__doc__ or ""), f"the docstring of hf.{name} has no example"
