"""What the pages show runs as it stands there, every page can be found, and no link leads nowhere."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import hfusion as hf
from docs import api_reference, tutorial_outputs
from tests.test_names import files

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


@pytest.mark.parametrize("page", PAGES)
def test_no_code_is_hidden(page: str) -> None:
    assert "<!--" not in PAGES[page].read_text()


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
