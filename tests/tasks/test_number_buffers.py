"""Tasks of models that read a buffer in Python: each member by its own value, also by one that a checkpoint brings."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.array.test_number_buffers import _TopK

RATES = [0.01, 0.02, 0.03]


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [(x, x) for x in torch.randn(4, 8, 6, dtype=torch.float64, generator=generator)]


def models(numbers: Sequence[int]) -> list[nn.Module]:
    torch.manual_seed(2)
    return [_TopK(k) for k in numbers]


def task(members: list[nn.Module], epochs: int, evaluated: bool = True) -> hf.Task:
    return hf.Task(
        members,
        F.mse_loss,
        lambda params: hf.optim.Adam(params, lr=RATES),
        batches(),
        epochs=epochs,
        eval_loader=batches() if evaluated else None,
        name="autoencoders",
    )


def alone(members: list[nn.Module], epochs: int) -> list[nn.Module]:
    for member, lr in zip(members, RATES, strict=True):
        optimizer = torch.optim.Adam(member.parameters(), lr=lr)
        for _ in range(epochs):
            for x, y in batches():
                optimizer.zero_grad()
                F.mse_loss(member(x), y).backward()
                optimizer.step()
    return members


def equal(trained: Sequence[nn.Module], expected: Sequence[nn.Module]) -> None:
    for model, reference in zip(trained, expected, strict=True):
        for name, value in reference.state_dict().items():
            torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("evaluated", [True, False])
def test_trains_each_by_its_own(evaluated: bool) -> None:
    members = models((2, 5, 4))
    expected = alone(copy.deepcopy(members), 2)
    report = hf.train(task(members, 2, evaluated))
    equal(report["autoencoders"].models, expected)


@pytest.mark.parametrize("evaluated", [True, False])
def test_a_checkpoint_brings_other_values(tmp_path: Path, evaluated: bool) -> None:
    expected = alone(models((2, 5, 4)), 3)
    hf.train(task(models((2, 5, 4)), 1, evaluated), checkpoint=tmp_path)
    report = hf.train(task(models((6, 6, 1)), 3, evaluated), checkpoint=tmp_path)
    equal(report["autoencoders"].models, expected)
