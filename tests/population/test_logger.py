"""Numbers of members arrive under their names; the bar tells of the best and the worst."""

from __future__ import annotations

import csv
import io
import math
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import hfusion as hf
from hfusion.core.text import file_name
from tests.checkpoint.living import population


class Kept:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, str, dict[str, float]]] = []
        self.closed = False

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        self.rows.append((step, member, dict(values)))

    def close(self) -> None:
        self.closed = True


def test_a_file_and_whatever_else(tmp_path: Path) -> None:
    pop, kept, path = population(3), Kept(), tmp_path / "logs" / "all.csv"
    pop.stop(1)
    for step in range(2):
        with hf.MemberLogger(csv=path, sinks=[kept]) as logger:
            logger.log(pop, step, loss=torch.tensor([1.0, math.nan, 3.0]) / (step + 1), lr=pop.hparams["lr"])
    assert kept.closed
    assert [row[:2] for row in kept.rows] == [(0, "net 0.0"), (0, "net 0.2"), (1, "net 0.0"), (1, "net 0.2")]
    assert kept.rows[-1][2] == pytest.approx({"loss": 1.5, "lr": 0.03})
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[0] == {"step": "0", "member": "net 0.0", "name": "loss", "value": "1.0"}
    with pytest.raises(ValueError, match="loss has 2 values for 3 rows"):
        logger.log(pop, 0, loss=[1.0, 2.0])


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


def test_a_file_goes_on_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "all.csv"
    # What is in the file before it is closed is there after a kill.
    with hf.MemberLogger(csv=path) as logger:
        for step in range(3):
            logger.log(["ä", "b"], step, loss=[0.5, 0.25])
        rows = rows_of(path)
    assert len(rows) == 6
    assert rows[4] == {"step": "2", "member": "ä", "name": "loss", "value": "0.5"}
    with path.open("ab") as file:
        file.write(b"3,a,lo")
    with hf.MemberLogger(csv=path) as logger:
        logger.log(["a"], 3, loss=[0.125])
    rows = rows_of(path)
    assert rows[7] == {"step": "3", "member": "a", "name": "loss", "value": "0.125"}
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"begins with \['a', 'b'\], and a log with"):
        hf.MemberLogger(csv=tmp_path / "other.csv")


@pytest.mark.parametrize("names", [["a", "a"], ["a", ""], ["a", 3], "ab"])
def test_names_that_are_none_or_of_two(names: Any) -> None:
    with pytest.raises(ValueError, match=r"name of its own|a name is a string|a name for each row"):
        hf.MemberLogger(sinks=[Kept()]).log(names, 0, loss=[1.0, 2.0])


def test_folders_of_names_are_apart_and_stay_where_they_are(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a%2Fb", "..", ".", "/etc", "x" * 300, "x" * 299, "ä", "a b", "a\\b", "a\nb", "%~", ".a"]
    made = [tmp_path / file_name(name, safe=" ") for name in names]
    for folder in made:
        folder.mkdir()
        assert folder.resolve().parent == tmp_path.resolve()
    assert len({folder.name.lower() for folder in made}) == len(names)
    assert file_name("net 0.1_b-c~", safe=" ") == "net 0.1_b-c~"


def test_tensorboard_has_a_run_for_each_member(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with hf.MemberLogger(tensorboard=tmp_path) as logger:
        for step in range(3):
            logger.log(["a", None, "b/c"], step, loss=[float(step), 0.0, 2.0 * step])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b%2Fc"]
    events = EventAccumulator(str(tmp_path / "b%2Fc"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(0, 0.0), (1, 2.0), (2, 4.0)]


def test_services_get_a_run_for_each_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins of the two packages, which want an account or a server."""
    told: list[Any] = []

    def init(**options: Any) -> Any:
        told.append(options)
        return SimpleNamespace(
            log=lambda values, step: told.append((options["name"], step, values)),
            finish=lambda: told.append((options["name"], "finished")),
        )

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment: str, run_name: str) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}, {run_name}"))

        def log_metric(self, run: str, name: str, value: float, step: int) -> None:
            told.append((run, name, value, step))

        def set_terminated(self, run: str) -> None:
            told.append((run, "terminated"))

    for name, content in (("wandb", {"init": init}), ("mlflow", {}), ("mlflow.tracking", {"MlflowClient": Client})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with hf.MemberLogger(wandb={"project": "p"}, mlflow="e") as logger:
        logger.log(["a"], 3, loss=[0.5])
        logger.log(["a"], 4, loss=[0.25])
    run = "id of e, a"
    assert told == [
        {"name": "a", "reinit": "create_new", "project": "p"},
        ("a", 3, {"loss": 0.5}),
        (run, "loss", 0.5, 3),
        ("a", 4, {"loss": 0.25}),
        (run, "loss", 0.25, 4),
        ("a", "finished"),
        (run, "terminated"),
    ]


def test_the_best_and_the_worst() -> None:
    out = io.StringIO()
    with hf.MemberProgress(2, name="accuracy", mode="max", console=Console(file=out, width=120)) as progress:
        progress.update(["a", None, "b", "c"], [0.5, 0.9, 0.75, 0.25])
        assert progress.text == "accuracy: best b 0.75, worst c 0.25"
        progress.update(["a", None, "b", "c"], [0.5, 0.9, math.nan, 0.25])
        assert progress.text == "accuracy: best a 0.5, worst b nan"
    assert "2/2" in out.getvalue()
    assert "best a 0.5" in out.getvalue()
    with pytest.raises(ValueError, match="it is min or max"):
        hf.MemberProgress(1, mode="best")


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_no_markup(terminal: bool) -> None:
    console = Console(file=(out := io.StringIO()), width=120, force_terminal=terminal, _environ={"TERM": "xterm"})
    with hf.MemberProgress(1, console=console) as progress:
        progress.update(["net [/3]", "[red]"], [0.5, 0.75])
    assert "best net [/3] 0.5, worst [red] 0.75" in out.getvalue()
