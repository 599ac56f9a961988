"""The example of sparse autoencoders, small: every weight is that of plain torch, and directions are found."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from examples import sparse_autoencoders as example


def test_it_equals_plain_torch() -> None:
    activations = example.Activations.random(8, 16, torch.float64)
    models = example.make_models(8, 16, (1, 2, 3, 5, 8), torch.float64)
    plain = copy.deepcopy(models)
    array = example.Array(models, 1e-2)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in plain]
    for x in activations.batches(5):
        losses = array.step(x)
        for row, (model, optimizer) in enumerate(zip(plain, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            weight = model.decoder.weight
            assert weight.grad is not None
            with torch.no_grad():
                columns = weight / weight.norm(dim=0)
                weight.grad -= columns * (weight.grad * columns).sum(0)
            nn.utils.clip_grad_norm_(model.parameters(), example.CLIP)
            optimizer.step()
            with torch.no_grad():
                weight /= weight.norm(dim=0)
            torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-9, atol=0)
    assert example.difference(array.models(), plain) < 1e-9
    assert "opaque" not in str(array.pop.fused.report())
    assert example.project.report().loops == ()
    assert example.unit_norm.report().loops == ()


def test_it_finds_directions(capsys: pytest.CaptureFixture[str]) -> None:
    results = example.main(["--width", "16", "--features", "24", "--steps", "400", "--ks", "2", "5", "8"])
    assert results[2].explained < results[5].explained
    assert results[5].explained > 0.6
    assert "variance explained" in capsys.readouterr().out


def test_it_is_timed(capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--width", "8", "--features", "16", "--steps", "4", "--double", "--compare"]) == {}
    assert "a step" in capsys.readouterr().out
