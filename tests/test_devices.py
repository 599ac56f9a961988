"""Models on the meta device are refused, and arrays do not depend on torch's default device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

# Models on the meta device, whole or in part, are refused everywhere with the same words.
X, Y = torch.randn(5, 3), torch.randn(5, 2)


def good() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def whole() -> nn.Module:
    with torch.device("meta"):
        return good()


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
    "fused.put": lambda make: fused().put(0, make()),
    "Population of others": lambda make: population(make(), nn.Linear(3, 2)),
    "start": lambda make: population(good(), good()).start(None, make()),
    "train": lambda make: planned([good(), make()]),
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
}


@pytest.mark.parametrize("make", [whole, one_buffer])
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


# Under ``torch.set_default_device``, arrays are where their members are, and numbers of members in host memory.
X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE = (
    torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).double(),
    torch.tensor([0, 1, 2, 0, 1, 2]),
)
MACHINE = hf.Machine([hf.Device("cpu", memory="64MiB")])


def models(count: int = 3, width: int = 5) -> list[nn.Module]:
    with torch.device("cpu"):
        torch.manual_seed(0)
        members = [
            nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.1), nn.Tanh(), nn.Linear(width, 3))
            for _ in range(count)
        ]
        return [model.double() for model in members]


def tensors(found: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in found.state_dict().values()]


def stepped(kind: str, compiled: bool, folder: Path) -> list[Tensor]:
    fused = hf.fuse(models())
    opt = getattr(hf.optim, kind)(fused.parameters(), lr=[0.1, 0.01, 0.02])
    schedule = hf.optim.lr_scheduler.PerMember(opt, lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9))
    step = hf.train_step(fused, F.cross_entropy, opt, compile=compiled)
    losses = []
    for _ in range(3):
        losses.append(step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE))
        schedule.step()
    hf.save(folder / "array", fused, opt)
    hf.load(folder / "array", fused, opt)
    return [*losses, *tensors(fused), hf.optim.clip_grad_norm_(fused.parameters(), [1.0, 2.0, 3.0])]


def scaled(folder: Path) -> list[Tensor]:
    fused = hf.fuse(models())
    opt, scaler = hf.optim.SGD(fused.parameters(), lr=0.1), hf.optim.GradScaler("cpu", init_scale=[8.0, 16.0, 4.0])
    for _ in range(2):
        opt.zero_grad()
        scaler.scale(hf.per_model(F.cross_entropy)(fused(X_DEFAULT_DEVICE), Y_DEFAULT_DEVICE)).sum().backward()
        scaler.step(opt)
        scaler.update()
    return tensors(fused)


def lived(folder: Path, unlike: bool) -> list[Tensor]:
    members = [*models(3), *(models(1, 7) if unlike else [])]
    pop = hf.Population(members, optimizer=lambda p: hf.optim.AdamW(p, lr=0.01), loss=F.cross_entropy)
    losses = [
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE),
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE, rows=[0, 2]),
        pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE, weights=[1.0, 0.0, 1.0, 1.0, 1.0, 2.0]),
    ]
    pop.append(models(1))
    pop.hparams["lr"][0] = 0.5
    pop.stop([1])
    losses.append(pop.step(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE))
    pop.save(folder)
    kept = [model for model in pop.models if model is not None]
    return [*losses, *(tensor for model in kept for tensor in tensors(model))]


def trained(folder: Path, saves: bool) -> list[Tensor]:
    fused = hf.fuse(models())
    task = hf.Task(
        fused,
        F.cross_entropy,
        lambda p: hf.optim.Adam(p, lr=0.01),
        [(X_DEFAULT_DEVICE, Y_DEFAULT_DEVICE)] * 3,
        epochs=2,
    )
    report = hf.train([task], MACHINE, checkpoint=folder if saves else None)
    return [report["task"].losses, *tensors(fused)]


WAYS: dict[str, Callable[[Path], list[Tensor]]] = {
    "compiled": lambda folder: stepped("AdamW", True, folder),
    "scaler": scaled,
    "population of different models": lambda folder: lived(folder, True),
    "train with saves": lambda folder: trained(folder, True),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_of_ours_is_there(way: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    expected = WAYS[way](tmp_path / "without")
    torch.manual_seed(1)
    with torch.device("meta"):
        found = WAYS[way](tmp_path / "with")
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
