"""The state of an optimizer: saved, loaded, converted from and to torch's, and invalid values."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from hfusion import CheckpointError, FusionError, optim
from hfusion.core.membership import Membership, mark
from hfusion.optim.hyper import MemberVector, member_vector
from tests.optim.arrays import CASES, Array, run, start, start_alone

# State dicts, copies and pickles of a running optimizer continue exactly.
BOTH = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)


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


NOT_ONE = "the state is not one of this array and of Adam"
GARBAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda state: None, NOT_ONE),
    "a word": (lambda state: "x", NOT_ONE),
    "of a module": (lambda state: nn.Linear(1, 1).state_dict(), NOT_ONE),
    "empty": (lambda state: {}, NOT_ONE),
    "without groups": (lambda state: {"state": state["state"]}, NOT_ONE),
    "groups of words": (lambda state: {**state, "param_groups": ["x"]}, NOT_ONE),
    "one parameter": (lambda state: {**state, "param_groups": [{"params": 0}]}, NOT_ONE),
    "a list of state": (lambda state: {**state, "state": []}, NOT_ONE),
    "words of state": (lambda state: {**state, "state": {0: "x"}}, NOT_ONE),
    "a word of it": (
        lambda state: {**state, "state": {0: {"exp_avg": "x"}}},
        "'exp_avg' of parameter 0 has str, this optimizer needs a tensor of shape",
    ),
    "an unknown one": (lambda state: {**state, "state": {9: {}}}, "a parameter 9 that is in none of its param groups"),
    "of one model": (lambda state: _of_one_model(), NOT_ONE),
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


# B running torch optimizers become one, and one becomes B, and both continue exactly.
def step_alone(array: Array, alone: list[Any], counts: list[int], skip: tuple[int, ...] = ()) -> None:
    """``counts[b]`` steps of member b; the array follows by copying, as if it was fused afterwards."""
    for optimizer, params, count in zip(alone, array.members, counts, strict=True):
        for _ in range(count):
            for index, param in enumerate(params):
                param.grad = None if index in skip else torch.randn_like(param)
            optimizer.step()
    with torch.no_grad():
        for index, stack in enumerate(array.params):
            stack.copy_(torch.stack([params[index] for params in array.members]))


def into(name: str) -> Any:
    """Return the `into` argument that `optim.fuse` needs: the class, if the members' own is not torch's."""
    return None if hasattr(torch.optim, name) else getattr(optim, name)


@BOTH
@pytest.mark.parametrize("counts", [[2, 2, 2], [0, 3, 1], [0, 0, 0]])
def test_fuse_continues(name: str, options: dict[str, Any], counts: list[int]) -> None:
    array = Array(3)
    alone = start_alone(name, options, array)
    step_alone(array, alone, counts, skip=(2,))
    fused = optim.fuse(alone, array, into=into(name))
    assert type(fused) is getattr(optim, name)
    run(array, fused, alone, 3)
    array.assert_equal()


@BOTH
def test_unfused_dicts_are_those_of_the_members(name: str, options: dict[str, Any]) -> None:
    array = Array(3)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2, skip=[1])
    for unfused, optimizer in zip(fused.unfuse(), alone, strict=True):
        expected = optimizer.state_dict()
        assert unfused["param_groups"] == expected["param_groups"]
        states = {number: state for number, state in expected["state"].items() if state}
        assert unfused["state"].keys() == states.keys()
        for number, state in states.items():
            assert unfused["state"][number].keys() == state.keys()
            for key, value in state.items():
                torch.testing.assert_close(unfused["state"][number][key], value, rtol=1e-9, atol=1e-12)


def test_groups_keep_their_order_and_what_schedulers_left() -> None:
    array = Array(2)
    groups: list[list[dict[str, Any]]] = [[{"params": p[3:]}, {"params": p[:3], "lr": 0.5}] for p in array.members]
    alone = [torch.optim.SGD(group, lr=0.1 * (m + 1), momentum=0.9) for m, group in enumerate(groups)]
    for optimizer in alone:
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    step_alone(array, alone, [1, 2])
    fused = optim.fuse(alone, array)
    assert [param is array.params[3] for param in fused.param_groups[0]["params"]] == [True, False]
    assert fused.param_groups[0]["initial_lr"].tolist() == pytest.approx([0.1, 0.2])
    assert fused.unfuse()[1]["param_groups"][0]["initial_lr"] == pytest.approx(0.2)
    fresh = [torch.optim.SGD([{"params": p[3:]}, {"params": p[:3]}]) for p in array.members]
    for optimizer, state in zip(fresh, fused.unfuse(), strict=True):
        optimizer.load_state_dict(state)
    run(array, fused, fresh, 2)
    array.assert_equal()


def test_adam_with_decoupled_decay_is_adamw() -> None:
    array = Array(2)
    alone = [torch.optim.Adam(p, weight_decay=0.1, decoupled_weight_decay=True) for p in array.members]
    fused = optim.fuse(alone, array)
    assert type(fused) is optim.AdamW
    run(array, fused, alone, 3)
    array.assert_equal()


def test_frozen_shared_parameters_ride_along() -> None:
    base = Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)

    class Based(Array):
        def origin(self, parameter: torch.Tensor) -> tuple[int, str] | None:
            return (0, "base") if parameter is base else super().origin(parameter)

        def named_parameters(self) -> list[tuple[str, Parameter]]:
            return [*super().named_parameters(), ("base", mark(base, Membership("base", 2, False)))]

    array = Based(2)
    alone: list[Any] = [torch.optim.Adam([*p, base], lr=0.1 * (m + 1)) for m, p in enumerate(array.members)]
    fused = optim.fuse(alone, array)
    run(array, fused, alone, 2)
    array.assert_equal()
    base.grad = torch.ones_like(base)
    for optimizer in alone:
        optimizer.step()
    with pytest.raises(FusionError, match="'base' is one tensor for all members, and 2 optimizers have updated it"):
        optim.fuse(alone, array)


# Members that leave, join, are copied and restart equal torch.optim run alone, for every optimizer and option.
def test_a_hold_within_another_adds_to_it() -> None:
    array = Array(3, shapes=[(2,)])
    opt, before = optim.SGD(array.params, lr=0.1), array.params[0].detach().clone()
    array.draw_grads()
    with opt.holding(torch.tensor([True, False, False])):
        with opt.holding(torch.tensor([False, True, False])):
            assert opt.held_members == [0, 1]
            opt.step()
        assert opt.held_members == [0]
    assert opt.held_members == []
    assert (array.params[0].detach() != before).any(1).tolist() == [False, False, True]


# Bad parameters and hyper-parameters: the message names what, the values and the remedy.
def test_shared_parameters_need_one_value() -> None:
    shared = mark(Parameter(torch.zeros(2)), Membership("base.weight", 2, False))
    with pytest.raises(
        ValueError, match=r"'base.weight' is one tensor for all 2 members, and lr differs .*\[0.1, 0.2\]"
    ):
        optim.Adam([shared], lr=[0.1, 0.2])
    optim.Adam([shared], lr=[0.1, 0.1])


def test_sparse_gradients_are_refused() -> None:
    array = Array(2, shapes=[(3,)])
    fused = optim.SGD(array.params)
    array.params[0].grad = torch.eye(2, 3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="SGD does not support sparse gradients"):
        fused.step()


@pytest.mark.parametrize("value", [0.1, 1, [0.1, 0.2], (0.1, 0.2), torch.tensor(0.1), [torch.tensor(0.1)] * 2])
def test_values_that_make_a_vector(value: Any) -> None:
    vector = member_vector("lr", value, 2)
    assert vector.dtype == torch.float64
    assert vector.shape == (2,)


def test_a_vector_copies_as_itself_and_pickles_as_a_tensor() -> None:
    vector = member_vector("lr", [0.1, 0.2], 2)
    for copied in (vector.clone(), copy.deepcopy(vector), vector * 2):
        assert type(copied) is MemberVector
    loaded = pickle.loads(pickle.dumps(vector))
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == [0.1, 0.2]


@pytest.mark.parametrize("kind", ["tensor", "vector"])
def test_groups_that_are_given_one_tensor_have_vectors_of_their_own(kind: str) -> None:
    lr = torch.tensor([0.1, 0.2], dtype=torch.float64)
    value = lr if kind == "tensor" else member_vector("lr", lr, 2)
    opt = optim.SGD([{"params": [param]} for param in Array(2).params[:2]], lr=value)
    opt.param_groups[0]["lr"].mul_(2)
    assert opt.param_groups[1]["lr"].tolist() == value.tolist() == [0.1, 0.2]


def test_fill() -> None:
    vector = member_vector("lr", 0.0, 2)
    assert vector.fill_(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert vector.fill_(3.0).tolist() == [3.0, 3.0]
    assert vector.fill_(torch.tensor(4.0)).tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="cannot write 3 values into a hyper-parameter of 2 members"):
        vector.fill_(torch.zeros(3))
