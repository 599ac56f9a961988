"""What the pages show runs as it stands there, every page can be found, and no link leads nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {str(page.relative_to(ROOT)): page for page in [*ROOT.glob("*.md"), *ROOT.glob("*/*.md"), *DOCS.rglob("*.md")]}
# A block that only prepares the next one may hide in a comment of the page.
CODE = re.compile(r"^(?:```|<!-- )python\n(.*?)^(?:```|-->)$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!\w+:|#)([^()#\s]+)(?:#[^()\s]*)?\)")


def blocks(page: Path) -> list[tuple[int, str]]:
    """The Python of a page, each block with the line that it begins on."""
    text = page.read_text()
    return [(text.count("\n", 0, found.start(1)), found[1]) for found in CODE.finditer(text)]


@pytest.mark.parametrize("page", [page for page, path in PAGES.items() if blocks(path)])
def test_python_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page one after the other, in one module."""
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {"__name__": "page"}
    for line, block in blocks(PAGES[page]):
        exec(compile("\n" * line + block, page, "exec"), space)


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_hold(page: str) -> None:
    text = re.sub(r"^```.*?^```", "", PAGES[page].read_text(), flags=re.DOTALL | re.MULTILINE)
    assert [link for link in LINK.findall(text) if not (PAGES[page].parent / link).exists()] == []


def test_every_page_is_in_the_navigation() -> None:
    trees = re.findall(r"^```{toctree}\n(.*?)^```", (DOCS / "index.md").read_text(), re.DOTALL | re.MULTILINE)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    there = [str(page.relative_to(DOCS).with_suffix("")) for page in DOCS.rglob("*.md")]
    assert sorted(["index", *listed]) == sorted(there)
