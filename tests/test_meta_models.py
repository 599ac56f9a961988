"""Models on the meta device, whole or in part, are refused everywhere with the same words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf

X, Y = torch.randn(5, 3), torch.randn(5, 2)


def good() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def whole() -> nn.Module:
    with torch.device("meta"):
        return good()


def one_parameter() -> nn.Module:
    model = good()
    model[2].weight = nn.Parameter(torch.empty(2, 4, device="meta"))
    return model


def one_buffer() -> nn.Module:
    model = good()
    model[1].running_mean = torch.empty(4, device="meta")
    return model


def adam(params: Any) -> Any:
    return hf.optim.Adam(params, lr=0.1)


def population(*models: nn.Module) -> hf.Population:
    return hf.Population(models, optimizer=adam, loss=F.mse_loss)


def fused() -> hf.FusedModule:
    return hf.fuse([good(), good()])


def planned(models: Any) -> Any:
    return hf.train([hf.Task(models, F.mse_loss, adam, [(X, Y)])], hf.Machine([hf.Device("cpu", memory="1GiB")]))


ENTRIES: dict[str, Callable[[Callable[[], nn.Module]], Any]] = {
    "fuse": lambda make: hf.fuse([good(), make()]),
    "build": lambda make: hf.build(make, seeds=range(2)),
    "fused.append": lambda make: fused().append([make()]),
    "fused.put": lambda make: fused().put(0, make()),
    "Population of alike": lambda make: population(make(), make()),
    "Population of others": lambda make: population(make(), nn.Linear(3, 2)),
    "start": lambda make: population(good(), good()).start(None, make()),
    "start in a mixed one": lambda make: population(good(), nn.Linear(3, 2)).start(None, make()),
    "append": lambda make: population(good(), good()).append(make()),
    "train": lambda make: planned([good(), make()]),
    "train one": lambda make: planned(make()),
    "sweep": lambda make: hf.sweep(
        make,
        lambda trial: {"lr": trial.suggest_float("lr", 0.1, 0.2)},
        F.mse_loss,
        [(X, Y)],
        trials=2,
        epochs=1,
        optimizer=hf.optim.Adam,
    ),
    "each": lambda make: hf.each(lambda params, grads: None)(make()),
    "Ensemble": lambda make: hf.Ensemble([make(), make()]),
}


@pytest.mark.parametrize("make", [whole, one_parameter, one_buffer])
@pytest.mark.parametrize("entry", ENTRIES)
def test_meta_models_are_refused(entry: str, make: Callable[[], nn.Module]) -> None:
    with pytest.raises(
        hf.FusionError, match=r"[012l]: [012]\.\w+ is on the meta device and has no values\. .*assign=True.*to_empty"
    ):
        ENTRIES[entry](make)


def test_materialized_models_are_fused() -> None:
    models = [whole() for _ in range(2)]
    for model in models:
        model.load_state_dict(good().state_dict(), assign=True)
    assert hf.fuse(models)(X).shape == (2, 5, 2)
