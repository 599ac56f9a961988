"""Every optimizer, with values per member, equals B optimizers of torch.optim."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfusion import optim
from hfusion.optim import native_kernels
from tests.optim.arrays import (
    CASES,
    ONE_EACH,
    Array,
    Per,
    beside_a_bad_member,
    for_array,
    for_member,
    run,
    run_shared,
    start,
)

ALL = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
EACH = pytest.mark.parametrize(("name", "options"), ONE_EACH.values(), ids=ONE_EACH)


@pytest.fixture(autouse=True, params=["native", "formula"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test here runs with the native kernels and with the formulas."""
    monkeypatch.setenv("HFUSION_NATIVE", "1" if request.param == "native" else "0")
    if request.param == "native" and isinstance(reason := native_kernels.library(), str):
        pytest.skip(reason)


@ALL
@pytest.mark.parametrize("members", [1, 2, 5])
def test_equals_alone(name: str, options: dict[str, Any], members: int) -> None:
    array = Array(members)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 6)
    array.assert_equal(rtol=1e-12)


@ALL
def test_parameters_without_gradient_are_skipped(name: str, options: dict[str, Any]) -> None:
    array = Array(3)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2, skip=[0, 2])
    assert array.params[0] not in fused.state
    for skip in ([1], [], [3, 4], []):
        run(array, fused, alone, 2, skip=skip)
        array.assert_equal()


@ALL
def test_a_bad_member_leaves_its_neighbours_bit_identical(name: str, options: dict[str, Any]) -> None:
    first, *others = [beside_a_bad_member(name, options, value) for value in (1.0, float("nan"), float("inf"))]
    for outcome in others:
        assert all(torch.equal(actual, clean) for actual, clean in zip(outcome, first, strict=True))


@ALL
def test_a_parameter_that_is_not_finite_does_not_reach_the_state_without_decay(
    name: str, options: dict[str, Any]
) -> None:
    array = Array(3, shapes=[(4,)])
    fused, alone = start(name, {**options, "weight_decay": Per(0.1, 0.0)}, array)
    for member, params in enumerate(array.members):
        for tensor in (array.params[0][member], params[0]):
            tensor.detach()[2] = float("inf")
    run(array, fused, alone, 3)
    expected = torch.stack([params[0].detach() for params in array.members])
    torch.testing.assert_close(array.params[0].detach(), expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    for key, value in fused.state[array.params[0]].items():
        states = [optimizer.state[params[0]] for optimizer, params in zip(alone, array.members, strict=True)]
        if key != "step":
            torch.testing.assert_close(
                value, torch.stack([state[key] for state in states]), rtol=1e-9, atol=1e-12, equal_nan=True
            )


@EACH
@pytest.mark.parametrize(
    ("dtype", "rtol"),
    [(torch.bfloat16, 0.0), (torch.float16, 0.0), (torch.complex64, 1e-5), (torch.complex128, 1e-12)],
    ids=str,
)
def test_half_precision_has_the_bits_of_torch_and_complex_numbers_are_pairs(
    name: str, options: dict[str, Any], dtype: torch.dtype, rtol: float
) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip("torch has none")
    array = Array(3, dtype=dtype)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2)
    array.draw_grads()
    for param in array.params if dtype.is_complex else ():
        assert param.grad is not None
        # The memory of a conjugate that is not resolved holds other numbers.
        param.grad = param.grad.conj().resolve_conj().conj()
    for optimizer in (fused, *alone):
        optimizer.step()
    array.assert_equal(rtol)


@EACH
def test_autograd_knows_that_parameters_have_changed(name: str, options: dict[str, Any]) -> None:
    array = Array(3, shapes=[(4, 6)])
    fused, _ = start(name, options, array)
    (param,) = array.params
    loss = (param**3).sum()
    loss.backward(retain_graph=True)
    fused.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def groups_of(params: list[Any], options: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {"params": params[:2], **options[0]},
        {"params": params[2:4], **options[1]},
        {"params": params[4:], **options[2]},
    ]


def test_param_groups_and_a_late_one() -> None:
    array = Array(3)
    options: list[dict[str, Any]] = [
        {"lr": Per(0.1, 0.5)},
        {"weight_decay": Per(0.1, 3.0)},
        {"lr": 0.5, "momentum": 0.0},
    ]
    fused = optim.SGD(groups_of(array.params, [for_array(o, 3) for o in options])[:2], lr=0.2, momentum=0.9)
    alone = [
        torch.optim.SGD(groups_of(params, [for_member(o, m) for o in options])[:2], lr=0.2, momentum=0.9)
        for m, params in enumerate(array.members)
    ]
    run(array, fused, alone, 3)
    fused.add_param_group(groups_of(array.params, [for_array(o, 3) for o in options])[2])
    for member, (optimizer, params) in enumerate(zip(alone, array.members, strict=True)):
        optimizer.add_param_group(groups_of(params, [for_member(o, member) for o in options])[2])
    run(array, fused, alone, 3)
    array.assert_equal()


@pytest.mark.parametrize(
    ("write", "expected"),
    [
        (lambda group: group.update(lr=0.3), [0.3, 0.3, 0.3]),
        (lambda group: group.update(lr=[0.1, 0.2, 0.3]), [0.1, 0.2, 0.3]),
        (lambda group: group.update(lr=torch.tensor([0.5, 0.25, 1.0])), [0.5, 0.25, 1.0]),
        (lambda group: group["lr"].mul_(0.5), [0.5, 0.5, 0.5]),
        (lambda group: group.update(lr=group["lr"] * 0.5), [0.5, 0.5, 0.5]),
        (lambda group: group["lr"].__setitem__(2, 0.1), [1.0, 1.0, 0.1]),
        (lambda group: group["lr"].data.fill_(0.2), [0.2, 0.2, 0.2]),
    ],
)
def test_values_written_into_a_group_count_at_the_next_step(write: Any, expected: list[float]) -> None:
    array = Array(3, shapes=[(4,)])
    fused, _ = start("SGD", {"lr": 1.0}, array)
    for lr in ([1.0] * 3, expected):
        array.draw_grads()
        param = array.params[0]
        assert param.grad is not None
        target = param.detach() - torch.tensor(lr, dtype=torch.float64)[:, None] * param.grad
        fused.step()
        torch.testing.assert_close(param.detach(), target, rtol=1e-12, atol=0.0)
        write(fused.param_groups[0])


def test_named_parameters_closure_and_hooks() -> None:
    array = Array(2, shapes=[(3,)])
    fused = optim.SGD(array.named_parameters(), lr=[0.1, 0.2])
    assert fused.param_groups[0]["param_names"] == ["p0"]
    calls = []
    fused.register_step_pre_hook(lambda *_: calls.append("before"))
    fused.register_step_post_hook(lambda *_: calls.append("after"))
    (param,) = array.params
    before = param.detach().clone()

    def closure() -> torch.Tensor:
        fused.zero_grad()
        loss = (param**2).sum()
        loss.backward()
        calls.append("closure")
        return loss

    loss = fused.step(closure)
    assert calls == ["before", "closure", "after"]
    assert loss.item() == pytest.approx((before**2).sum().item())
    torch.testing.assert_close(param.detach(), before * torch.tensor([[0.8], [0.6]], dtype=torch.float64))


@EACH
def test_a_shared_parameter_is_one_ordinary_parameter(name: str, options: dict[str, Any]) -> None:
    array = Array(3)
    fused, shared, plain = run_shared(name, options, array)
    array.assert_equal()
    torch.testing.assert_close(shared, plain, rtol=1e-9, atol=1e-12)
    assert (
        fused.state[shared][next(key for key in fused.state[shared] if key not in fused.numbers)].shape == shared.shape
    )


@pytest.mark.gpu
@ALL
def test_equals_alone_on_a_gpu(name: str, options: dict[str, Any]) -> None:
    array = Array(3, device="cuda")
    fused, alone = start(name, options, array)
    run(array, fused, alone, 2)
    run(array, fused, alone, 4, skip=[1])
    array.assert_equal()
