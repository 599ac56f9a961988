"""Populations of unlike models, members that join, and parameters that users replace."""

from __future__ import annotations

import copy
import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.optim import lr_scheduler

import hfusion as hf
from tests.alone import Member, Own


# Populations of unlike models: who is in which group and why, and what groups have in common.
class Act(nn.Module):
    """Models of one shape whose forwards differ."""

    def __init__(self, act: str) -> None:
        super().__init__()
        self.first, self.last, self.act = nn.Linear(5, 6), nn.Linear(6, 3), act

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(getattr(torch, self.act)(self.first(x)))
        return out


def adamw(lrs: Any) -> Any:
    return lambda params: hf.optim.AdamW(params, lr=lrs)


def mlp(hidden: int, *, norm: bool = False) -> nn.Module:
    norms = [nn.BatchNorm1d(hidden)] if norm else []
    return nn.Sequential(nn.Linear(5, hidden, bias=not norm), *norms, nn.Tanh(), nn.Linear(hidden, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "narrow": lambda: mlp(4),
    "wide": lambda: mlp(9),
    "normed": lambda: mlp(6, norm=True),
    "linear": lambda: nn.Linear(5, 3),
    "tanh": lambda: Act("tanh"),
    "relu": lambda: Act("relu"),
    "sigmoid": lambda: Act("sigmoid"),
}


def model(kind: str) -> nn.Module:
    return MODELS[kind]().double()


KINDS = ["narrow", "wide", "narrow", "linear", "normed", "tanh", "relu", "tanh", "normed"]


def population(kinds: list[str], **options: Any) -> hf.Population:
    torch.manual_seed(0)
    arguments = {"optimizer": adamw(0.01), "loss": F.cross_entropy, "compile": False, **options}
    return hf.Population([model(kind) for kind in kinds], **arguments)


def train(pop: hf.Population, steps: int) -> None:
    for _ in range(steps):
        pop.step(torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,)))


def test_groups_say_who_is_together_and_why() -> None:
    pop = population(KINDS)
    train(pop, 1)
    groups = {group.rows: group for group in pop.groups}
    assert {rows: group.kind for rows, group in groups.items()} == {
        (0, 2): "array",
        (1,): "plain",
        (3,): "plain",
        (4, 8): "array",
        (5, 7): "array",
        (6,): "plain",
    }
    assert "no other member has its modules and shapes" in groups[(1,)].why
    assert "act is 'relu' in row 6 and 'tanh' in row 5" in groups[(6,)].why
    assert "array of rows 0, 2" in repr(pop)


def test_a_list_of_pairs_is_one_for_each_member_that_joins() -> None:
    pop, pairs = hf.Population([mlp(4)], optimizer=hf.optim.Adam, loss=F.cross_entropy), [(0.8, 0.9), (0.7, 0.95)]
    rows = pop.append([mlp(4), mlp(5)], betas=pairs)
    assert [tuple(vector[row].item() for vector in pop.hparams["betas"]) for row in rows] == pairs


def test_schedules_of_several_groups_are_those_of_the_members() -> None:
    makes = [partial(lr_scheduler.ExponentialLR, gamma=0.5), lambda opt: lr_scheduler.StepLR(opt, 2, gamma=0.1)]
    pop = population(["narrow", "wide", "narrow"], optimizer=adamw([0.1, 0.2, 0.3]), scheduler=[*makes, makes[1]])
    schedules: Any = pop.scheduler
    pop.stop(0)
    for _ in range(2):
        train(pop, 1)
        schedules.step(rows=[1, 2])
    assert schedules.kinds == ["StepLR", "StepLR"]
    assert schedules.last_epochs.tolist() == [0, 2, 2]
    torch.testing.assert_close(schedules.get_last_lr()[0][1:].tolist(), [0.02, 0.03])
    schedules.restart([2], makes[0])
    schedules.step(rows=[2])
    assert schedules.kinds == ["StepLR", "ExponentialLR"]
    assert pop.hparams["lr"].tolist()[1:] == pytest.approx([0.02, 0.015])
    assert {*pop.hparams} >= {"lr", "betas", "weight_decay"}
    assert len(pop.hparams) == len([*pop.hparams])
    assert "lr of 3 rows, in 2 vectors: " in repr(pop.hparams)


def test_no_models_are_refused() -> None:
    with pytest.raises(hf.FusionError, match="a population got an empty list; give it at least one model"):
        population([])


def state(member: nn.Module | None) -> dict[str, Tensor]:
    assert member is not None
    return {name: tensor.clone() for name, tensor in member.state_dict().items()}


def test_the_best_weights_of_each(tmp_path: Path) -> None:
    kinds = ["narrow", "normed", "narrow", "tanh", "relu", "linear"]
    pop = population(kinds)
    train(pop, 2)
    expected = [state(member) for member in pop.models]
    assert pop.best.update([1.0, 2.0, 3.0, 4.0, 5.0, math.nan]) == [0, 1, 2, 3, 4]
    train(pop, 2)
    assert pop.best.update([2.0, 1.0, 3.0, 4.0, 5.0, math.nan]) == [1]
    expected[1] = state(pop.models[1])
    assert pop.best.waited.tolist() == [1, 0, 1, 1, 1, 2]
    assert pop.best.ages.tolist() == [2, 4, 2, 2, 2, -1]
    train(pop, 1)
    # A record goes along with a member that is copied, and one that moves to another group.
    pop.copy([1, 0], [2, 5])
    pop.start(None, model("normed"))
    pop.save(tmp_path)
    kind_by_tag = {"member 0": "narrow", "member 1": "normed", "member 2": "normed", "member 5": "narrow"}
    kind_by_tag |= {"member 3": "tanh", "member 4": "relu", "member 6": "normed"}
    again = hf.Population.load(
        tmp_path, lambda tag: model(kind_by_tag[tag]), optimizer=adamw(0.01), loss=F.cross_entropy, compile=False
    )
    for restored in (pop, again):
        assert restored.best.restore() == [0, 1, 2, 3, 4, 5]
        for row, source in enumerate([0, 1, 1, 3, 4, 0]):
            for value, best_value in zip(state(restored.models[row]).values(), expected[source].values(), strict=True):
                assert torch.equal(value, best_value)
        assert torch.equal(state(restored.best[3])["last.weight"], expected[3]["last.weight"])
        restored.best.clear(3)
        with pytest.raises(ValueError, match="'member 3' in row 3 has no best weights"):
            restored.best[3]
        assert restored.best.scores[[0, 1, 2, 4, 5]].tolist() == [1.0, 1.0, 1.0, 5.0, 1.0]


def test_an_evaluation_is_in_eval_mode_and_changes_no_member() -> None:
    models = [
        nn.Sequential(nn.Linear(5, size), nn.BatchNorm1d(size), nn.Dropout(), nn.Linear(size, 3)).double()
        for size in (4, 6)
    ]
    pop = hf.Population(models, optimizer=adamw(0.01), loss=F.cross_entropy, compile=False)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
    pop.step(x, y)
    before = [state(member) for member in pop.models]
    values = pop.evaluate(F.cross_entropy, [(x, y)])
    for value, member, expected in zip(values, pop.models, before, strict=True):
        assert member is not None
        for name, tensor in state(member).items():
            assert torch.equal(tensor, expected[name])
        torch.testing.assert_close(value, F.cross_entropy(copy.deepcopy(member).eval()(x), y))


# What the user changes in a plain member is trained, unless its optimizer has other parameters.
def layers(width: int) -> nn.Module:
    named = {"first": nn.Linear(4, width), "act": nn.ReLU(), "last": nn.Linear(width, 3)}
    return nn.Sequential(OrderedDict(named)).double()


def sgd(parameters: Any) -> hf.optim.SGD:
    return hf.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_parameters_population() -> tuple[hf.Population, list[nn.Module]]:
    torch.manual_seed(0)
    models = [layers(width) for width in (5, 6)]
    return hf.Population(models, optimizer=sgd, loss=F.cross_entropy, tags=["5", "6"]), models


def plain_parameters_batch(seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=draws, dtype=torch.float64), torch.randint(3, (6,), generator=draws)


CHANGES: dict[str, Callable[[Any], object]] = {
    "activation": lambda m: setattr(m, "act", nn.Tanh()),
    "pruned": lambda m: prune.l1_unstructured(m.first, "weight", amount=0.3),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_changed_member_is_trained(change: str, at: int) -> None:
    pop, models = plain_parameters_population()
    members = [Member(m, partial(torch.optim.SGD, momentum=0.9), F.cross_entropy, Own(0.1)) for m in models]
    for step in range(4):
        if step == at:
            [shown] = [pop.models[0]]
            assert shown is not None
            for model in (models[0], shown):
                CHANGES[change](model)
        x, y = plain_parameters_batch(step)
        expected = torch.stack([member.call(x, y)[0] for member in members])
        torch.testing.assert_close(pop.step(x, y), expected, rtol=1e-9, atol=1e-12)
    for model, member in zip(models, pop.models, strict=True):
        assert member is not None
        torch.testing.assert_close(dict(member.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def like(parameter: Tensor) -> nn.Parameter:
    return nn.Parameter(torch.full_like(parameter, 0.3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: setattr(m.last, "bias", None), "it has no parameter last.bias any more"),
        (lambda m: setattr(m.last, "bias", m.first.bias), "it has another parameter last.bias"),
        (lambda m: setattr(m.first, "weight", like(m.first.weight.repeat(2, 1))), "another parameter first.weight"),
        (lambda m: setattr(m.first, "weight", like(m.first.weight)), "it has another parameter first.weight"),
        (lambda m: setattr(m, "last", copy.deepcopy(m.last)), "it has another parameter last.weight"),
        (lambda m: m.load_state_dict(copy.deepcopy(m.state_dict()), assign=True), "another parameter first.weight"),
        (lambda m: m.register_parameter("scale", like(m.last.bias)), "the parameter scale is new"),
        (lambda m: parametrizations.weight_norm(m.first), "it has no parameter first.weight any more"),
    ],
)
def test_other_parameters_are_refused(change: Callable[[Any], object], message: str, tmp_path: Path) -> None:
    pop, _ = plain_parameters_population()
    pop.step(*plain_parameters_batch(0))
    before = copy.deepcopy([None if model is None else model.state_dict() for model in pop.models])
    [model] = [pop.models[0]]
    assert model is not None
    change(model)
    for call in (lambda: pop.step(*plain_parameters_batch(1)), lambda: pop.save(tmp_path), lambda: pop.copy(0, 1)):
        with pytest.raises(hf.FusionError, match=message):
            call()
    assert pop.models[1] is not None
    torch.testing.assert_close(pop.models[1].state_dict(), before[1], rtol=0, atol=0)
    # The remedy of the message.
    stopped = pop.stop(0)
    assert [name for name, _ in stopped.named_parameters()] == [name for name, _ in model.named_parameters()]
