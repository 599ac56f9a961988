"""The site of hfusion: `make docs` writes it to build/docs, and every warning is an error.

Pages are Markdown that also reads well as files: a link to a file of the repository is a relative path there, and
becomes a link to the repository's page here. A path that leads nowhere is left as it is, so that Sphinx warns of it.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path
from typing import Any

from sphinx.util.docutils import SphinxDirective

import hfusion

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
REPOSITORY = "https://github.com/hfusion/hfusion/blob/main"

# Files that lie elsewhere and are shown as pages, by an `include` in the page.
SHOWN = {
    ROOT / "README.md": DOCS / "index.md",
    ROOT / "CONTRIBUTING.md": DOCS / "contributing.md",
    ROOT / "ops" / "README.md": DOCS / "contributing.md",
}

project = "hfusion"
author = "the hfusion authors"
release = hfusion.__version__
extensions = ["myst_parser", "sphinx_copybutton"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
# `make linkcheck`. Links to files of the repository are checked as paths, by `read`.
linkcheck_ignore = [re.escape(REPOSITORY)]
linkcheck_timeout = 30
html_theme = "furo"
html_title = f"hfusion {release}"
html_theme_options = {
    "source_repository": "https://github.com/hfusion/hfusion/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_static_path = ["_static"]
html_css_files = ["pages.css"]
pygments_style = "friendly"

_LINK = re.compile(r"\]\((?!\w+:)([^()#\s]+)(#[^()\s]*)?\)")


def link_from(page: Path, text: str, folder: Path) -> str:
    """``text`` of a file in ``folder`` with its relative links as they must stand in ``page``."""

    def link(found: re.Match[str]) -> str:
        target, anchor = (folder / found[1]).resolve(), found[2] or ""
        if not target.exists():
            return found[0]
        target = SHOWN.get(target, target)
        if target.is_file() and target.is_relative_to(DOCS):
            return f"]({os.path.relpath(target, page.parent)}{anchor})"
        return f"]({REPOSITORY}/{target.relative_to(ROOT)}{anchor})"

    return _LINK.sub(link, text)


def read(app: Any, name: str, content: list[str]) -> None:
    page = DOCS / f"{name}.md"
    content[0] = link_from(page, content[0], page.parent)


def include(app: Any, path: Path, parent: str, content: list[str]) -> None:
    file = (DOCS / path).resolve()
    content[0] = link_from(SHOWN[file], content[0], file.parent)


class FileTable(SphinxDirective):
    """A table of the files of a folder, each with the first line of its docstring."""

    required_arguments = 1

    def run(self) -> list[Any]:
        folder = ROOT / self.arguments[0]
        lines = [f"| `{self.arguments[0]}/` | what it does |", "|---|---|"]
        for path in sorted(folder.glob("*.py")):
            self.env.note_dependency(str(path))
            docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
            summary = docstring.partition("\n")[0].replace("``", "`").replace("|", "\\|")
            lines.append(f"| [`{path.name}`]({REPOSITORY}/{path.relative_to(ROOT)}) | {summary} |")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app: Any) -> None:
    app.add_directive("file-table", FileTable)
    app.connect("source-read", read)
    app.connect("include-read", include)
