"""Members that join later, however they come, train under each option of their population as they would alone."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
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


# Options of a population, and what torch gives a member alone.
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "clip_norm": {"clip_norm": 0.01},
    "clip_value": {"clip_value": 0.001},
    "one clip for each, all alike": {"clip_norm": [0.01, 0.01], "clip_value": [0.002, 0.002]},
    "scheduler": {"scheduler": half},
    "one scheduler for each, all alike": {"scheduler": [half, half]},
    "scheduler of metrics": {"scheduler": plateau},
    "scaler": {"scaler": {"init_scale": 4.0, "growth_factor": 3.0, "backoff_factor": 0.25, "growth_interval": 1}},
    "accumulate": {"accumulate": 2, "clip_norm": 0.01},
    "raise": {"on_nonfinite": "raise", "clip_norm": 0.01},
    "ignore": {"on_nonfinite": "ignore", "clip_value": 0.001},
    "hyper-parameters": {"optimizer": lambda kind, params: kind(params, lr=0.2, momentum=0.9, weight_decay=0.1)},
    "options of the optimizer": {
        "optimizer": lambda kind, params: kind(params, lr=0.2, momentum=0.9, nesterov=True, maximize=True)
    },
    "param groups": {
        "optimizer": lambda kind, params: kind(
            [{"params": [params[0]], "weight_decay": 0.1}, {"params": params[1:], "momentum": 0.5}], lr=0.2
        )
    },
    "all": {
        "clip_norm": 0.5,
        "clip_value": 0.01,
        "scheduler": half,
        "scaler": {"init_scale": 8.0, "growth_interval": 2},
        "accumulate": 2,
    },
    "compiled": {"compile": True, "clip_norm": 0.01},
}


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


class Alone:
    """A member trained alone with torch."""

    def __init__(self, model: nn.Module, options: dict[str, Any]) -> None:
        self.model = copy.deepcopy(model)
        self.params = list(self.model.parameters())
        self.opt = options.get("optimizer", _plain)(torch.optim.SGD, self.params)
        self.norm, self.value, make = (_first(options.get(name)) for name in ("clip_norm", "clip_value", "scheduler"))
        self.scheduler = None if make is None else make(self.opt)
        scale = options.get("scaler")
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", **scale)
        self.accumulate = options.get("accumulate", 1)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> Tensor:
        """One update; the loss of the last batch."""
        self.opt.zero_grad()
        for x, y in batches:
            loss = F.cross_entropy(self.model(x), y)
            mean = loss / len(batches)
            (mean if self.scaler is None else self.scaler.scale(mean)).backward()
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        if self.value is not None:
            nn.utils.clip_grad_value_(self.params, self.value)
        if self.norm is not None:
            nn.utils.clip_grad_norm_(self.params, self.norm)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step(*[loss.item()] if isinstance(self.scheduler, ReduceLROnPlateau) else [])
        return loss.detach()


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) else value


def into_free_row(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    pop.stop(1)
    pop.start(1, model, tag="late")
    return pop


def into_new_row(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    pop.start(None, model, tag="late")
    return pop


def into_grown_rows(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    pop.grow(2)
    pop.start([3, 2], [model, net()], tag=["late", "another"])
    return pop


def after_compact(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    pop.stop(0)
    pop.compact()
    pop.start(None, model, tag="late")
    return pop


def after_copy(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    pop.copy(0, 1)
    pop.stop(0)
    pop.start(0, model, tag="late")
    return pop


def after_deepcopy(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    return into_new_row(copy.deepcopy(pop), model, folder, options)


def after_load(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    """Limits, and how often it updates, come from the save."""
    pop.save(folder)
    saved = {"clip_norm", "clip_value", "accumulate", "on_nonfinite"}
    more = arguments({name: value for name, value in options.items() if name not in saved})
    return into_new_row(hf.Population.load(folder, net, **more), model, folder, options)


def copied_later(pop: hf.Population, model: nn.Module, folder: Path, options: dict[str, Any]) -> hf.Population:
    """A copy of a member that joined goes on as that would."""
    pop.start(None, model, tag="source")
    pop.copy(pop.row("source"), 0)
    pop.stop(pop.row("source"))
    return pop


Join = Callable[[hf.Population, nn.Module, Path, dict[str, Any]], hf.Population]
WAYS: dict[str, tuple[Join, str]] = {
    "free": (into_free_row, "late"),
    "new": (into_new_row, "late"),
    "grow": (into_grown_rows, "late"),
    "compact": (after_compact, "late"),
    "copy": (after_copy, "late"),
    "deepcopy": (after_deepcopy, "late"),
    "load": (after_load, "late"),
    "copied": (copied_later, "member 0"),
}


def cases() -> list[tuple[str, str]]:
    """Return every option with two ways to join, and every way to join with all options together."""
    variants, pairs = list(WAYS), []
    for index, option in enumerate(OPTIONS):
        chosen = variants if option == "all" else [variants[(index + shift) % len(variants)] for shift in (0, 3)]
        pairs += [(option, variant) for variant in (chosen[:1] if option == "compiled" else chosen)]
    return pairs


@pytest.mark.parametrize(("option", "variant"), cases())
def test_who_joins_trains_as_alone(option: str, variant: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options, (join, tag) = OPTIONS[option], WAYS[variant]
    pop = population(options, [net(), net()])
    accumulate = options.get("accumulate", 1)
    steps = iter(range(100))

    def step() -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        batches = [batch(next(steps)) for _ in range(accumulate)]
        losses = [pop.step(*minibatch) for minibatch in batches][-1]
        if pop.scheduler is not None:
            pop.scheduler.step(metrics=losses.nan_to_num())
        return losses, batches

    for _ in range(3):
        step()
    model = net()
    alone = Alone(model, options)
    pop = join(pop, model, tmp_path, options)
    for _ in range(5):
        losses, batches = step()
        row = pop.row(tag)
        torch.testing.assert_close(losses[row], alone.step(batches), rtol=1e-9, atol=1e-12)
        member = pop.models[row]
        assert member is not None
        for actual, expected in zip(member.parameters(), alone.params, strict=True):
            torch.testing.assert_close(actual.detach(), expected.detach(), rtol=1e-9, atol=1e-12)
        assert pop.hparams["lr"][row] == alone.opt.param_groups[0]["lr"]
        if pop.scaler is not None and alone.scaler is not None:
            assert pop.scaler.get_scale()[row] == alone.scaler.get_scale()


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


def test_scales_follow_their_members_before_the_first_step() -> None:
    pop = population({"scaler": {"init_scale": [2.0, 4.0, 8.0]}}, [net(), net(), net()])
    pop.copy(2, 1)
    pop.stop(0)
    pop.compact()
    pop.step(*batch(0))
    assert pop.scaler is not None
    assert pop.scaler.get_scale().tolist() == [8.0, 8.0]
    with pytest.raises(ValueError, match="the GradScaler has scales of 3 members, the array has 2"):
        population({"scaler": {"init_scale": [2.0, 4.0, 8.0]}}, [net(), net()])


def test_members_join_by_the_population_alone() -> None:
    pop = population({}, [net(), net()])
    pop.fused.append([net()])
    with pytest.raises(ValueError, match=r"the array has 3 members and the population 2 rows: .* pop\.start"):
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
