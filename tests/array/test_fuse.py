"""fuse and build preserve memory, sharing, random state and the models themselves."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import hfusion as hf
from tests.alone import assert_alone, close, normal


def test_fuse_takes_the_members_memory_once() -> None:
    models = [nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64)) for _ in range(4)]
    model_bytes = sum(t.nbytes for model in models for t in model.state_dict().values())
    array = hf.fuse(models)
    assert sum(t.nbytes for t in array.state_dict().values()) == model_bytes
    held = {id(t): t.nbytes for s in array._array.skeletons for t in s.state_dict().values() if not t.is_meta}
    assert not held


def with_base(frozen: bool, members: int = 3) -> list[nn.Module]:
    base = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double().requires_grad_(not frozen)
    return [nn.Sequential(base, nn.Linear(4, 4).double()) for _ in range(members)]


def test_a_frozen_base_is_stored_once_and_not_copied() -> None:
    models, x = with_base(frozen=True), normal(5, 4)
    array = hf.fuse(models)
    assert array.get_parameter("0.0.weight").data_ptr() == models[0][0][0].weight.data_ptr()
    close(array(x), [model(x) for model in models], "output")
    again = array.unfuse()
    assert again[0][0][0].weight is again[2][0][0].weight
    assert again[0][0][0].weight.data_ptr() != models[0][0][0].weight.data_ptr()
    assert again[0][1].weight is not again[2][1].weight


def test_a_shared_base_that_trains_gets_the_sum_of_gradients() -> None:
    models, x = with_base(frozen=False), normal(5, 4)
    array = hf.fuse(models)
    array(x).sin().sum().backward()
    for model in models:
        model(x).sin().sum().backward()
    torch.testing.assert_close(array.get_parameter("0.0.weight").grad, models[0][0][0].weight.grad)


def test_build_is_fuse_of_seeded_models() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 3), nn.Dropout(float(torch.rand(()))), nn.BatchNorm1d(3))

    torch.manual_seed(5)
    before, python = torch.get_rng_state(), random.getstate()
    built = hf.build(make, seeds=[0, 1, 7])
    assert torch.equal(before, torch.get_rng_state())
    assert random.getstate() == python
    models = []
    for seed in (0, 1, 7):
        torch.manual_seed(seed)
        models.append(make())
    fused = hf.fuse(models)
    for (name, actual), (other, expected) in zip(built.state_dict().items(), fused.state_dict().items(), strict=True):
        assert name == other
        assert torch.equal(actual, expected)
    assert [member[1].p for member in built] == [model[1].p for model in models]


def test_build_shares_a_base_of_the_closure() -> None:
    base = nn.Linear(4, 4).requires_grad_(False)
    array = hf.build(lambda: nn.Sequential(base, nn.Linear(4, 2)), seeds=[0, 1, 2])
    assert array.get_parameter("0.weight").data_ptr() == base.weight.data_ptr()
    assert array.get_parameter("1.weight").shape == (3, 2, 4)


LAYERS = {
    "linear": lambda: nn.Linear(4, 4),
    "relu": lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True)),
    "tanh": nn.Tanh,
    "gelu": nn.GELU,
    "layer norm": lambda: nn.LayerNorm(4),
    "batch norm": lambda: nn.BatchNorm1d(4, eps=1e-2),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.0),
    "bilinear-like": lambda: nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Conv1d(2, 2, 1), nn.Flatten()),
    "group norm": lambda: nn.GroupNorm(2, 4, eps=1e-2),
    "embedding of signs": lambda: nn.Threshold(0.1, 0.2),
}


@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.sampled_from(sorted(LAYERS)), min_size=1, max_size=6), st.integers(1, 3), st.booleans())
def test_random_sequences(names: list[str], members: int, own: bool) -> None:
    torch.manual_seed(len(names))
    models = [nn.Sequential(nn.Linear(4, 4), *(LAYERS[name]() for name in names)).double() for _ in range(members)]
    assert_alone(models, *(hf.stacked(normal(members, n, 4)) if own else normal(n, 4) for n in (5, 3)))


@pytest.mark.parametrize("p", [(0.1, 0.5, 0.9), (0.0, 0.5, 1.0)])
def test_dropout_rates_are_the_members_own(p: tuple[float, ...]) -> None:
    y = hf.fuse([nn.Dropout(rate) for rate in p])(torch.ones(20000))
    for row, rate in zip(y, p, strict=True):
        assert abs(float((row == 0).float().mean()) - rate) < 0.02
        assert rate == 1 or torch.allclose(row[row != 0], torch.tensor(1 / (1 - rate)))
    assert not torch.equal(y[0] == 0, y[1] == 0)


def test_models_stay_as_they_are() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)]
    before = copy.deepcopy([model.state_dict() for model in models])
    hf.fuse(models)(torch.randn(5, 4)).sum().backward()
    for model, state in zip(models, before, strict=True):
        assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
