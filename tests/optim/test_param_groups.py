"""Param groups that rules for one model choose: of an array the same, and a warning where a rule saw stacks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfusion as hf
from hfusion.optim import coupling
from tests.alone import close, compare_tensors

Rule = Callable[[str, nn.Parameter], dict[str, Any] | None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3).double()
        self.norm = nn.LayerNorm(3).double()
        self.temperature = nn.Parameter(torch.rand(()).double())
        self.norm.weight.no_decay = True  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x)) * self.temperature


def nanogpt(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.3 if p.dim() >= 2 else 0.0}


def marked(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0 if getattr(p, "no_decay", False) else 0.3, "lr": 0.05}


def some(name: str, p: nn.Parameter) -> dict[str, Any] | None:
    return {} if p.dim() else None


RULES: list[Rule] = [nanogpt, marked, some]


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    coupling._warn_once.cache_clear()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_rule_for_one_model_gives_the_groups_of_an_array(rule: Rule) -> None:
    models = [Net() for _ in range(3)]
    fused = hf.fuse(models)
    optimizer = hf.optim.AdamW(hf.optim.groups(fused, rule), lr=0.1, weight_decay=0.2)
    alone = []
    for model in models:
        options = [(rule(name, p), p) for name, p in model.named_parameters()]
        groups = [{"params": [p], **settings} for settings, p in options if settings is not None]
        alone.append(torch.optim.AdamW(groups, lr=0.1, weight_decay=0.2))
    for _ in range(2):
        train(fused, optimizer, models, alone)
    compare_tensors(fused, models, rule.__name__)


WRONG: dict[str, tuple[Callable[[int], Any], str]] = {
    "no options": (lambda member: 0.1, r"returned float for 'temperature' of member 0"),
    "left out of some": (lambda member: None if member else {}, "of member 1.*give the same options for all members"),
    "other options": (lambda member: {"lr": 1.0} if member else {}, "give the same options for all members"),
    "other words": (lambda member: {"maximize": bool(member)}, r"'maximize' of 'temperature' differs.*only numbers"),
}


@pytest.mark.parametrize(("answer", "message"), WRONG.values(), ids=WRONG)
def test_rules_that_do_not_suit_an_array_are_refused(answer: Callable[[int], Any], message: str) -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    numbers = iter([0, 1])
    with pytest.raises(hf.FusionError, match=message):
        hf.optim.groups(fused, lambda name, p: answer(next(numbers)))


def split(fused: nn.Module) -> list[dict[str, Any]]:
    """As nanoGPT does, over the stacks."""
    params = list(fused.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def test_a_rule_that_saw_stacks_is_warned_of() -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    with pytest.warns(UserWarning, match=r"single numbers.*p.dim\(\) >= 2.*hf.optim.groups\(fused, rule\)"):
        hf.optim.AdamW(split(fused), lr=0.1)


def head(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"lr": 0.05} if "linear" in name else {}


def moments(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"betas": (0.5, 0.6), "eps": 1e-3} if "norm" in name else {"amsgrad": p.dim() == 0}


# Group options that a default for new members must not replace.
EXPLICIT: list[Rule] = [head, moments]
DEFAULTS: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.2}
NEW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.6, "betas": (0.8, 0.95), "eps": 1e-5}


def alone(model: nn.Module, rule: Rule, **defaults: Any) -> torch.optim.AdamW:
    groups: list[dict[str, Any]] = []
    for name, p in model.named_parameters():
        options = rule(name, p) or {}
        group = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == options), None)
        if group is None:
            groups.append(group := {"params": [], **options})
        group["params"].append(p)
    return torch.optim.AdamW(groups, **{**DEFAULTS, **defaults})


def read_again(fused: Any, optimizer: Any, rule: Rule, folder: Path) -> tuple[Any, Any]:
    hf.save(folder, fused, optimizer)
    again = hf.optim.AdamW(hf.optim.groups(fused, rule), **DEFAULTS)
    hf.load(folder, fused, again)
    return fused, again


def rearranged(fused: Any, optimizer: Any, rule: Rule, folder: Path) -> tuple[Any, Any]:
    for part in (fused, optimizer):
        part.keep([1, 0])
        part.copy(0, 1)
    return fused, optimizer


ACTS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "nothing": lambda fused, optimizer, rule, folder: (fused, optimizer),
    "save": read_again,
    "keep, copy": rearranged,
}


def train(fused: Any, optimizer: Any, models: Sequence[nn.Module], others: Sequence[torch.optim.Optimizer]) -> None:
    x = torch.randn(5, 4).double()
    for _ in range(2):
        fused.zero_grad()
        fused(x).square().flatten(1).mean(1).sum().backward()
        optimizer.step()
        for model, other in zip(models, others, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            other.step()


@pytest.mark.parametrize("join", ["append", "restart"])
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("rule", EXPLICIT, ids=lambda rule: rule.__name__)
def test_defaults_of_new_members_leave_what_groups_were_given(rule: Rule, act: str, join: str, tmp_path: Path) -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    optimizer = hf.optim.AdamW(hf.optim.groups(fused, rule), **DEFAULTS)
    train(fused, optimizer, [], [])
    fused, optimizer = ACTS[act](fused, optimizer, rule, tmp_path)
    new = Net()
    model = copy.deepcopy(new)
    other = alone(model, rule, **NEW)
    if join == "append":
        fused.append([new])
        optimizer.append(1, **NEW)
    else:
        for group in optimizer.param_groups:
            group["lr"][1] *= 0.5
        fused.put(1, new)
        optimizer.restart(1, **NEW)
    train(fused, optimizer, [model], [other])
    for name, parameter in model.named_parameters():
        close(fused.get_parameter(name)[-1], [parameter], name)


@pytest.mark.parametrize("join", ["append", "restart"])
def test_a_value_that_no_group_takes_is_an_error_and_changes_nothing(join: str) -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    optimizer = hf.optim.AdamW(hf.optim.groups(fused, nanogpt), lr=0.1)
    before = repr(optimizer)
    with pytest.raises(ValueError, match=r"every param group of the AdamW was given its own weight_decay"):
        getattr(optimizer, join)(1, lr=0.2, weight_decay=0.5)
    assert repr(optimizer) == before


def test_hyper_parameters_that_every_group_was_given_are_written_to_the_groups() -> None:
    pop = hf.Population(
        [Net() for _ in range(2)],
        optimizer=lambda params: hf.optim.AdamW(hf.optim.groups(params, nanogpt), lr=0.1),
        loss=F.mse_loss,
    )
    for write in (
        lambda: pop.hparams["weight_decay"].__setitem__(0, 0.5),
        lambda: pop.hparams.update(weight_decay=0.5),
    ):
        with pytest.raises(ValueError, match="every param group of the AdamW was given its own weight_decay"):
            write()
    assert {float(group["weight_decay"][0]) for group in pop.optimizer.param_groups} == {0.0, 0.3}
