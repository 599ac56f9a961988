"""torch.amp.GradScaler over an array: a member whose gradients overflow does not step, the others step as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

import hfusion as hf
from tests.optim.arrays import EVERY, Array, start

BOTH = pytest.mark.parametrize(("name", "options"), EVERY.values(), ids=EVERY)
# Step: the parameter and the member that get a value which is not finite.
BAD = {1: (0, 1, float("inf")), 2: (1, 2, float("nan")), 4: (0, 0, -float("inf"))}


def scaler() -> GradScaler:
    grad_scaler = GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    grad_scaler.scale(torch.zeros(()))
    return grad_scaler


def draw(array: Array, step: int, fused_scaler: GradScaler, member_scalers: list[GradScaler]) -> None:
    """Gradients of scaled losses, those alone by the member's own scale."""
    array.draw_grads()
    if step in BAD:
        index, member, value = BAD[step]
        grad = array.params[index].grad
        assert grad is not None
        grad[member].view(-1)[0] = value
    for index, param in enumerate(array.params):
        assert param.grad is not None
        for member, params in enumerate(array.members):
            params[index].grad = param.grad[member] * member_scalers[member].get_scale()
        param.grad.mul_(fused_scaler.get_scale())


@BOTH
@pytest.mark.parametrize("variant", ["scaled", "unscaled before", "clipped"])
def test_equals_alone(name: str, options: dict[str, Any], variant: str) -> None:
    array = Array(3, shapes=[(4, 3), (5,)])
    fused, alone = start(name, options, array)
    fused_scaler, member_scalers = scaler(), [scaler() for _ in alone]
    for step in range(6):
        draw(array, step, fused_scaler, member_scalers)
        pairs = list(zip([fused_scaler, *member_scalers], [fused, *alone], strict=True))
        if variant != "scaled":
            for grad_scaler, optimizer in pairs:
                grad_scaler.unscale_(optimizer)
        if variant == "clipped":
            hf.optim.clip_grad_norm_(array.params, 1.0)
            for params in array.members:
                torch.nn.utils.clip_grad_norm_(params, 1.0)
        for grad_scaler, optimizer in pairs:
            grad_scaler.step(optimizer)
            grad_scaler.update()
        array.assert_equal()
    assert not hasattr(fused, "found_inf")


def test_an_overflow_that_was_clipped_away_is_refused() -> None:
    array = Array(2, shapes=[(4,)])
    fused, _ = start("SGD", {}, array)
    grad_scaler = scaler()
    array.draw_grads()
    assert array.params[0].grad is not None
    array.params[0].grad[0, 0] = float("inf")
    grad_scaler.unscale_(fused)
    torch.nn.utils.clip_grad_value_(array.params, 1.0)
    before = array.params[0].detach().clone()
    with pytest.raises(hf.FusionError, match=r"there are none left.*clip_grad_value_"):
        grad_scaler.step(fused)
    assert torch.equal(array.params[0], before)


def test_a_scaler_that_is_off_and_a_shared_parameter() -> None:
    fused = hf.fuse([nn.Linear(2, 1) for _ in range(2)])
    optimizer = hf.optim.SGD(fused.parameters(), lr=1.0)
    before = fused.get_parameter("weight").detach().clone()
    grad_scaler = GradScaler("cpu", enabled=False)
    grad_scaler.scale(fused(torch.ones(3, 2)).sum()).backward()
    grad_scaler.step(optimizer)
    grad_scaler.update()
    assert torch.equal(fused.get_parameter("weight"), before - 3)
