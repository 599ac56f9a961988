"""Objects that callbacks could change and that are sent to another process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

from hfusion.cluster import reachable
from hfusion.cluster.reachable import TooManyObjects, shared_object

LOG = logging.getLogger(__name__)
DATA = TensorDataset(torch.zeros(4, 2))
SCALE = 1.0


class Holder:
    def __init__(self, value: Any) -> None:
        self.value = value

    def method(self, event: Any) -> None:
        pass


def names_data(event: Any) -> None:
    print(DATA, LOG)


def writes_scale(event: Any) -> None:
    global SCALE
    SCALE = 2.0


def reads_scale(output: Any, target: Any) -> Any:
    LOG.info("a loss")
    return F.mse_loss(output, target) * SCALE


def nonlocal_count() -> tuple[Callable[[Any], None], Callable[[Any], int]]:
    count = 0

    def add(event: Any) -> None:
        nonlocal count
        count += 1

    return add, lambda output: count


ADD, COUNT = nonlocal_count()
OTHER = DataLoader(TensorDataset(torch.zeros(4, 2)), shuffle=True)
LOADER = DataLoader(DATA, sampler=RandomSampler(DATA))


@pytest.mark.parametrize(
    ("callback", "sent", "text"),
    [
        pytest.param([].append, LOADER, None, id="a list of its own"),
        pytest.param(lambda event, other=OTHER: None, LOADER, None, id="another loader"),
        pytest.param(lambda event: F.relu(event.losses), reads_scale, None, id="functions of torch"),
        pytest.param(names_data, reads_scale, None, id="a logger"),
        pytest.param(names_data, LOADER, "TensorDataset", id="a global name"),
        pytest.param(Holder(LOADER.sampler).method, LOADER, "RandomSampler", id="an attribute of a method's object"),
        pytest.param(partial(print, {1: [DATA]}), LOADER, "TensorDataset", id="an argument of a partial"),
        pytest.param(lambda event, data=DATA: None, LOADER, "TensorDataset", id="a default"),
        pytest.param(writes_scale, reads_scale, "the variable SCALE", id="a global number that is written"),
        pytest.param(lambda event: SCALE, reads_scale, None, id="a global number that is read"),
        pytest.param(ADD, COUNT, "an object of class cell", id="a number of an outer function"),
    ],
)
def test_shared_objects(callback: Any, sent: Any, text: str | None) -> None:
    shared = shared_object([callback], [sent, None])
    assert shared is None if text is None else text in (shared or "")


def test_a_search_through_too_many_objects_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachable, "MAX_OBJECTS", 50)
    many = [[number] for number in range(100)]
    with pytest.raises(TooManyObjects, match="more than 50 objects"):
        shared_object([lambda event: None, many], [])
    with pytest.raises(TooManyObjects):
        shared_object([[]], [many])
