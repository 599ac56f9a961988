"""Clipping an array equals clipping each member."""

from __future__ import annotations

import pytest
import torch
from torch.nn import Parameter

from hfusion import FusionError, optim
from hfusion.core.membership import Membership, mark
from tests.optim.arrays import Array

INF = float("inf")


def clip_alone(array: Array, limits: list[float], norm_type: float) -> torch.Tensor:
    norms = [
        torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], limit, norm_type)
        for params, limit in zip(array.members, limits, strict=True)
    ]
    return torch.stack(norms)


@pytest.mark.parametrize("members", [1, 2, 5])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 4.0, INF, None])
def test_equals_alone(members: int, norm_type: float, max_norm: float | None) -> None:
    array = Array(members)
    array.draw_grads(skip=[2])
    limits = [0.5 * 3**member for member in range(members)] if max_norm is None else [max_norm] * members
    norms = optim.clip_grad_norm_(array.params, limits if max_norm is None else max_norm, norm_type)
    torch.testing.assert_close(norms, clip_alone(array, limits, norm_type), rtol=1e-12, atol=0.0)
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


def test_one_parameter_no_gradient_and_mixed_dtypes() -> None:
    array, single = Array(2), Array(2, shapes=[(3,)], dtype=torch.float32)
    assert optim.clip_grad_norm_(array.params[0], 1.0).tolist() == [0.0, 0.0]
    array.draw_grads()
    single.draw_grads()
    norms = optim.clip_grad_norm_(iter([*single.params, *array.params]), 1.0)
    assert norms.dtype == torch.float64
    assert optim.clip_grad_norm_([*single.params, *array.params], INF).tolist() == pytest.approx([1.0, 1.0])


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
