"""Functions of one member in a population: active members are written; stopped, frozen or overflowing ones are not."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.array.test_member_functions import DOUBLE, Tensors, loop, model, project, unit_norm

RATES = [0.01, 0.02, 0.03, 0.04]


def batch(seed: int) -> Tensor:
    return torch.randn(7, 4, dtype=DOUBLE, generator=torch.Generator().manual_seed(seed))


def population(**options: Any) -> tuple[hf.Population, list[nn.Module]]:
    models = [model(seed) for seed in range(4)]
    pop = hf.Population(
        models,
        optimizer=lambda params: hf.optim.Adam(params, lr=RATES),
        loss=F.mse_loss,
        compile=False,
        **options,
    )
    return pop, copy.deepcopy(models)


def equal(pop: hf.Population, models: list[nn.Module], rows: list[int]) -> None:
    for row in rows:
        actual, expected = pop.fused[row].state_dict(), models[row].state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(actual[name], value, rtol=1e-9, atol=1e-12)


def state(pop: hf.Population, row: int) -> Tensors:
    return {name: value.clone() for name, value in pop.fused[row].state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_hooks_of_a_step_equal_the_loop(accumulate: int) -> None:
    """Gradients are projected before they are clipped, and decoders are normed after the step."""
    pop, models = population(accumulate=accumulate, clip_norm=0.05)
    pop.register_gradient_hook(project)
    pop.optimizer.register_step_post_hook(hf.each(unit_norm).step_hook(pop))
    optimizers = [torch.optim.Adam(m.parameters(), lr=lr) for m, lr in zip(models, RATES, strict=True)]
    for update in range(4):
        for member, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            for part in range(accumulate):
                x = batch(10 * update + part)
                (F.mse_loss(member(x), x) / accumulate).backward()
            loop(project, [member])
            nn.utils.clip_grad_norm_(member.parameters(), 0.05)
            optimizer.step()
            loop(unit_norm, [member])
        for part in range(accumulate):
            x = batch(10 * update + part)
            pop.step(x, x)
        if update == 1:
            pop.stop(2)
    equal(pop, models, [0, 1, 3])


def test_rows_that_do_not_train_stay_to_the_bit() -> None:
    pop, models = population()
    pop.stop(2)
    x = hf.stacked(torch.stack([batch(0), batch(1) * math.inf, batch(2), batch(3)]))

    def count(params: Tensors, grads: Tensors) -> None:
        grads["0.bias"].mul_(2)

    pop.register_gradient_hook(count)
    pop.optimizer.register_step_post_hook(hf.each(unit_norm).step_hook(pop))
    frozen = state(pop, 1)
    pop.step(x, hf.stacked(torch.stack([batch(k) for k in range(4)])))
    assert pop.frozen == [1]
    assert pop.active_rows == [0, 3]
    free = state(pop, 2)
    pop.each(unit_norm)
    assert all(torch.equal(value, free[name]) for name, value in state(pop, 2).items())
    pop.step(batch(4), batch(4))
    assert all(torch.equal(value, frozen[name]) for name, value in state(pop, 1).items())
    with pytest.raises(ValueError, match="free"):
        pop.each(unit_norm, rows=[0, 2])
    optimizer = torch.optim.Adam(models[0].parameters(), lr=RATES[0])
    for seed in (0, 4):
        optimizer.zero_grad()
        F.mse_loss(models[0](batch(seed)), batch(seed)).backward()
        loop(count, models[:1])
        optimizer.step()
        loop(unit_norm, models[:1])
        if seed == 0:
            loop(unit_norm, models[:1])
    equal(pop, models, [0])


def test_a_member_that_overflows_under_a_scaler_is_left_alone() -> None:
    pop, _ = population(scaler=hf.optim.GradScaler(init_scale=[1.0, 1e308, 1.0, 1.0]))
    pop.register_gradient_hook(project)
    pop.optimizer.register_step_post_hook(hf.each(unit_norm).step_hook(pop))
    before = [state(pop, row) for row in range(4)]
    pop.step(batch(0) * 1e3, batch(1))
    after = [state(pop, row) for row in range(4)]
    unchanged = [all(torch.equal(a[name], b[name]) for name in a) for a, b in zip(before, after, strict=True)]
    assert unchanged == [False, True, False, False]
