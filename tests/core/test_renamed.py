"""Former names of arguments still work for one version, with a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.core.renamed import renamed_arguments

LOADER = [(torch.ones(4, 3), torch.zeros(4, 2))]


def sgd(params: Any) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=0.1)


def models() -> list[nn.Module]:
    return [nn.Linear(3, 2) for _ in range(2)]


def stepped(**options: Any) -> list[float]:
    torch.manual_seed(0)
    fused = hf.fuse(models())
    options["opt" if "loss_fn" in options else "optimizer"] = sgd(fused.parameters())
    step = hf.train_step(fused, compile=False, **options)
    return [float(loss) for _ in range(2) for loss in step(*LOADER[0])]


def test_a_training_step() -> None:
    with pytest.warns(DeprecationWarning, match=r"train_step: '(opt|loss_fn)' is now") as noted:
        former = stepped(loss_fn=F.mse_loss)
    assert len(noted) == 2
    assert {Path(warning.filename).name for warning in noted} == {Path(__file__).name}
    assert former == stepped(loss=F.mse_loss)


def test_a_task() -> None:
    with pytest.warns(DeprecationWarning, match="'clip' is now 'clip_norm'"):
        task = hf.Task(models(), F.mse_loss, sgd, LOADER, clip=0.5)
    assert task.clip_norm == 0.5
    with pytest.warns(DeprecationWarning, match="'clip' is now 'clip_norm'"):
        assert task.clip == 0.5
    with pytest.raises(TypeError, match="both 'clip' and 'clip_norm'"):
        hf.Task(models(), F.mse_loss, sgd, LOADER, clip=0.5, clip_norm=0.5)


@pytest.mark.parametrize("key", ["clip", "sweep.clip"])
def test_a_sweep(key: str) -> None:
    def clipped(name: str, **options: Any) -> list[float]:
        def space(trial: Any) -> dict[str, Any]:
            return {"lr": trial.suggest_float("lr", 0.1, 0.2), name: 0.01} if name else {"lr": 0.1}

        result = hf.sweep(
            lambda: nn.Linear(3, 2), space, F.mse_loss, LOADER, trials=2, epochs=1, optimizer=hf.optim.SGD, **options
        )
        return [trial.value for trial in result.trials]

    with pytest.warns(DeprecationWarning, match="clip.* is now .*clip_norm"):
        former = clipped(key)
    assert former == clipped("clip_norm")
    with pytest.warns(DeprecationWarning, match="sweep: 'clip' is now 'clip_norm'"):
        assert clipped("", clip=0.01) == clipped("", clip_norm=0.01)


def test_a_model_may_take_the_former_name() -> None:
    clips: list[float] = []

    def make_model(clip: float) -> nn.Module:
        clips.append(clip)
        return nn.Linear(3, 2)

    hf.sweep(make_model, lambda trial: {"clip": 3.0}, F.mse_loss, LOADER, trials=1, epochs=1)
    assert set(clips) == {3.0}


def test_saves(tmp_path: Path) -> None:
    with pytest.warns(DeprecationWarning, match="save: 'root' is now 'directory'"):
        hf.save(root=tmp_path, fused=hf.fuse(models()), tags=["a", "b"])
    with pytest.warns(DeprecationWarning, match="save: 'names' is now 'tags'"):
        hf.save(tmp_path, hf.fuse(models()), names=["a", "b"])
    with pytest.warns(DeprecationWarning, match="load: 'names' is now 'tags'"):
        loaded = hf.load(tmp_path, nn.Linear(3, 2), names="b")
    with pytest.warns(DeprecationWarning, match="Loaded: 'names' is now 'tags'"):
        assert loaded.names == loaded.tags == ["b"]


def test_a_population(tmp_path: Path) -> None:
    pop = hf.Population(models(), optimizer=sgd, loss=F.mse_loss, tags=["a", "b"])
    with pytest.warns(DeprecationWarning, match="'root' is now 'directory'"):
        pop.save(root=tmp_path).result()
    options: dict[str, Any] = {"optimizer": sgd, "loss": F.mse_loss, "names": ["b"]}
    with pytest.warns(DeprecationWarning, match="'names' is now 'tags'"):
        loaded = hf.Population.load(tmp_path, lambda: nn.Linear(3, 2), **options)
    assert loaded.tags == ["b"]


def test_functions_for_each_member() -> None:
    with pytest.warns(DeprecationWarning, match="'function' is now 'fn'"):
        losses = hf.per_model(function=F.mse_loss)(torch.zeros(2, 4), torch.ones(4))
    assert losses.tolist() == [1, 1]
    with pytest.warns(DeprecationWarning, match="'function' is now 'fn'"):
        ragged = hf.Ragged([torch.ones(2), torch.ones(3)]).map(function=torch.neg)
    assert [tensor.tolist() for tensor in ragged] == [[-1, -1], [-1, -1, -1]]


def test_present_names_pass_without_a_look() -> None:
    called: list[dict[str, Any]] = []

    def function(**options: Any) -> None:
        called.append(options)

    wrapped: Callable[..., None] = renamed_arguments(old="new")(function)
    wrapped(new=1, other=2)
    assert called == [{"new": 1, "other": 2}]
    assert wrapped.__name__ == "function"
