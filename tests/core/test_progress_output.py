from __future__ import annotations

import io
import sys
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console
from rich.progress import MofNCompleteColumn

from hfusion.core.progress_output import ProgressBars, Tenths, plain, redraws


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, False), ({"force_terminal": True}, True), ({"force_terminal": True, "_environ": {"TERM": "dumb"}}, False)],
    ids=["file", "terminal", "dumb"],
)
def test_only_terminals_are_drawn_over(options: dict[str, object], expected: bool) -> None:
    assert redraws(Console(file=io.StringIO(), **options)) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize("installed", [False, True])
def test_a_notebook_is_drawn_over_where_it_has_outputs(installed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hfusion.core.progress_output.find_spec", lambda name: object() if installed else None)
    assert redraws(Console(file=io.StringIO(), force_jupyter=True)) is installed


def test_the_bars_of_a_notebook_are_one_output_that_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    outputs: list[str] = []

    class Output:
        """Stored output of a notebook cell: the page of the last drawing."""

        def update(self, table: Any) -> None:
            outputs[-1] = table._repr_mimebundle_([], [])["text/html"]

    def display(table: Any, display_id: bool) -> Output:
        assert display_id
        outputs.append("")
        return Output()

    monkeypatch.setattr("hfusion.core.progress_output.find_spec", lambda name: object())
    for name, content in {"IPython": {}, "IPython.display": {"display": display}}.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    console = Console(file=(file := io.StringIO()), force_jupyter=True)
    with ProgressBars(console, plain("{task.description}"), MofNCompleteColumn()) as bars:
        task = bars.progress.add_task("[red]a", total=2)
        bars.progress.update(task, advance=1)
        bars.draw()
    assert len(outputs) == 1
    assert "[red]a" in outputs[0]
    assert "1/2" in outputs[0]
    assert file.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "begun", "lines"), [(1000, 0, 10), (3, 0, 3), (1000, 550, 5), (0, 0, 0), (10, 10, 0)]
)
def test_there_is_a_line_for_every_tenth(total: int, begun: int, lines: int) -> None:
    tenths = Tenths(begun, total)
    assert sum(tenths.reached(done, total) for done in range(begun + 1, total + 1)) == lines
