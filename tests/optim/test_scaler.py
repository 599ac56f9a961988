"""hf.optim.GradScaler: every member has the scale, and skips the steps, that torch.amp.GradScaler has for it alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.optim.arrays import CASES, Array, Per, for_array, for_member, start

BAD = {1: (0, 1, float("inf")), 3: (1, 2, float("nan")), 4: (0, 1, -float("inf")), 5: (1, 0, float("nan"))}
OPTIONS: dict[str, Any] = {
    "init_scale": Per(1024.0, 0.5),
    "growth_factor": Per(2.0, 1.5),
    "backoff_factor": Per(0.5, 0.5),
    "growth_interval": 2,
}


def torch_scaler(member: int) -> torch.amp.GradScaler:
    grad_scaler = torch.amp.GradScaler("cpu", **for_member(OPTIONS, member))
    grad_scaler.scale(torch.zeros(()))
    return grad_scaler


def draw(array: Array, step: int, scales: torch.Tensor) -> None:
    array.draw_grads()
    for index, param in enumerate(array.params):
        assert param.grad is not None
        param.grad.mul_(scales.reshape(-1, *[1] * (param.dim() - 1)))
        if step in BAD and BAD[step][0] == index and BAD[step][1] < len(array):
            param.grad[BAD[step][1]].view(-1)[0] = BAD[step][2]
        for member, params in enumerate(array.members):
            params[index].grad = param.grad[member].clone()


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("variant", ["scaled", "norm", "value"])
def test_equals_alone(name: str, options: dict[str, Any], variant: str) -> None:
    array = Array(3, shapes=[(4, 3), (5,)])
    fused, alone = start(name, options, array)
    fused_scaler = hf.optim.GradScaler(**for_array(OPTIONS, 3))
    member_scalers = [torch_scaler(member) for member in range(3)]
    fused_scaler.scale(torch.zeros(3))
    for step in range(7):
        assert fused_scaler.get_scale().tolist() == [grad_scaler.get_scale() for grad_scaler in member_scalers]
        draw(array, step, fused_scaler.get_scale())
        if variant != "scaled":
            for grad_scaler, opt in [(fused_scaler, fused), *zip(member_scalers, alone, strict=True)]:
                grad_scaler.unscale_(opt)
        if variant == "norm":
            hf.optim.clip_grad_norm_(array.params, [1.0, 0.5, 2.0])
            for params, limit in zip(array.members, [1.0, 0.5, 2.0], strict=True):
                torch.nn.utils.clip_grad_norm_(params, limit)
        if variant == "value":
            hf.optim.clip_grad_value_(array.params, [0.3, 0.1, float("inf")])
            for params, limit in zip(array.members, [0.3, 0.1, float("inf")], strict=True):
                torch.nn.utils.clip_grad_value_(params, limit)
        for grad_scaler, opt in [(fused_scaler, fused), *zip(member_scalers, alone, strict=True)]:
            grad_scaler.step(opt)
            grad_scaler.update()
        array.assert_equal(rtol=1e-12)


def test_a_scale_that_would_be_infinite_stays_as_in_torch() -> None:
    array = Array(2, shapes=[(2,)])
    opt = hf.optim.SGD(array.params, lr=0.1)
    options: dict[str, Any] = {"init_scale": 2.0**126, "growth_interval": 1}
    fused_scaler, plain_scaler = hf.optim.GradScaler(**options), torch.amp.GradScaler("cpu", **options)
    plain_scaler.scale(torch.zeros(()))
    alone = torch.optim.SGD(array.members[0], lr=0.1)
    for _ in range(3):
        array.draw_grads()
        for grad_scaler, optimizer in ((fused_scaler, opt), (plain_scaler, alone)):
            grad_scaler.step(optimizer)
            grad_scaler.update()
        assert fused_scaler.get_scale().tolist() == [plain_scaler.get_scale()] * 2
    assert plain_scaler.get_scale() == 2.0**127


def test_wrong_use_is_an_error() -> None:
    array = Array(2, shapes=[(2,)])
    opt, scaler = hf.optim.SGD(array.params, lr=0.1), hf.optim.GradScaler()
    scaler.scale(torch.zeros(2))
    with pytest.raises(RuntimeError, match="call step first"):
        scaler.update()
    array.draw_grads()
    scaler.unscale_(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(opt)
    scaler.step(opt)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.step(opt)
    off = hf.optim.GradScaler(enabled=False)
    losses = torch.ones(2)
    assert off.scale(losses) is losses
    off.step(opt)
    off.update()


def test_a_trained_base_of_all_wants_one_scale() -> None:
    base = nn.Linear(2, 2)
    fused = hf.fuse([nn.Sequential(base, nn.Linear(2, 1)) for _ in range(2)])
    opt = hf.optim.SGD(fused.parameters(), lr=0.1)
    for scales, fits in (([2.0, 2.0], True), ([2.0, 4.0], False)):
        scaler = hf.optim.GradScaler(init_scale=scales)
        opt.zero_grad()
        scaler.scale(fused(torch.ones(3, 2)).square().mean(dim=(1, 2))).sum().backward()
        if fits:
            scaler.step(opt)
            continue
        with pytest.raises(hf.FusionError, match="is one tensor for all 2 members"):
            scaler.step(opt)
