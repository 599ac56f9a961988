"""Param groups that rules for one model choose: of an array the same, and a warning where a rule saw stacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import hfusion as hf
from hfusion.optim import coupling

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


def timm(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0} if p.ndim <= 1 or name.endswith(".bias") else {"weight_decay": 0.3}


def marked(name: str, p: nn.Parameter) -> dict[str, Any]:
    return {"weight_decay": 0.0 if getattr(p, "no_decay", False) else 0.3, "lr": 0.05}


def some(name: str, p: nn.Parameter) -> dict[str, Any] | None:
    return {} if p.dim() else None


def by_values(name: str, p: nn.Parameter) -> dict[str, Any]:
    """Numbers that differ between members, such as a rate by the norm of a matrix."""
    return {"lr": 0.01 * float(p.detach().abs().sum()), "betas": (0.8 + 0.01 * float(p.detach().mean()), 0.99)}


RULES: list[Rule] = [nanogpt, timm, marked, some, by_values]


@pytest.fixture(autouse=True)
def nothing_warned() -> None:
    coupling._warned.clear()


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
    x = torch.randn(5, 4).double()
    for _ in range(3):
        fused.zero_grad()
        fused(x).square().flatten(1).mean(1).sum().backward()
        optimizer.step()
        for model, other in zip(models, alone, strict=True):
            model.zero_grad()
            model(x).square().mean().backward()
            other.step()
    for name, stack in fused.named_parameters():
        expected = torch.stack([model.get_parameter(name) for model in models])
        torch.testing.assert_close(stack, expected, rtol=1e-9, atol=1e-12, msg=name)


def test_parameters_of_equal_options_are_one_group_and_torch_takes_it() -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    groups = hf.optim.groups(fused, nanogpt)
    assert [len(group["params"]) for group in groups] == [3, 2] or [len(g["params"]) for g in groups] == [4, 1]
    assert groups[0]["weight_decay"] != groups[1]["weight_decay"]
    torch.optim.AdamW(groups, lr=0.1)


@pytest.mark.parametrize("rule", [nanogpt, marked], ids=lambda rule: rule.__name__)
def test_a_population_and_a_sweep_take_groups(rule: Rule) -> None:
    """The optimizer is made from parameters alone, and tried on others before."""
    models = [Net() for _ in range(2)]
    alone = [[{"params": [p], **(rule(name, p) or {})} for name, p in model.named_parameters()] for model in models]
    others = [torch.optim.AdamW(groups, lr=0.1) for groups in alone]
    x, y = torch.randn(5, 4).double(), torch.zeros(5, 3).double()
    pop = hf.Population(
        models, optimizer=lambda params: hf.optim.AdamW(hf.optim.groups(params, rule), lr=0.1), loss=F.mse_loss
    )
    for _ in range(3):
        pop.step(x, y)
        for model, other in zip(models, others, strict=True):
            other.zero_grad()
            F.mse_loss(model(x), y).backward()
            other.step()
    for name, stack in pop.fused.named_parameters():
        expected = torch.stack([model.get_parameter(name) for model in models])
        torch.testing.assert_close(stack, expected, rtol=1e-9, atol=1e-12, msg=name)
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    result = hf.sweep(
        Net,
        lambda trial: {},
        F.mse_loss,
        [(x, y)],
        optimizer=lambda params: hf.optim.AdamW(hf.optim.groups(params, rule), lr=0.1),
        trials=2,
        epochs=1,
    )
    assert len(result.trials) == 2


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


@pytest.mark.parametrize("other", [nn.Linear(2, 2), nn.Linear(2, 2).parameters()], ids=["module", "parameters"])
def test_groups_of_other_objects_are_refused(other: Any) -> None:
    with pytest.raises(hf.FusionError, match=r"hf.optim.groups (expects what hf.fuse|got a parameter)"):
        hf.optim.groups(other, nanogpt)


def split(fused: nn.Module) -> list[dict[str, Any]]:
    """As nanoGPT does, over the stacks."""
    params = list(fused.parameters())
    return [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, hf.optim.AdamW, torch.optim.SGD])
def test_a_rule_that_saw_stacks_is_warned_of(kind: Any) -> None:
    fused = hf.fuse([Net() for _ in range(2)])
    with pytest.warns(UserWarning, match=r"single numbers.*p.dim\(\) >= 2.*hf.optim.groups\(fused, rule\)") as records:
        kind(split(fused), lr=0.1)
    assert records[0].filename == __file__


def test_an_empty_group_of_such_a_rule() -> None:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    with pytest.warns(UserWarning, match=r"param group 1 is empty.*p.dim\(\) >= 2"):
        torch.optim.AdamW(split(fused), lr=0.1)
    with pytest.raises(ValueError, match=r"empty.*hf.optim.groups\(fused, rule\)"):
        hf.optim.AdamW(split(fused), lr=0.1)


def test_groups_that_are_right_are_not_warned_of() -> None:
    model, fused = Net(), hf.fuse([Net() for _ in range(2)])
    for groups in (split(model), hf.optim.groups(fused, nanogpt)):
        torch.optim.AdamW(groups, lr=0.1)
    stacks = dict(fused.named_parameters())
    bias = stacks.pop("linear.bias")
    torch.optim.AdamW([{"params": list(stacks.values())}, {"params": [bias], "weight_decay": 0.0}], lr=0.1)
    # One rate for all of them says nothing of dims.
    uniform = [{"params": group["params"]} for group in split(fused)]
    hf.optim.AdamW(uniform, lr=0.1)
