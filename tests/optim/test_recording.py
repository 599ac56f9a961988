"""Steps whose launches are recorded equal B optimizers of torch.optim."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.optim import base, group
from tests.optim.arrays import CASES, Array, run, start
from tests.optim.interpreted import forget, interpret
from tests.optim.tape import Closure, Tape

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


@pytest.mark.parametrize("event", ["held", "overflown", "began anew", "copied"])
def test_members_whose_counts_differ(monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    for kind, case in (("formula", "nadam"), ("formula", "adam"), ("triton", "adam-all"), ("triton", "sgd-momentum")):
        with monkeypatch.context() as patch:
            for array, fused, alone, tape in _made(patch, kind, *CASES[case]):
                steady = Steady(array)
                steady.run(fused, alone, 5)
                others = [alone[0], alone[2]]
                for _ in range(2):
                    steady.draw()
                    step_but_one(event, fused, array)
                    for optimizer in others if event in ("held", "overflown") else alone:
                        optimizer.step()
                if event == "began anew":
                    alone[1].state.clear()
                    fused.restart(1)
                elif event == "copied":
                    copy_alone(array, alone)
                    fused.copy(0, 1)
                    for param in array.params:
                        param.detach()[1] = param.detach()[0]
                steady.run(fused, alone, 3)
                array.assert_equal()
                assert tape.replayed >= 5


def step_but_one(event: str, fused: Any, array: Array) -> None:
    """A step that member 1 does not make."""
    if event == "held":
        with fused.holding(torch.tensor([False, True, False])):
            fused.step()
    elif event == "overflown":
        for param in array.params:
            assert param.grad is not None
            param.grad[1] = torch.inf
        fused.found_inf = torch.ones(1)
        with np.errstate(invalid="ignore"):
            fused.step()
        del fused.found_inf
    else:
        fused.step()


def copy_alone(array: Array, alone: list[Any]) -> None:
    for target, source in zip(array.members[1], array.members[0], strict=True):
        target.data = source.data.clone()
        alone[1].state[target] = {
            key: value.clone() if isinstance(value, Tensor) else value for key, value in alone[0].state[source].items()
        }
    for target, source in zip(alone[1].param_groups, alone[0].param_groups, strict=True):
        target.update({key: value for key, value in source.items() if key != "params"})


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


class Reading(hf.optim.SGD):
    """Its update looks at values."""

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Any, s: Any, o: Any) -> Any:
        return hf.optim.SGD.update(param, grad, state, s, o) if bool(grad.isfinite().all()) else (param, state)


def test_a_formula_that_reads_values_is_launched_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.optim, "Reading", Reading, raising=False)
    monkeypatch.setattr(torch.optim, "Reading", torch.optim.SGD, raising=False)
    for array, fused, alone, _ in _made(monkeypatch, "formula", "Reading", {"lr": 0.1}):
        Steady(array).run(fused, alone, 6)
        array.assert_equal()
        assert fused.launches == "launched one by one: RuntimeError: operation not permitted when stream is capturing"
