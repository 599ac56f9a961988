"""Members that join later, however they come, train under each option of their population as they would alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import hfusion as hf

DOUBLE = torch.float64


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return 10 * torch.randn(6, 4, dtype=DOUBLE, generator=generator), torch.randint(3, (6,), generator=generator)


def half(optimizer: Any) -> Any:
    return StepLR(optimizer, 2, 0.5)


def plateau(optimizer: Any) -> Any:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)


def population(options: dict[str, Any], models: list[nn.Module]) -> hf.Population:
    return hf.Population(models, **arguments(options))


def arguments(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a population and of its load, but for the models."""
    make = options.get("optimizer", _plain)
    keywords = {"compile": False, **options, "loss": F.cross_entropy}
    keywords["optimizer"] = lambda params: make(hf.optim.SGD, list(params))
    if "scaler" in options:
        keywords["scaler"] = hf.optim.GradScaler(**options["scaler"])
    return keywords


def _plain(kind: Any, params: Any) -> Any:
    return kind(params, lr=0.2)


UNLIKE: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "clip_norm": ({"clip_norm": [1.0, 2.0]}, "clip_norm differs between the members", {"clip_norm": math.inf}),
    "clip_value": ({"clip_value": [1.0, 2.0]}, "clip_value differs between the members", {"clip_value": 3.0}),
    "scheduler": ({"scheduler": [half, plateau]}, "the members' schedules differ", {"scheduler": half}),
    "rate": (
        {"optimizer": lambda kind, params: kind(params, lr=[0.1, 0.2])},
        "lr differs between the members",
        {"lr": 0.3},
    ),
    "scale": ({"scaler": {"init_scale": [2.0, 4.0]}}, "init_scale of the GradScaler differs", {}),
}


@pytest.mark.parametrize("after", ["begin", "copy", "load"])
@pytest.mark.parametrize("name", UNLIKE)
def test_what_differed_at_the_begin_is_asked_for(name: str, after: str, tmp_path: Path) -> None:
    """Also where members are alike by now."""
    options, words, more = UNLIKE[name]
    pop = population(options, [net(), net()])
    if after == "copy":
        pop.copy(0, 1)
    if after == "load":
        pop.save(tmp_path)
        alike = {"rate": {}, "scale": {"scaler": {}}, "scheduler": options}.get(name, {})
        pop = hf.Population.load(tmp_path, net, **arguments(alike))
    with pytest.raises(ValueError, match=words):
        pop.start(None, net())
    assert pop.tags == ["member 0", "member 1"]
    if more:
        pop.start(None, net(), **more)
        pop.step(*batch(0))


def test_options_that_differ_between_merged_populations_must_be_given(tmp_path: Path) -> None:
    for number, options in enumerate([{"accumulate": 2, "clip_norm": 1.0}, {"clip_norm": 2.0}]):
        pop = hf.Population([net()], tags=[f"net {number}"], **arguments(options))
        pop.save(tmp_path / str(number))
    folders = [tmp_path / "0", tmp_path / "1"]
    pop = hf.Population.load(folders, net, **arguments({"accumulate": 1}))
    with pytest.raises(ValueError, match="clip_norm differs"):
        pop.start(None, net())
    pop = hf.Population.load(folders, net, **arguments({}))
    for ages in ([0, 1], [1, 2], [1, 3]):
        pop.step(*batch(0))
        assert pop.ages.tolist() == ages
    with pytest.raises(ValueError, match="accumulate differs between the members"):
        pop.start(None, net(), clip_norm=1.0)
