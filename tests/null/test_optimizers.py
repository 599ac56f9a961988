"""Every optimizer steps on CUDA, by one replay of a graph, and the host waits for nothing."""

from __future__ import annotations

import pytest
import torch

import hfusion as hf
from tests.null.arrays import MEMBERS, move, optimizer, parameters
from tests.null.calls import Calls, calls_per_step

pytestmark = pytest.mark.null

KERNELS = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Lion", "RAdam", "RMSprop")
COPYING = ("Muon", "NAdam")
"""The host computes their numbers, and copies them at each step."""
REPLAYED = "recorded and replayed as one"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_a_step_by_kernels_is_one_replay(name: str, dtype: torch.dtype) -> None:
    opt = optimizer(name, parameters(dtype))
    assert calls_per_step(opt.step) == Calls(launches=0, graphs=1, waits=0)
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("name", COPYING)
def test_a_step_with_numbers_of_the_host_is_one_replay_and_a_copy_of_its_numbers(name: str) -> None:
    opt = optimizer(name, parameters())
    assert calls_per_step(opt.step) == Calls(launches=1, graphs=1, waits=0)
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", [*KERNELS, *COPYING])
def test_a_step_with_master_weights_is_one_replay(name: str, dtype: torch.dtype) -> None:
    stacks = parameters(dtype)
    opt = optimizer(name, stacks, master_weights=True)
    assert calls_per_step(opt.step) == Calls(launches=name in COPYING, graphs=1, waits=0)
    assert opt.launches == REPLAYED
    move(stacks)
    assert calls_per_step(opt.step).graphs == 1
    assert opt.launches == REPLAYED


@pytest.mark.parametrize("name", [*KERNELS, *COPYING])
def test_steps_are_recorded_again_when_parameters_have_moved(name: str) -> None:
    stacks = parameters()
    opt = optimizer(name, stacks)
    for _ in range(2):
        assert calls_per_step(opt.step).graphs == 1
        move(stacks)
    assert calls_per_step(opt.step) == Calls(launches=name in COPYING, graphs=1, waits=0)
    assert opt.launches == REPLAYED


def test_a_step_with_rates_that_change_copies_them() -> None:
    opt = optimizer("Adam", parameters())

    def step() -> None:
        opt.param_groups[0]["lr"] *= 0.9
        opt.step()

    assert calls_per_step(step) == Calls(launches=1, graphs=1, waits=0)


def test_steps_that_are_not_recorded_report_the_reason() -> None:
    stacks = parameters()
    opt = optimizer("SGD", stacks)

    def step() -> None:
        # Gradients that never lie where they lay.
        for stack in stacks:
            stack.grad = torch.zeros_like(stack)
        gradients.append([stack.grad for stack in stacks])
        opt.step()

    gradients: list[object] = []
    assert calls_per_step(step).graphs == 0
    assert "gradients must lie at the same addresses" in opt.launches


def test_members_that_rest_are_put_back() -> None:
    stacks = parameters()
    opt = optimizer("Adam", stacks)
    holding = torch.zeros(MEMBERS, dtype=torch.bool)
    holding[3] = True

    def step() -> None:
        with opt.holding(holding):
            opt.step()

    calls = calls_per_step(step)
    assert (calls.graphs, calls.waits, calls.refused) == (1, 0, ())


def test_optimizers_of_members_go_on_as_one() -> None:
    models = [torch.nn.Linear(4, 2).cuda() for _ in range(3)]
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.1) for model in models]
    fused = hf.fuse(models, verify=False)
    opt = hf.optim.fuse(optimizers, fused)
    for stack in fused.parameters():
        stack.grad = torch.zeros_like(stack)
    assert calls_per_step(opt.step) == Calls(launches=0, graphs=1, waits=0)
