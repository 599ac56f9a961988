"""An optimizer that a user writes gets its kernels from its formula."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.optim import FusedOptimizer, for_all, native_kernels, per_member
from tests.optim.arrays import Array, Per, for_array, for_member, run, start
from tests.optim.interpreted import forget, interpret


class Adan(FusedOptimizer):
    """Xie and others, 2022, "Adan: Adaptive Nesterov Momentum Algorithm", algorithm 1."""

    lr: Any = per_member(default=1e-3)
    beta1: Any = per_member(default=0.02, high=1.0)
    beta2: Any = per_member(default=0.08, high=1.0)
    beta3: Any = per_member(default=0.01, high=1.0)
    eps: Any = per_member(default=1e-8)
    weight_decay: Any = per_member(default=0.0)
    maximize: bool = for_all(default=False, kw_only=True)

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("mean", "difference", "square", "before")

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Any]:
        return {**h._asdict(), "first": n.step == 1, "ahead": 1 - h.beta2, "shrink": 1 / (1 + h.lr * h.weight_decay)}

    @staticmethod
    def update(
        param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        grad = -grad if o.maximize else grad
        change = torch.where(s.first != 0, 0 * grad, grad - state["before"])
        mean = torch.lerp(state["mean"], grad, s.beta1)
        difference = torch.lerp(state["difference"], change, s.beta2)
        square = torch.lerp(state["square"], (grad + s.ahead * change) ** 2, s.beta3)
        step = (mean + s.ahead * difference) / (square.sqrt() + s.eps)
        new = {"mean": mean, "difference": difference, "square": square, "before": grad}
        return (param - s.lr * step) * s.shrink, new


def adan(
    param: Tensor,
    grads: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    beta3: float,
    eps: float,
    weight_decay: float,
) -> Tensor:
    """The optimizer of one model in plain torch."""
    mean, difference, square, before = (torch.zeros_like(param) for _ in range(4))
    for step, grad in enumerate(grads):
        change = grad - before if step else torch.zeros_like(grad)
        mean = (1 - beta1) * mean + beta1 * grad
        difference = (1 - beta2) * difference + beta2 * change
        square = (1 - beta3) * square + beta3 * (grad + (1 - beta2) * change) ** 2
        param = (param - lr * (mean + (1 - beta2) * difference) / (square.sqrt() + eps)) / (1 + lr * weight_decay)
        before = grad
    return param


OPTIONS = {
    "lr": Per(0.1, 0.5),
    "beta1": Per(0.02, 2.0),
    "beta2": 0.08,
    "beta3": Per(0.01, 3.0),
    "eps": 1e-8,
    "weight_decay": Per(0.1, 0.5),
}


@pytest.fixture(params=["native", "triton", "torch"])
def steppers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The class of what steps its parameters."""
    monkeypatch.setenv("HFUSION_NATIVE", "0" if request.param == "torch" else "1")
    if request.param == "triton":
        interpret(monkeypatch)
    elif request.param == "native" and isinstance(reason := native_kernels.library(), str):
        pytest.skip(reason)
    yield {"native": "NativeStepper", "triton": "TritonStepper", "torch": "StackedStepper"}[request.param]
    if request.param == "triton":
        forget()


def test_an_optimizer_of_no_table_equals_its_plain_form(steppers: str) -> None:
    array = Array(3)
    start, grads = [param.detach().clone() for param in array.params], []
    fused = Adan(array.params, **for_array(OPTIONS, 3))
    for _ in range(4):
        array.draw_grads()
        grads.append([param.grad for param in array.params])
        fused.step()
    assert [type(group.stepper).__name__ for _, group in fused._prepared.groups] == [steppers]
    for index, param in enumerate(array.params):
        for member in range(3):
            own = [step[index][member] for step in grads]
            expected = adan(start[index][member], own, **for_member(OPTIONS, member))
            torch.testing.assert_close(param.detach()[member], expected, rtol=1e-12, atol=1e-12)


class Shifting(FusedOptimizer):
    """Its stacks are the last gradients."""

    lr: Any = per_member(default=0.1)

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        return ("last", "before")

    @staticmethod
    def update(
        param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return param - s.lr * (grad + state["before"]), {"last": grad, "before": state["last"]}


class Limited(Shifting):
    """Operators that kernels do not have."""

    @staticmethod
    def update(
        param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        return Shifting.update(param, grad.clamp(-1, 1).tanh(), state, s, o)


@pytest.mark.parametrize(("kind", "native"), [(Shifting, True), (Limited, False)])
def test_state_that_becomes_what_another_was(kind: type[Shifting], native: bool, compiler: list[str]) -> None:
    array = Array(2, shapes=[(5,)])
    fused, seen = kind(array.params, lr=[0.1, 0.2]), []
    for _ in range(3):
        array.draw_grads()
        (param,) = array.params
        assert param.grad is not None
        seen.append(param.grad if native else param.grad.clamp(-1, 1).tanh())
        fused.step()
    state = fused.state[array.params[0]]
    torch.testing.assert_close(state["last"], seen[2], rtol=1e-12, atol=0.0)
    torch.testing.assert_close(state["before"], seen[1], rtol=1e-12, atol=0.0)
    assert (type(fused._prepared.groups[0][1].stepper).__name__ == "NativeStepper") == native


# Muon: matrices only, each member's orthogonalised separately; torch does so in bfloat16, so it rounds coarsely.

SHAPES = [(4, 3), (3, 5), (6, 6)]
CASES: dict[str, dict[str, Any]] = {
    "lr": {"lr": Per(0.1, 0.5)},
    "numbers": {"lr": 0.1, "momentum": Per(0.95, 0.5), "weight_decay": Per(0.5, 0.1), "eps": Per(1e-7, 1e5)},
    "plain": {"lr": Per(0.1, 0.5), "nesterov": False, "ns_steps": 3},
    "original": {"lr": Per(0.1, 0.5), "adjust_lr_fn": "original"},
    "like-adamw": {"lr": Per(0.1, 0.5), "adjust_lr_fn": "match_rms_adamw", "ns_coefficients": (2.0, -1.5, 0.5)},
}
ALL = pytest.mark.parametrize("options", CASES.values(), ids=CASES)
# A step is lr (0.1) times elements of at most 1, in bfloat16: one rounding of them is 0.1 / 256. Sums of products in
# another order differ by less, measured 5e-5 after 3 steps.
ROUNDING = 4e-4


@ALL
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_equals_alone(options: dict[str, Any], members: int, dtype: torch.dtype) -> None:
    array = Array(members, SHAPES, dtype)
    fused, alone = start("Muon", options, array)
    before = [param.detach().clone() for param in array.params]
    run(array, fused, alone, 3)
    array.assert_equal(rtol=0.0, atol=3 * ROUNDING)
    assert all(
        (param - old).abs().amax(dim=(1, 2)).min() > 1e-3 for param, old in zip(array.params, before, strict=True)
    )
    for optimizer, params, member in zip(alone, array.members, range(members), strict=True):
        for stack, parameter in zip(array.params, params, strict=True):
            expected = optimizer.state[parameter]["momentum_buffer"]
            torch.testing.assert_close(fused.state[stack]["momentum_buffer"][member], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adjust_lr_fn": "none"}, "adjust_lr_fn='none': it must be None, 'original' or 'match_rms_adamw'"),
        ({"ns_coefficients": (1.0, 2.0)}, r"ns_coefficients=\(1\.0, 2\.0\): give three numbers"),
        ({"ns_steps": 100}, "ns_steps=100: it must be at least 0 and below 100"),
        ({"momentum": [0.9, -0.1, 0.9]}, "momentum of member 1 is -0.1"),
    ],
)
def test_bad_values_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        hf.optim.Muon(Array(3, SHAPES).params, **options)
