"""Numbers of members are logged under their names; the progress bar shows the best and the worst."""

from __future__ import annotations

import csv
import math
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import hfusion as hf
from examples.member_sinks import Mlflow, Wandb
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
    with hf.MemberLogger(sinks=[Wandb(options)]) as logger:
        logger.log(["a", "b/c d"], 0, **{"loss": [0.1, math.nan], "val/top 1": [0.5, 0.25]})
        logger.log(["a"], 3, loss=[math.inf])
    with pytest.raises(RuntimeError), hf.MemberLogger(sinks=[Wandb({**options, "id": "mine"})]) as logger:
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
    with mlflow.start_run() as parent, pytest.raises(KeyboardInterrupt), hf.MemberLogger(sinks=[Mlflow("e")]) as logger:
        log_and_raise(logger, KeyboardInterrupt(), ["a", "b/c d"], 0, **values)
    with mlflow.start_run(run_id=parent.info.run_id), hf.MemberLogger(sinks=[Mlflow("e")]) as logger:
        logger.log(["a", "new"], 1, loss=[1.0, 2.0])
    with hf.MemberLogger(sinks=[Mlflow("e")]) as logger:
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
