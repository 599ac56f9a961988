"""State that a trial run of forward changes is restored; changes by other code meanwhile stay."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfusion.capture.python_state import restored, variables
from hfusion.capture.reachable_code import CodeSearch

OWN: dict[str, int] = {}
HELPERS: list[int] = []
OTHERS: dict[str, int] = {}


def help_out(x: Tensor) -> Tensor:
    HELPERS.append(len(HELPERS))
    return x


class Counting(nn.Module):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        global MADE
        MADE = 1
        OWN["calls"] = OWN.get("calls", 0) + 1
        Counting.calls += 1
        self.last: Any = x
        return help_out(x)


def test_variables_that_forward_names_are_restored() -> None:
    module = Counting()
    search = CodeSearch([module])
    before = variables(search)
    with restored(module, search):
        module(torch.zeros(1))
        OTHERS["elsewhere"] = 1
        assert variables(search) != before
    assert (OWN, HELPERS, Counting.calls) == ({}, [], 0)
    assert "MADE" not in globals()
    assert not hasattr(module, "last")
    assert OTHERS == {"elsewhere": 1}
    assert variables(search) == before


class Adding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        SEEN.highest = x.max().item()  # type: ignore[attr-defined]
        SEEN.parts = Row([x])  # type: ignore[attr-defined]
        return x


def test_attributes_that_forward_adds_to_an_object_are_variables() -> None:
    search = CodeSearch([Adding()])
    before = variables(search)
    with restored(Adding(), search):
        Adding()(torch.zeros(1))
        after = variables(search)
    assert {name.rpartition(".")[2] for name in after if name not in before} == {"highest", "parts"}
    assert vars(SEEN).keys() == {"samples"}


class Table(dict[Any, Any]):
    """A dict that refuses item assignment, clear and update."""

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError("a Table is never overwritten")

    clear = update = __setitem__  # type: ignore[assignment]


class Row(list[Any]):
    pass


@pytest.mark.parametrize("make", [dict, Table, Counter, OrderedDict, list, Row, deque, set])
def test_containers_of_any_class_come_back(make: Callable[..., Any]) -> None:
    module = nn.Module()
    module.held = make({"a": 1, "b": 2})
    # Python promises no order of a set of strings.
    ordered = sorted if make is set else list
    before = ordered(module.held)
    with restored(module):
        base = next(kind for kind in (OrderedDict, dict, list, deque, set) if isinstance(module.held, kind))
        base.clear(module.held)
        (base.update if base not in (list, deque) else base.extend)(module.held, {"c": 3})
        assert list(module.held) == ["c"]
    assert ordered(module.held) == before
    if isinstance(module.held, dict):
        assert list(module.held.items()) == [("a", 1), ("b", 2)]


def test_a_deque_of_any_length_comes_back() -> None:
    module = nn.Module()
    module.held = deque([1], maxlen=1000)
    with restored(module):
        module.held.append(2)
    assert module.held == deque([1])


def test_the_order_of_an_ordered_dict_comes_back() -> None:
    module = nn.Module()
    module.held = OrderedDict(a=1, b=2)
    with restored(module):
        module.held.move_to_end("a")
    assert list(module.held) == ["a", "b"]


class Seen:
    def __init__(self) -> None:
        self.samples = 0


SEEN = Seen()


class Reading(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if SEEN.samples >= 0 else x * Seen().samples


def test_variables_that_are_only_read_are_not_restored() -> None:
    with restored(Reading()):
        SEEN.samples += 1
    assert SEEN.samples == 1
