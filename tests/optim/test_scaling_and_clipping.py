"""Clipping and loss scaling: each member as alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn import Parameter

import hfusion as hf
from hfusion import FusionError, optim
from hfusion.core.membership import Membership, mark
from tests.optim.arrays import CASES, Array, Per, for_array, for_member, start

# Clipping an array equals clipping each member.
INF = float("inf")


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 4.0, INF, None])
def test_equals_alone(members: int, norm_type: float, max_norm: float | None) -> None:
    array = Array(members)
    array.draw_grads(skip=[2])
    limits = [0.5 * 3**member for member in range(members)] if max_norm is None else [max_norm] * members
    norms = optim.clip_grad_norm_(array.params, limits if max_norm is None else max_norm, norm_type)
    torch.testing.assert_close(norms, array.clip_alone(limits, norm_type), rtol=1e-12, atol=0.0)
    for index, param in enumerate(array.params):
        if param.grad is not None:
            alone = torch.stack([params[index].grad for params in array.members])  # type: ignore[misc]
            torch.testing.assert_close(param.grad, alone, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("value", [float("nan"), INF])
def test_a_bad_member_leaves_its_neighbours_bit_identical(value: float) -> None:
    array = Array(3, dtype=torch.float32)
    array.draw_grads()
    clean = [param.grad.clone() for param in array.params if param.grad is not None]
    for param in array.params:
        if param.grad is not None:
            param.grad[1] = value
    bad = [param.grad.clone() for param in array.params if param.grad is not None]
    first = optim.clip_grad_norm_(array.params, 0.5)
    for param, grad in zip(array.params, clean, strict=True):
        param.grad, grad = grad, param.grad
        bad.append(grad)
    second = optim.clip_grad_norm_(array.params, 0.5)
    assert torch.equal(first[[0, 2]], second[[0, 2]])
    for param, spoiled in zip(array.params, bad[len(clean) :], strict=True):
        assert param.grad is not None
        assert torch.equal(param.grad[[0, 2]], spoiled[[0, 2]])
    for param, grad in zip(array.params, bad, strict=False):
        param.grad = grad
    with pytest.raises(RuntimeError, match=r"norm of order 2.0 is not finite for members \{1: (nan|inf)\}"):
        optim.clip_grad_norm_(array.params, 0.5, error_if_nonfinite=True)


def test_shared_parameters() -> None:
    array = Array(3)
    array.draw_grads()
    shared = mark(Parameter(torch.zeros(2)), Membership("base", 3, False))
    optim.clip_grad_norm_([*array.params, shared], 1.0)
    shared.grad = torch.ones(2)
    with pytest.raises(FusionError, match="'base' is one tensor for all 3 members and has a gradient"):
        optim.clip_grad_norm_([*array.params, shared], 1.0)
    only = mark(Parameter(torch.zeros(2)), Membership("base", 1, False))
    only.grad = torch.ones(2)
    assert optim.clip_grad_norm_([only], 0.5).tolist() == pytest.approx([2**0.5])
    assert only.grad.norm().item() == pytest.approx(0.5, rel=1e-5)


# Scalers over an array: every member skips the steps that torch's skips for it alone; ours has its scale, too.
# Step: the parameter and the member that get a value which is not finite.
BAD = {1: (0, 1, float("inf")), 2: (1, 2, float("nan")), 4: (0, 0, -float("inf")), 5: (1, 0, float("nan"))}
OPTIONS: dict[str, Any] = {
    "init_scale": Per(1024.0, 0.5),
    "growth_factor": Per(2.0, 1.5),
    "backoff_factor": Per(0.5, 0.5),
    "growth_interval": 2,
}


# With torch's, a value that was clipped away would be an overflow that nobody sees.
WAYS = [("ours", "value"), *((kind, way) for kind in ("ours", "torch") for way in ("scaled", "unscaled", "norm"))]


def torchs_scaler(**options: Any) -> GradScaler:
    grad_scaler = GradScaler("cpu", **options)
    grad_scaler.scale(torch.zeros(()))
    return grad_scaler


def scalers(kind: str) -> tuple[Any, list[GradScaler]]:
    """A scaler over three members, and each member's own."""
    if kind == "torch":
        options = {"init_scale": 1024.0, "growth_interval": 2}
        return torchs_scaler(**options), [torchs_scaler(**options) for _ in range(3)]
    fused = hf.optim.GradScaler(**for_array(OPTIONS, 3))
    fused.scale(torch.zeros(3))
    return fused, [torchs_scaler(**for_member(OPTIONS, member)) for member in range(3)]


def draw(array: Array, step: int, fused: Any, alone: list[GradScaler]) -> None:
    """Gradients of scaled losses, those alone by the member's own scale."""
    array.draw_grads()
    for index, param in enumerate(array.params):
        assert param.grad is not None
        if step in BAD and BAD[step][0] == index:
            param.grad[BAD[step][1]].view(-1)[0] = BAD[step][2]
        for member, params in enumerate(array.members):
            params[index].grad = param.grad[member] * alone[member].get_scale()
        param.grad.mul_(torch.as_tensor(fused.get_scale()).reshape(-1, *[1] * (param.dim() - 1)))


@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("kind", "variant"), WAYS)
def test_scaled_steps_equal_alone(name: str, options: dict[str, Any], kind: str, variant: str) -> None:
    array = Array(3, shapes=[(4, 3), (5,)])
    fused, alone = start(name, options, array)
    fused_scaler, member_scalers = scalers(kind)
    for step in range(7):
        if kind == "ours":
            assert fused_scaler.get_scale().tolist() == [grad_scaler.get_scale() for grad_scaler in member_scalers]
        draw(array, step, fused_scaler, member_scalers)
        pairs = [(fused_scaler, fused), *zip(member_scalers, alone, strict=True)]
        for grad_scaler, opt in pairs if variant != "scaled" else ():
            grad_scaler.unscale_(opt)
        if variant == "norm":
            hf.optim.clip_grad_norm_(array.params, [1.0, 0.5, 2.0])
            for params, limit in zip(array.members, [1.0, 0.5, 2.0], strict=True):
                torch.nn.utils.clip_grad_norm_(params, limit)
        if variant == "value":
            hf.optim.clip_grad_value_(array.params, [0.3, 0.1, float("inf")])
            for params, limit in zip(array.members, [0.3, 0.1, float("inf")], strict=True):
                torch.nn.utils.clip_grad_value_(params, limit)
        for grad_scaler, opt in pairs:
            grad_scaler.step(opt)
            grad_scaler.update()
        array.assert_equal(rtol=1e-12)
    assert not hasattr(fused, "found_inf")


def test_a_scale_that_would_be_infinite_stays_as_in_torch() -> None:
    array = Array(2, shapes=[(2,)])
    opt = hf.optim.SGD(array.params, lr=0.1)
    options: dict[str, Any] = {"init_scale": 2.0**126, "growth_interval": 1}
    fused_scaler, plain_scaler = hf.optim.GradScaler(**options), torchs_scaler(**options)
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


def test_an_overflow_that_was_clipped_away_is_refused() -> None:
    array = Array(2, shapes=[(4,)])
    fused, _ = start("SGD", {}, array)
    grad_scaler = torchs_scaler()
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
