"""Write the API part of the pages in docs/reference from docstrings: `make reference`.

Each page ends with the heading API, and what follows it is generated. So the reference reads the same on the site and
where the repository is browsed. `tests/test_docs.py` compares the pages with the docstrings.
"""

from __future__ import annotations

import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

REFERENCE = Path(__file__).resolve().parent / "reference"
HEADING = "\n## API\n"
WIDTH = 100

# The names of each page, without `hfusion.`, in the order of their entries.
PAGES = {
    "arrays": "fuse build FusedModule stacked Ragged per_model each train_step save load",
    "optimizers": "optim.SGD optim.Adadelta optim.Adagrad optim.Adam optim.AdamW optim.Adamax optim.Lion optim.Muon "
    "optim.NAdam optim.RAdam optim.RMSprop optim.FusedOptimizer optim.per_member optim.for_all optim.GradScaler "
    "optim.clip_grad_norm_ optim.clip_grad_value_ optim.fuse optim.groups optim.lr_scheduler.OneCycleLR "
    "optim.lr_scheduler.PerMember optim.lr_scheduler.ReduceLROnPlateau",
    "populations": "Population Patience MemberLogger sweep SweepResult PBT select Ensemble zip_loaders",
    "tasks": "Task Machine Device plan simulate train Step Evaluation Cluster rows gather_rows copy_rows "
    "schedule.plan.Plan schedule.timeline.Timeline tasks.training_report.Report tasks.training_report.TaskReport",
    "integrations": "lora Adapters sklearn.EnsembleClassifier sklearn.EnsembleRegressor lightning.LightningArray",
    "debugging": "HFusionError FusionError ForwardsDiffer PlanError TrainError NonFiniteError CheckpointError "
    "SpillError",
}
# Classes that show methods of their base classes, too: these ones, or all public ones.
METHODS = {"FusedModule": "forward call report unfuse keep append copy put", "Population": ""}
# Classes whose objects hfusion makes.
MADE = ("FusedModule", "Adapters")
SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|References?):")
ITEM = re.compile(r"( {4})(\*{0,2}\w[^:]*): ")


class _Source(str):
    """Text that `inspect` writes into a signature without quotes."""

    __repr__ = str.__str__


def anchor(heading: str) -> str:
    """Return the anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def signature(label: str, value: Any) -> str:
    """Return a call as a block of code, on one line or with a line for each parameter."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [p for name, p in found.parameters.items() if name not in ("self", "cls")]
    plain = [p.replace(annotation=_source(p.annotation), default=_default(p.default)) for p in parameters]
    returned = found.empty if inspect.isclass(value) else _source(found.return_annotation)
    text = f"{label}{found.replace(parameters=plain, return_annotation=returned)}"
    if len(text) > WIDTH:
        parts = [str(p) for p in plain]
        kinds = [p.kind for p in plain]
        if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
            parts.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
        text = f"{label}(\n" + "".join(f"    {part},\n" for part in parts) + text[text.rindex(")") :]
    return f"```py\n{text}\n```\n"


def _source(annotation: Any) -> Any:
    return _Source(annotation) if isinstance(annotation, str) else annotation


def _default(value: Any) -> Any:
    return _Source(value.__name__) if inspect.isclass(value) and value is not inspect.Parameter.empty else value


def inline(text: str, pages: dict[str, str], page: str) -> str:
    """Return a line of a docstring as Markdown: code, and links to entries."""

    def link(found: re.Match[str]) -> str:
        name = found[1]
        if name not in pages:
            return f"`hf.{name}`"
        return f"[`hf.{name}`]({'' if pages[name] == page else pages[name] + '.md'}#{anchor(name)})"

    text = re.sub(r":\w+:`", "`", text)
    return re.sub(r"(?<!`)`hfusion\.([\w.]+)`", link, re.sub(r"``(.+?)``", r"`\1`", text))


def markdown(docstring: str, pages: dict[str, str], page: str) -> str:
    """Return a docstring as Markdown."""
    lines: list[str] = []
    code = items = False
    for line in inspect.cleandoc(docstring).splitlines():
        if code and not line.strip():
            lines.append("```")
            code = False
        if not code and line.strip().startswith(">>>"):
            lines += ["", "```pycon"]
            code = True
        if code:
            lines.append(line.strip() if not line.startswith("        ") else textwrap.dedent(line))
        elif section := SECTION.fullmatch(line):
            items = section[1] in ("Args", "Attributes", "Raises")
            lines += ["", f"**{section[1]}**", ""]
        elif items and (item := ITEM.match(line)):
            lines.append(f"- `{item[2]}`: {inline(line[item.end() :], pages, page)}")
        else:
            # Text of an item keeps an indent of two, so that it stays in the item.
            lines.append(f"{'  ' if items and line.strip() else ''}{inline(line.strip(), pages, page)}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join([*lines, "```"] if code else lines)).strip()


def methods(name: str, kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties of a class that have a docstring."""
    chosen = METHODS.get(name, "").split()
    bases = [base for base in kind.__mro__ if base.__module__.startswith("hfusion.")] if name in METHODS else [kind]
    for base in bases:
        for label, value in vars(base).items():
            member = getattr(value, "__func__", getattr(value, "fget", getattr(value, "func", value)))
            # torch puts wrappers into the classes of optimizers when the first one is made.
            is_own = getattr(member, "__qualname__", "") == f"{base.__qualname__}.{label}"
            if is_own and member.__doc__ and (label in chosen if chosen else not label.startswith("_")):
                yield label, value


def entry(name: str, pages: dict[str, str], page: str) -> str:
    """Return the entry of a public name: its signature, its docstring, and its methods."""
    value, short = pydoc.locate(f"hfusion.{name}"), name.rpartition(".")[2]
    is_class = inspect.isclass(value)
    shown = not (is_class and issubclass(value, Exception))
    parts = [
        f"### {name}\n",
        signature(f"hf.{name}", value) if shown and name not in MADE else "",
        markdown(value.__doc__, pages, page),
    ]
    for label, member in methods(name, value) if is_class and shown else ():
        if isinstance(member, property | cached_property):
            parts.append(f"\n#### {short}.{label}\n")
        else:
            parts += [f"\n#### {short}.{label}()\n", signature(f"{short}.{label}", getattr(member, "__func__", member))]
        parts.append(markdown(member.__doc__ or "", pages, page))
    return "\n".join(filter(None, parts))


def generated(page: str) -> str:
    """Return what stands below the heading of a page."""
    pages = {name: other for other, names in PAGES.items() for name in names.split()}
    names = PAGES[page].split()
    summaries = [inspect.cleandoc(pydoc.locate(f"hfusion.{name}").__doc__).partition("\n")[0] for name in names]
    rows = [f"| [`hf.{n}`](#{anchor(n)}) | {inline(s, pages, page)} |" for n, s in zip(names, summaries, strict=True)]
    entries = [entry(name, pages, page) for name in names]
    return "\n".join([*("| name | what it does |", "|---|---|"), *rows, "", "\n\n".join(entries), ""])


def main() -> None:
    """Rewrite the pages."""
    for page in PAGES:
        path = REFERENCE / f"{page}.md"
        written = path.read_text().partition(HEADING)[0]
        path.write_text(f"{written}{HEADING}\n{generated(page)}")


if __name__ == "__main__":
    main()
