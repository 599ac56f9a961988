"""The extras of pyproject.toml are enough for the pages and scripts that name them."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest

from tests.test_docs import DOCS, PAGES, ROOT, blocks

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
    r"\.draw\(": "matplotlib",
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


@pytest.mark.parametrize("page", PAGES)
def test_extras_that_a_page_names_exist(page: str) -> None:
    assert named(PAGES[page].read_text()) - set(EXTRAS) == set()


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
