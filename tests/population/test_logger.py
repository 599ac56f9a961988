"""Numbers of members are logged under their names; the progress bar shows the best and the worst."""

from __future__ import annotations

import csv
import io
import math
import struct
import sys
import time
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
        self.closed = 0
        self.error: BaseException | None = None

    def write(self, step: int, member: str, values: Mapping[str, float]) -> None:
        self.rows.append((step, member, dict(values)))

    def close(self, error: BaseException | None) -> None:
        self.closed, self.error = self.closed + 1, error


def test_a_file_and_whatever_else(tmp_path: Path) -> None:
    pop, recorder, path = population(3), Kept(), tmp_path / "logs" / "all.csv"
    pop.stop(1)
    for step in range(2):
        with hf.MemberLogger(csv=path, sinks=[recorder]) as logger:
            logger.log(pop, step, loss=torch.tensor([1.0, math.nan, 3.0]) / (step + 1), lr=pop.hparams["lr"])
    assert recorder.closed
    assert [row[:2] for row in recorder.rows] == [(0, "net 0.0"), (0, "net 0.2"), (1, "net 0.0"), (1, "net 0.2")]
    assert recorder.rows[-1][2] == pytest.approx({"loss": 1.5, "lr": 0.03})
    with path.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 8
    assert rows[0] == {"step": "0", "member": "net 0.0", "name": "loss", "value": "1.0"}
    with hf.MemberLogger(sinks=[recorder]) as logger:
        with pytest.raises(ValueError, match="loss has 2 values for 3 rows"):
            logger.log(pop, 0, loss=[1.0, 2.0])
        for values in (0.5, None, ["a", "b", "c"]):
            with pytest.raises(ValueError, match=r"loss=.*: give a number for each of 3 rows"):
                logger.log(pop, 0, loss=values)
        with pytest.raises(ValueError, match=r"step=0\.5: give a whole number"):
            logger.log(pop, 0.5, loss=[1.0, 2.0, 3.0])
        # Numbers of Python keep their digits.
        logger.log(["a", "b"], torch.tensor(7), loss=[0.1, torch.tensor(0.5, requires_grad=True)])
    assert recorder.rows[-2:] == [(7, "a", {"loss": 0.1}), (7, "b", {"loss": 0.5})]


class Failing(Kept):
    def close(self, error: BaseException | None) -> None:
        super().close(error)
        raise OSError("no space left")


def test_all_is_closed_once_whatever_happens(tmp_path: Path) -> None:
    sinks = [Failing(), Kept()]
    logger = hf.MemberLogger(sinks=sinks)
    with pytest.raises(OSError, match="no space left"), logger:
        pass
    logger.close()
    assert [sink.closed for sink in sinks] == [1, 1]
    with pytest.raises(ValueError, match="this logger is closed"):
        logger.log(["a"], 0, loss=[1.0])
    recorder = Kept()
    with pytest.raises(KeyboardInterrupt), hf.MemberLogger(sinks=[recorder]):
        raise KeyboardInterrupt
    assert isinstance(recorder.error, KeyboardInterrupt)
    # What cannot be made closes what was.
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        hf.MemberLogger(sinks=[recorder], csv=tmp_path / "file" / "log.csv")
    assert recorder.closed == 2


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
    for torn in (b"3,a,lo", b"3,a,loss,0.12", '3,"\u00e4'.encode()[:-1]):
        with path.open("ab") as file:
            file.write(torn)
        with hf.MemberLogger(csv=path):
            pass
        assert rows_of(path) == rows
    # From a checkpoint of step 1: steps 1 and 2 come again.
    with hf.MemberLogger(csv=path, purge_step=1) as logger:
        logger.log(["a"], 1, loss=[0.125])
    assert rows_of(path) == [*rows[:2], {"step": "1", "member": "a", "name": "loss", "value": "0.125"}]
    assert [entry.name for entry in tmp_path.iterdir()] == ["all.csv"]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"begins with \['a', 'b'\], and a log with"):
        hf.MemberLogger(csv=tmp_path / "other.csv")


@pytest.mark.parametrize("names", [["a", "a"], ["a", ""], ["a", 3], "ab"])
def test_names_that_are_none_or_of_two(names: Any) -> None:
    with pytest.raises(ValueError, match=r"name of its own|a name is a string|a name for each row"):
        hf.MemberLogger(sinks=[Kept()]).log(names, 0, loss=[1.0, 2.0])


def test_folders_of_names_are_apart_and_stay_where_they_are(tmp_path: Path) -> None:
    names = ["a/b", "a_b", "a%2Fb", "..", ".", "/etc", "x" * 300, "x" * 299, "ä", "a b", "a\\b", "a\nb", "%~", ".a"]
    folders = [tmp_path / file_name(name, safe=" ") for name in names]
    for folder in folders:
        folder.mkdir()
        assert folder.resolve().parent == tmp_path.resolve()
    assert len({folder.name.lower() for folder in folders}) == len(names)
    assert file_name("net 0.1_b-c~", safe=" ") == "net 0.1_b-c~"


def test_tensorboard_has_a_run_for_each_member(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def log(steps: range, purge_step: int | None = None) -> None:
        with hf.MemberLogger(tensorboard=tmp_path, purge_step=purge_step) as logger:
            for step in steps:
                logger.log(["a", None, "b/c"], step, **{"loss": [float(step), 0.0, math.nan], "val/top 1": [0, 1, 2.0]})
                logger.log(["b/c"], step, scale=[2.0 * step])

    log(range(3))
    # Files of one second would be read in the order of their names.
    time.sleep(1.1)
    log(range(1, 4), purge_step=1)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["a", "b%2Fc"]
    scalars = {}
    for folder in tmp_path.iterdir():
        events = EventAccumulator(str(folder))
        events.Reload()
        for name in events.Tags()["scalars"]:
            scalars[folder.name, name] = [(event.step, event.value) for event in events.Scalars(name)]
    steps = range(4)
    assert all(math.isnan(value) for _, value in scalars.pop(("b%2Fc", "loss")))
    assert scalars == {
        ("a", "loss"): [(step, float(step)) for step in steps],
        ("a", "val/top 1"): [(step, 0.0) for step in steps],
        ("b%2Fc", "val/top 1"): [(step, 2.0) for step in steps],
        ("b%2Fc", "scale"): [(step, 2.0 * step) for step in steps],
    }


def log_and_raise(logger: hf.MemberLogger, error: BaseException, names: list[str], step: int, **values: Any) -> None:
    logger.log(names, step, **values)
    raise error


def wandb_records(path: Path) -> list[Any]:
    """Of a file of W&B: the records of a log of LevelDB, behind a head of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, offset, records = path.read_bytes(), 7, []
    while offset < len(data):
        _, size, kind = struct.unpack("<IHB", data[offset : offset + 7])
        # Of tests: all in one block.
        assert kind == 1
        records.append(Record.FromString(data[offset + 7 : offset + 7 + size]))
        offset += 7 + size
    return records


def test_wandb_has_a_run_for_each_member(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    options = {"project": "p", "mode": "offline", "dir": str(tmp_path), "settings": wandb.Settings(silent=True)}
    with hf.MemberLogger(wandb=options) as logger:
        logger.log(["a", "b/c d"], 0, **{"loss": [0.1, math.nan], "val/top 1": [0.5, 0.25]})
        logger.log(["a"], 3, loss=[math.inf])
    with pytest.raises(RuntimeError), hf.MemberLogger(wandb={**options, "id": "mine"}) as logger:
        log_and_raise(logger, RuntimeError(), ["a"], 1, loss=[1.0])
    runs = {}
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        records = wandb_records(path)
        (run,) = [record.run for record in records if record.HasField("run")]
        (end,) = [record.exit.exit_code for record in records if record.HasField("exit")]
        history = [
            (record.history.step.num, "/".join(item.nested_key), item.value_json)
            for record in records
            if record.HasField("history")
            for item in record.history.item
            if not item.nested_key[0].startswith("_")
        ]
        runs[run.display_name, end] = sorted(history)
        assert run.run_id.startswith("mine-") == bool(end)
    assert runs == {
        ("a", 0): [(0, "loss", "0.1"), (0, "val/top 1", "0.5"), (3, "loss", "Infinity")],
        ("b/c d", 0): [(0, "loss", "NaN"), (0, "val/top 1", "0.25")],
        ("a", 1): [(1, "loss", "1")],
    }


# What its own packages warn of is not ours.
@pytest.mark.filterwarnings("default")
def test_mlflow_has_a_run_for_each_member(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'runs.db'}")
    mlflow.set_experiment("e")
    values = {"loss": [0.1, math.nan], "val/top 1": [0.5, 0.25]}
    with mlflow.start_run() as parent, pytest.raises(KeyboardInterrupt), hf.MemberLogger(mlflow="e") as logger:
        log_and_raise(logger, KeyboardInterrupt(), ["a", "b/c d"], 0, **values)
    with mlflow.start_run(run_id=parent.info.run_id), hf.MemberLogger(mlflow="e") as logger:
        logger.log(["a", "new"], 1, loss=[1.0, 2.0])
    with hf.MemberLogger(mlflow="e") as logger:
        logger.log(["a"], 5, loss=[9.0])
    client = mlflow.MlflowClient()
    histories = {}
    for run in client.search_runs([client.get_experiment_by_name("e").experiment_id]):
        history = {
            name: [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, name)]
            for name in run.data.metrics
        }
        inside = run.data.tags.get("mlflow.parentRunId") == parent.info.run_id
        histories[run.info.run_name, run.info.status, inside] = history
    ((_, nan),) = histories["b/c d", "KILLED", True].pop("loss")
    assert math.isnan(nan)
    del histories[parent.info.run_name, "FINISHED", False]
    assert histories == {
        ("a", "FINISHED", True): {"loss": [(0, 0.1), (1, 1.0)], "val/top 1": [(0, 0.5)]},
        ("b/c d", "KILLED", True): {"val/top 1": [(0, 0.25)]},
        ("new", "FINISHED", True): {"loss": [(1, 2.0)]},
        ("a", "FINISHED", False): {"loss": [(5, 9.0)]},
    }


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"wandb": "p"}, ValueError, "give options of wandb.init"),
        ({"wandb": {"name": "a"}}, ValueError, "members have their own"),
        ({"wandb": {"reinit": True}}, ValueError, "it is create_new"),
        ({"wandb": {}}, ImportError, "needs wandb: pip install wandb"),
        ({"mlflow": "e"}, ImportError, "needs mlflow: pip install mlflow"),
        ({"tensorboard": "runs"}, ImportError, "needs tensorboard: pip install tensorboard"),
    ],
)
def test_wrong_options_of_services_are_errors(
    options: dict[str, Any], error: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("wandb", "mlflow", "tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(error, match=words):
        hf.MemberLogger(**options)


def test_services_get_a_run_for_each_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against stand-ins of the two packages, which want an account or a server."""
    calls: list[Any] = []

    def init(**options: Any) -> Any:
        calls.append(options)
        return SimpleNamespace(
            log=lambda values, step: calls.append((options["name"], step, values)),
            finish=lambda exit_code: calls.append((options["name"], "finished", exit_code)),
        )

    class Client:
        def get_experiment_by_name(self, name: str) -> None:
            return None

        def create_experiment(self, name: str) -> str:
            return f"id of {name}"

        def create_run(self, experiment: str, run_name: str, tags: dict[str, str]) -> Any:
            return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}, {run_name}"))

        def log_batch(self, run: str, metrics: list[tuple[Any, ...]]) -> None:
            calls.extend((run, name, value, step) for name, value, _, step in metrics)

        def set_terminated(self, run: str, status: str) -> None:
            calls.append((run, status))

    mlflow = {"MlflowClient": Client, "active_run": lambda: None}
    entities = {"Metric": lambda *of: of}
    for name, content in (("wandb", {"init": init}), ("mlflow", mlflow), ("mlflow.entities", entities)):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    with hf.MemberLogger(wandb={"project": "p"}, mlflow="e") as logger:
        logger.log(["a"], 3, loss=[0.5])
        logger.log(["a"], 4, loss=[0.25])
    run = "id of e, a"
    assert calls == [
        {"name": "a", "reinit": "create_new", "project": "p"},
        ("a", 3, {"loss": 0.5}),
        (run, "loss", 0.5, 3),
        ("a", 4, {"loss": 0.25}),
        (run, "loss", 0.25, 4),
        ("a", "finished", 0),
        (run, "FINISHED"),
    ]


def test_the_best_and_the_worst() -> None:
    out = io.StringIO()
    with hf.MemberProgress(2, name="accuracy", mode="max", console=Console(file=out, width=120)) as progress:
        progress.update(["a", None, "b", "c"], [0.5, 0.9, 0.75, 0.25])
        assert progress.text == "accuracy: best b 0.75, worst c 0.25"
        progress.update(["a", None, "b", "c"], [0.5, 0.9, math.nan, 0.25])
        assert progress.text == "accuracy: best a 0.5, worst b nan"
    assert "2/2" in out.getvalue()
    with pytest.raises(ValueError, match="drawn inside of its block"):
        progress.update(["a"], [0.5])
    assert "best a 0.5" in out.getvalue()
    with pytest.raises(ValueError, match="it is min or max"):
        hf.MemberProgress(1, mode="best")


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_no_markup(terminal: bool) -> None:
    console = Console(file=(out := io.StringIO()), width=120, force_terminal=terminal, _environ={"TERM": "xterm"})
    with hf.MemberProgress(1, console=console) as progress:
        progress.update(["net [/3]", "[red]"], [0.5, 0.75])
    assert "best net [/3] 0.5, worst [red] 0.75" in out.getvalue()
