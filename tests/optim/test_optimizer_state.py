"""State dicts, copies and pickles of a running optimizer continue exactly."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hfusion import CheckpointError, optim
from hfusion.optim.hyper import MemberVector
from tests.optim.arrays import CASES, EVERY, Array, for_array, run, start

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


@BOTH
def test_state_layout(name: str, options: dict[str, Any]) -> None:
    array = Array(3)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2)
    for param in array.params:
        for key, value in fused.state[param].items():
            assert value.shape == ((3,) if key in fused.numbers else param.shape)
            assert value.is_contiguous()


def test_counts_in_a_state_dict_do_not_go_on() -> None:
    array = Array(2)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 1)
    saved = fused.state_dict()
    run(array, fused, alone, 2)
    assert [entry["step"].tolist() for entry in saved["state"].values()] == [[1.0, 1.0]] * len(array.params)


def test_loaded_state_is_a_copy() -> None:
    array = Array(2)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 1)
    again = optim.Adam(array.params)
    again.load_state_dict(fused.state_dict())
    before = copy.deepcopy(fused.state_dict())
    run(array, again, alone, 1)
    for number, state in fused.state_dict()["state"].items():
        assert all(torch.equal(value, before["state"][number][key]) for key, value in state.items())


@BOTH
def test_deepcopy_and_pickle(name: str, options: dict[str, Any]) -> None:
    array = Array(3, shapes=[(4, 2), (3,)])
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2)
    copies = [copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))]
    run(array, fused, alone, 2)
    for fused_copy in copies:
        assert type(fused_copy.param_groups[0]["lr"]) is MemberVector
        params = fused_copy.param_groups[0]["params"]
        assert all(param is not old for param, old in zip(params, array.params, strict=True))
        state = [fused_copy.state[param] for param in params]
        assert all(
            ("step" in entry) == ("step" in fused.state[p]) for entry, p in zip(state, array.params, strict=True)
        )
        for param in params:
            param.grad = torch.ones_like(param)
        fused_copy.step()


def test_a_copy_of_module_and_optimizer_steps_as_the_original() -> None:
    array = Array(3, shapes=[(4, 2)])
    fused, alone = start("Adam", CASES["adam"][1], array)
    run(array, fused, alone, 2)
    fused_copy = copy.deepcopy(fused)
    array.draw_grads()
    (param,), (copied,) = array.params, fused_copy.param_groups[0]["params"]
    assert param.grad is not None
    copied.grad = param.grad.clone()
    fused_copy.step()
    fused.step()
    assert torch.equal(param, copied)


def test_saved_counts_have_storages_of_their_own() -> None:
    array = Array(3)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 2)
    counts = [state["step"] for state in fused.state_dict()["state"].values()]
    assert [count.tolist() for count in counts] == [[2.0] * 3] * len(array.params)
    assert all(count.untyped_storage().nbytes() == 3 * 4 for count in counts)


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


def test_hyper_parameters_of_a_copy_are_its_own() -> None:
    array = Array(3)
    fused = optim.Adam(array.params, **for_array(CASES["adam-all"][1], 3))
    fused_copy = copy.deepcopy(fused)
    fused_copy.param_groups[0]["lr"].fill_(7.0)
    assert fused.param_groups[0]["lr"].tolist() == [0.1, 0.05, 0.025]
