"""Steps whose launches are recorded equal B optimizers of torch.optim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hfusion.optim import base, group
from tests.optim.arrays import CASES, Array, run, start
from tests.optim.interpreted import Closure, Tape, forget, interpret

Made = tuple[Array, Any, list[Any], Tape]
WAYS = [("formula", name) for name in CASES] + [
    ("triton", name)
    for name in ("sgd-nesterov", "adam-decay", "adam-far", "adamw-all", "adadelta-all", "nadam", "rmsprop-all")
]


@pytest.fixture(params=WAYS, ids="-".join)
def recorded_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """An array whose optimizer's launches are recorded, on the CPU, with the members' own optimizers."""
    kind, case = request.param
    yield from _made(monkeypatch, kind, *CASES[case])


def _made(patch: pytest.MonkeyPatch, kind: str, name: str, options: dict[str, Any]) -> Iterator[Made]:
    tape = Tape() if kind == "formula" else Closure()
    if kind == "formula":
        patch.setenv("HFUSION_NATIVE", "0")
        patch.setattr(group, "KERNELS", {})
    else:
        interpret(patch)
    patch.setattr(base, "recording_on", lambda device: base.RecordedUpdates(tape))
    array = Array(3)
    yield array, *start(name, options, array), tape
    if kind == "triton":
        forget()


class Steady:
    """Gradients that lie where they lay."""

    def __init__(self, array: Array) -> None:
        array.draw_grads()
        self.array, self.grads = array, [param.grad for param in array.params]

    def draw(self) -> None:
        self.array.draw_grads()
        for index, (param, grad) in enumerate(zip(self.array.params, self.grads, strict=True)):
            assert grad is not None
            assert param.grad is not None
            param.grad = grad.copy_(param.grad)
            for member, params in enumerate(self.array.members):
                params[index].grad = grad[member].clone()

    def run(self, fused: Any, alone: list[Any], steps: int) -> None:
        for _ in range(steps):
            self.draw()
            fused.step()
            for optimizer in alone:
                optimizer.step()


def set_lr(fused: Any, alone: list[Any], values: list[float]) -> None:
    fused.param_groups[0]["lr"] = values
    for optimizer, value in zip(alone, values, strict=True):
        optimizer.param_groups[0]["lr"] = value


def test_equals_alone_with_rates_that_change_between_replays(recorded_case: Made) -> None:
    array, fused, alone, tape = recorded_case
    steady = Steady(array)
    steady.run(fused, alone, 5)
    assert (tape.made, tape.replayed) == (1, 3)
    for step in range(3):
        set_lr(fused, alone, [0.1 / (step + 1), 0.0, 0.3])
        steady.run(fused, alone, 1)
    array.assert_equal()
    assert (tape.made, tape.replayed) == (1, 6)
    assert fused.launches == "recorded and replayed as one"
    # Where hyper-parameters of 0 leave operators out, the launches are others.
    if "weight_decay" in fused.param_groups[0]:
        fused.param_groups[0]["weight_decay"] = 0.0
        for optimizer in alone:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        steady.run(fused, alone, 4)
        array.assert_equal()


def with_formula(monkeypatch: pytest.MonkeyPatch, case: str) -> Made:
    return next(_made(monkeypatch, "formula", *CASES[case]))


def test_gradients_that_lie_elsewhere_at_every_step_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    array, fused, alone, tape = with_formula(monkeypatch, "lion")
    gradients = []
    for _ in range(6):
        run(array, fused, alone, 1)
        gradients.append([param.grad for param in array.params])
    array.assert_equal()
    assert tape.made == 0
    assert fused.launches.startswith("launched one by one so far: gradients must lie at the same addresses")
