"""Rows however they are given; and what fails leaves a population as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf


def net(inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def population(members: int = 4, **options: Any) -> hf.Population:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"optimizer": lambda p: hf.optim.AdamW(p, lr=0.01), "loss": F.cross_entropy}
    return hf.Population([net() for _ in range(members)], **{**defaults, "compile": False, **options})


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])

SEVERAL: list[Callable[[], Any]] = [
    lambda: [1, 2],
    lambda: np.array([1, -2]),
    lambda: torch.tensor([1, 2]),
    lambda: range(1, 3),
    lambda: (row for row in (1, 2)),
    lambda: [np.int64(1), torch.tensor(2)],
]


@pytest.mark.parametrize("rows", SEVERAL)
def test_several_rows(rows: Callable[[], Any]) -> None:
    pop = population()
    stopped = pop.stop(rows())
    assert isinstance(stopped, list)
    assert (len(stopped), pop.tags) == (2, ["member 0", None, None, "member 3"])
    assert pop.start(rows(), stopped) == [1, 2]
    assert pop.tags == ["member 0", "member 4", "member 5", "member 3"]
    pop.copy(rows(), [3, 0])


@pytest.mark.parametrize("row", [2, -2, np.int64(2), np.array(2), torch.tensor(2)])
def test_one_row(row: Any) -> None:
    pop = population()
    stopped = pop.stop(row)
    assert isinstance(stopped, nn.Module)
    assert pop.tags[2] is None
    assert pop.start(row, stopped) == 2
    pop.copy(row, 0)


WRONG: dict[str, tuple[Callable[[hf.Population], object], str]] = {
    "rate": (lambda pop: pop.start(None, net(), lr=-1.0), "lr of member 4 is -1.0"),
    "tag": (lambda pop: pop.start(None, net(), tag="member 0"), "is the name of the member in row 0"),
    "surrogate": (lambda pop: pop.start(None, net(), tag="\ud800"), "letters that no file can hold"),
    "number as tag": (lambda pop: pop.start(None, net(), tag=3), "tag must be one str, or one for each row, got 3"),  # type: ignore[arg-type]
    "no model": (lambda pop: pop.start(None, None), "model must be one Module, or one for each row, got None"),  # type: ignore[arg-type]
    "part of a row": (lambda pop: pop.grow(1.5), "grow by 1.5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG)
def test_nobody_joins_where_it_fails(name: str) -> None:
    pop = population()
    pop.step(*BATCH)
    before = {key: value.clone() for key, value in pop.fused.state_dict().items()}
    act, words = WRONG[name]
    with pytest.raises((ValueError, hf.FusionError), match=words):
        act(pop)
    assert pop.tags == [f"member {row}" for row in range(4)]
    assert all(torch.equal(before[key], value) for key, value in pop.fused.state_dict().items())
    assert pop.step(*BATCH).isfinite().all()


@pytest.mark.parametrize(
    ("options", "common"),
    [({}, False), ({"accumulate": 2}, False), ({"scaler": True}, False), ({"compile": True}, False), ({}, True)],
)
def test_an_update_that_fails_has_not_been(options: dict[str, Any], common: bool) -> None:
    """An invalid learning rate raises; after it is corrected, the run equals one in which it was always valid."""

    def run(fails: bool) -> list[Tensor]:
        arguments = {**options, "scaler": hf.optim.GradScaler()} if "scaler" in options else options
        pop = population(3, **arguments)
        if common:
            base = nn.Linear(4, 4)
            models = [nn.Sequential(base, nn.BatchNorm1d(4), nn.Linear(4, 3)) for _ in range(3)]
            pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.cross_entropy)
        for step in range(3):
            if fails and step == 1:
                rates = pop.hparams["lr"].clone()
                pop.hparams["lr"][:] = -1.0
                for _ in range(options.get("accumulate", 1) - 1):
                    pop.step(*BATCH)
                with pytest.raises(ValueError, match=r"lr of member 0 is -1\.0"):
                    pop.step(*BATCH)
                pop.hparams["lr"] = rates
            for _ in range(options.get("accumulate", 1)):
                pop.step(*BATCH)
        assert pop.ages.tolist() == [3, 3, 3]
        return list(pop.fused.state_dict().values())

    for actual, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda output, target: 1j, "complex"),
        (lambda output, target: 1 / 0, "division by zero"),
    ],
)
def test_a_metric_that_is_none_is_told_with_its_member(metric: Any, words: str) -> None:
    pop = population(2, tags=["a", "b"])
    with pytest.raises((ValueError, ZeroDivisionError), match=words) as raised:
        pop.evaluate(metric, [BATCH])
    assert raised.value.__notes__ == ["This is of the metric of member 'a' in row 0."]
