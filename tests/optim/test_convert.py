"""B running torch optimizers become one, and one becomes B, and both continue exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hfusion import FusionError, optim
from hfusion.core.membership import Membership, mark
from tests.optim.arrays import EVERY, Array, run, start, start_alone

BOTH = pytest.mark.parametrize(("name", "options"), EVERY.values(), ids=EVERY)


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
