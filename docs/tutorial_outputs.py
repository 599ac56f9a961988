"""Run the tutorials, and write below each block what it prints and draws: `make tutorials`.

So the pages show their output on the site and where the repository is browsed. `tests/test_docs.py` runs the blocks,
and checks that outputs are where they belong; numbers may differ.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

DOCS = Path(__file__).resolve().parent
IMAGES = DOCS / "_static"
PAGES = sorted((DOCS / "tutorials").glob("*.md"))
# A block of Python, what it printed, and the images that it drew.
BLOCK = re.compile(
    r"^```python\n(?s:(.*?))^```\n(?:\n```text\n(?s:(.*?))^```\n)?((?:\n!\[.*\]\(.*\)\n)*)", re.MULTILINE
)


class Output(NamedTuple):
    """What a block printed, and its figures, each with its title."""

    text: str
    figures: list[tuple[str, Any]]


def run(page: Path) -> Iterator[Output]:
    """Run the blocks of a page one after the other, as a script does, in the working directory."""
    from matplotlib import pyplot

    text, space = page.read_text(), {"__name__": "page"}
    for block in BLOCK.finditer(text):
        line = text.count("\n", 0, block.start(1))
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile("\n" * line + block[1], str(page), "exec"), space)
        figures = [pyplot.figure(number) for number in pyplot.get_fignums()]
        yield Output(printed.getvalue(), [(figure.axes[0].get_title(), figure) for figure in figures])
        pyplot.close("all")


def main() -> None:
    """Rewrite the outputs of all pages, or of those that are named."""
    os.environ["MPLBACKEND"] = "agg"
    for page in [page for page in PAGES if page.stem in sys.argv[1:] or not sys.argv[1:]]:
        text, count = page.read_text(), 0
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            outputs = list(run(page))
        pieces, end = list[str](), 0
        for (printed, figures), block in zip(outputs, BLOCK.finditer(text), strict=True):
            pieces.append(f"{text[end : block.start()]}```python\n{block[1]}```\n")
            end = block.end()
            if printed:
                pieces.append(f"\n```text\n{printed.rstrip()}\n```\n")
            for title, figure in figures:
                name = f"{page.stem}-{(count := count + 1)}.png"
                figure.savefig(IMAGES / name, dpi=80)
                pieces.append(f"\n![{title}](../_static/{name})\n")
        page.write_text("".join([*pieces, text[end:]]))


if __name__ == "__main__":
    main()
