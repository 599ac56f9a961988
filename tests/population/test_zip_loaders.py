"""Loaders of own lengths and epochs: each member trains as if alone, and small last batches are one step."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf

KINDS = {
    "samples apart": lambda: [nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)) for _ in range(5)],
    "BatchNorm": lambda: [
        nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Linear(6, 3)) for _ in range(5)
    ],
    "groups": lambda: [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)) for width in (5, 6, 5, 6, 7)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_members_with_loaders_of_their_own_equal_members_alone(kind: str) -> None:
    torch.manual_seed(0)
    models = [model.double() for model in KINDS[kind]()]
    alone = copy.deepcopy(models)
    data = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in (11, 8, 3, 10, 6)]
    loaders = [list(zip(x.split(4), y.split(4), strict=True)) for x, y in data]
    epochs = [2, 1, 3, 2, 2]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.AdamW(p, lr=0.01), loss=F.cross_entropy, compile=False)
    calls = 0
    for calls, (inputs, target, rows) in enumerate(hf.zip_loaders(loaders, epochs=epochs), 1):  # noqa: B007
        pop.step(inputs, target, rows=rows)
    # Three for each epoch of the longest loader, and one for the third epoch of the smallest one.
    assert calls == 7
    for row, (model, loader) in enumerate(zip(alone, loaders, strict=True)):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for x, y in loader * epochs[row]:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        member = pop.models[row]
        assert member is not None
        for actual, expected in zip(member.state_dict().values(), model.state_dict().values(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)
    assert pop.ages.tolist() == [6, 2, 3, 6, 4]


BATCH = (torch.zeros(2, 3), torch.zeros(2))


def test_rounds() -> None:
    loaders = [[BATCH] * 2, [BATCH], [(torch.zeros(1, 3), torch.zeros(1))]]
    rounds = [rows for *_, rows in hf.zip_loaders(loaders, epochs=[1, 1, 2], rows=[4, 0, 2])]
    assert rounds == [[4, 0], [4], [2], [2]]
    assert list(hf.zip_loaders([])) == []
    assert list(hf.zip_loaders([[BATCH]], epochs=0)) == []
