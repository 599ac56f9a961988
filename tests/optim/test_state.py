"""The state of an optimizer: saved, loaded, converted from and to torch's, and invalid values."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

import hfusion as hf
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


def test_hooks_of_a_load_give_and_change_the_state() -> None:
    array = Array(2)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 1)
    given = fused.state_dict()
    for entry in given["state"].values():
        entry["exp_avg"] = entry["exp_avg"] + 1
    fused.register_load_state_dict_pre_hook(lambda opt, state: given)
    fused.register_load_state_dict_post_hook(lambda opt: [entry["step"].add_(1) for entry in opt.state.values()])
    fused.load_state_dict(alone[0].state_dict())
    for entry, key in zip(fused.state.values(), given["state"], strict=True):
        assert torch.equal(entry["exp_avg"], given["state"][key]["exp_avg"])
        assert torch.equal(entry["step"], given["state"][key]["step"] + 1)


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


# Tensors that were converted, moved or replaced behind an optimizer's back: an error in words, or the right step.

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9}),
    "adam": ("Adam", {"amsgrad": True}),
}
ALL = pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
# Two steps prepare, the third takes the short way.
STEPS = pytest.mark.parametrize("steps", [1, 3])


@pytest.fixture(params=["kernels of our own", "torch's kernels"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", "0" if request.param == "torch's kernels" else "")


def begun(name: str, options: dict[str, Any], steps: int, dtype: torch.dtype = torch.float32) -> tuple[Any, Array]:
    array = Array(3, shapes=[(40, 30), (5,)], dtype=dtype)
    fused, alone = start(name, {"lr": 0.01, **options}, array)
    run(array, fused, alone, steps)
    array.draw_grads()
    return fused, array


def convert(param: Tensor, **to: Any) -> None:
    grad = param.grad
    assert grad is not None
    param.grad = None
    param.data = param.data.to(**to)
    param.grad = grad.to(**to)


KINDS: dict[str, dict[str, Any]] = {"double": {"dtype": torch.float64}, "bfloat16": {"dtype": torch.bfloat16}}


@pytest.mark.usefixtures("kernels")
@ALL
@STEPS
@pytest.mark.parametrize("to", KINDS.values(), ids=KINDS)
def test_converted_parameters(name: str, options: dict[str, Any], steps: int, to: dict[str, Any]) -> None:
    fused, array = begun(name, options, steps)
    for param in array.params:
        convert(param, **to)
    kind = str(to.get("dtype", torch.float32)).removeprefix("torch.")
    message = rf"of parameter 'p0' is float32 \[3, 40, 30\] on cpu, the parameter {kind} \[3, 40, 30\] on cpu"
    with pytest.raises(hf.FusionError, match=rf"{message}.*opt\.load_state_dict\(opt\.state_dict\(\)\)"):
        fused.step()


def state(fused: Any, array: Array) -> dict[str, Tensor]:
    entry: dict[str, Tensor] = fused.state[array.params[0]]
    return entry


def stack(entry: dict[str, Tensor]) -> str:
    return next(name for name in entry if name != "step")


def replaced(change: Callable[[Tensor], Any]) -> Callable[[dict[str, Tensor]], None]:
    return lambda entry: entry.update({stack(entry): change(entry[stack(entry)])})


def data(change: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], None]:
    def write(entry: dict[str, Tensor]) -> None:
        entry[stack(entry)].data = change(entry[stack(entry)].data)

    return write


BROKEN: dict[str, Callable[[dict[str, Tensor]], None]] = {
    "double": replaced(Tensor.double),
    "shorter": replaced(lambda t: t[:, :1].clone()),
    "another device": replaced(lambda t: t.to("meta")),
    "data double": data(Tensor.double),
    "data as integers": data(lambda t: t.view(torch.int32)),
    "counts of others": lambda entry: entry.update(step=torch.zeros(7)),
    "one count": lambda entry: entry.update(step=torch.tensor(3.0)),
    # type: ignore[call-overload]
}


@pytest.mark.usefixtures("kernels")
@ALL
@STEPS
@pytest.mark.parametrize("change", BROKEN.values(), ids=BROKEN)
def test_state_that_does_not_fit(name: str, options: dict[str, Any], steps: int, change: Any) -> None:
    fused, array = begun(name, options, steps)
    before = [param.detach().clone() for param in array.params]
    change(state(fused, array))
    with pytest.raises(hf.FusionError, match=r"of parameter 'p0' (is|are|must) "):
        fused.step()
    assert all(map(torch.equal, array.params, before))


GRADIENTS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "another shape": (lambda g: g.reshape(3, 30, 40), r"has shape \[3, 30, 40\], the parameter \[3, 40, 30\]"),
    "complex": (lambda g: g.to(torch.complex64), r"is torch.complex64, the parameter torch.float32"),
    "fewer": (lambda g: g[:1], r"has shape \[1, 40, 30\]"),
}


@pytest.mark.usefixtures("kernels")
@ALL
@STEPS
@pytest.mark.parametrize(("change", "message"), GRADIENTS.values(), ids=GRADIENTS)
def test_gradients_that_do_not_fit(name: str, options: dict[str, Any], steps: int, change: Any, message: str) -> None:
    fused, array = begun(name, options, steps)
    param = array.params[0]
    assert param.grad is not None
    param.grad.data = change(param.grad.data)
    for act in (fused.step, lambda: hf.optim.clip_grad_norm_(array.params, 1.0)):
        with pytest.raises(RuntimeError, match=rf"the gradient of 'p0' {message}"):
            act()


NOT_ONE = "the state is not one of this array and of Adam"
GARBAGE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda state: None, NOT_ONE),
    "one parameter": (lambda state: {**state, "param_groups": [{"params": 0}]}, NOT_ONE),
    "words of state": (lambda state: {**state, "state": {0: "x"}}, NOT_ONE),
    "an unknown one": (lambda state: {**state, "state": {9: {}}}, "a parameter 9 that is in none of its param groups"),
}


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


def test_sparse_gradients_are_refused() -> None:
    array = Array(2, shapes=[(3,)])
    fused = optim.SGD(array.params)
    array.params[0].grad = torch.eye(2, 3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="needs dense ones"):
        fused.step()


@pytest.mark.parametrize("kind", ["tensor", "vector"])
def test_groups_that_are_given_one_tensor_have_vectors_of_their_own(kind: str) -> None:
    lr = torch.tensor([0.1, 0.2], dtype=torch.float64)
    value = lr if kind == "tensor" else member_vector("lr", lr, 2)
    opt = optim.SGD([{"params": [param]} for param in Array(2).params[:2]], lr=value)
    opt.param_groups[0]["lr"].mul_(2)
    assert opt.param_groups[1]["lr"].tolist() == value.tolist() == [0.1, 0.2]
