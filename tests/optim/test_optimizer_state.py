"""State dicts, copies and pickles of a running optimizer continue exactly."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hfusion import CheckpointError, optim
from hfusion.optim.hyper import MemberVector
from tests.optim.arrays import EVERY, Array, run, start

BOTH = pytest.mark.parametrize(("name", "options"), EVERY.values(), ids=EVERY)


@BOTH
def test_state_dict_round_trip_through_a_file(name: str, options: dict[str, Any]) -> None:
    array = Array(3)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2, skip=[1])
    file = io.BytesIO()
    torch.save(fused.state_dict(), file)
    file.seek(0)
    again = getattr(optim, name)(array.params, lr=9.0)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert type(again.param_groups[0]["lr"]) is MemberVector
    assert again.param_groups[0]["lr"].dtype == torch.float64
    run(array, again, alone, 3)
    array.assert_equal()


def test_counts_in_a_state_dict_do_not_go_on() -> None:
    array = Array(2)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 1)
    saved = fused.state_dict()
    run(array, fused, alone, 2)
    assert [entry["step"].tolist() for entry in saved["state"].values()] == [[1.0, 1.0]] * len(array.params)


def test_state_of_another_array_is_refused() -> None:
    array, other = Array(3), Array(2)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 1)
    smaller = optim.Adam(other.params, lr=[0.1, 0.2])
    with pytest.raises(CheckpointError, match="lr has 3 values for an array of 2 members"):
        smaller.load_state_dict(fused.state_dict())
    assert smaller.param_groups[0]["lr"].tolist() == [0.1, 0.2]
    with pytest.raises(CheckpointError, match="not one of this array and of SGD: 'momentum'"):
        optim.SGD(array.params).load_state_dict(fused.state_dict())
    reshaped = Array(3, shapes=[(4, 2), (), (5,), (2, 1, 3), (0,)])
    with pytest.raises(CheckpointError, match=r"state 'exp_avg' of parameter 0 has shape \[3, 4, 3\].*\[3, 4, 2\]"):
        optim.Adam(reshaped.params).load_state_dict(fused.state_dict())


GARBAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda state: None, "the state must be what an optimizer's state_dict.* Got NoneType"),
    "a word": (lambda state: "x", "Got str"),
    "of a module": (lambda state: nn.Linear(1, 1).state_dict(), r"Got OrderedDict with keys \['bias', 'weight'\]"),
    "empty": (lambda state: {}, "Got dict with keys"),
    "without groups": (lambda state: {"state": state["state"]}, "must be what an optimizer's state_dict"),
    "groups of words": (lambda state: {**state, "param_groups": ["x"]}, "must be what an optimizer's state_dict"),
    "one parameter": (
        lambda state: {**state, "param_groups": [{"params": 0}]},
        "must be what an optimizer's state_dict",
    ),
    "a list of state": (lambda state: {**state, "state": []}, "must be what an optimizer's state_dict"),
    "words of state": (
        lambda state: {**state, "state": {0: "x"}},
        "state of parameter 0 must be a dict of tensors, got str",
    ),
    "a word of it": (
        lambda state: {**state, "state": {0: {"exp_avg": "x"}}},
        "'exp_avg' of parameter 0 must be a tensor, got str",
    ),
    "an unknown one": (lambda state: {**state, "state": {9: {}}}, "a parameter 9 that is in none of its param groups"),
    "of one model": (lambda state: _of_one_model(), "the state is not one of this array and of Adam"),
    "a rate": (lambda state: _with_rate(state, "x"), "lr='x' is not a number"),
}


def _of_one_model() -> Any:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam([model.weight])
    model.weight.grad = torch.ones(4, 3)
    optimizer.step()
    return optimizer.state_dict()


def _with_rate(state: Any, rate: Any) -> Any:
    return {**state, "param_groups": [{**state["param_groups"][0], "lr": rate}]}


@pytest.mark.parametrize(("change", "message"), GARBAGE.values(), ids=GARBAGE)
def test_an_invalid_state_is_refused(change: Callable[[Any], Any], message: str) -> None:
    array = Array(3, shapes=[(4, 3)])
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 2)
    with pytest.raises(CheckpointError, match=message):
        fused.load_state_dict(change(fused.state_dict()))
    run(array, fused, alone, 2)
    array.assert_equal()
