"""Numbers of members are logged under their names; the progress bar shows the best and the worst."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import hfusion as hf
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
    for torn in (b"3,a,lo", b"3,a,loss,0.12", b'3,"a\n', '3,"\u00e4'.encode()[:-1]):
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
