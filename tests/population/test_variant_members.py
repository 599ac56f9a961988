"""Populations of arrays whose members differ in submodules: members equal torch alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.population.mixed_alone import Alone, close
from tests.population.walk import Walk, variant

KINDS = (0, 1, 5, 1)


def adamw(params: Any) -> Any:
    return hf.optim.AdamW(params, lr=0.01)


def made(kinds: Sequence[int] = KINDS, **overrides: Any) -> tuple[hf.Population, list[Alone | None]]:
    torch.manual_seed(0)
    models = [variant(kind) for kind in kinds]
    alone: list[Alone | None] = [Alone(copy.deepcopy(model)) for model in models]
    options = {"optimizer": adamw, "loss": F.cross_entropy, "compile": False} | overrides
    return hf.Population(hf.fuse(models), **options), alone


def step(pop: hf.Population, alone: Sequence[Alone | None], rows: Sequence[int] | None = None, count: int = 2) -> None:
    for _ in range(count):
        x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
        losses = pop.step(x, y, rows=rows)
        for row, member in enumerate(alone):
            if member is not None and (rows is None or row in rows):
                close(losses[row], member.step(x, y))
    for model, member in zip(pop.models, alone, strict=True):
        if member is not None:
            assert model is not None
            same(model, member.model)


def same(actual: nn.Module, expected: nn.Module) -> None:
    actual_state, expected_state = actual.state_dict(), expected.state_dict()
    assert actual_state.keys() == expected_state.keys()
    for name, value in actual_state.items():
        close(value, expected_state[name])


@pytest.mark.parametrize("seed", range(4))
def test_a_life_of_variants(seed: int) -> None:
    Walk(seed, compile=False, model="variants").run(15)


def test_compiled_steps_of_all_and_of_some() -> None:
    pop, alone = made(compile=True)
    step(pop, alone)
    step(pop, alone, [1, 3])
    step(pop, alone)


@pytest.mark.parametrize("kinds", [(0, 0, 1, 0), (0, 3, 1, 9)])
def test_statistics_of_members_that_are_no_neighbours(kinds: Sequence[int]) -> None:
    pop, alone = made(kinds)
    step(pop, alone)


def test_a_model_of_a_new_variant_joins_the_array() -> None:
    pop, alone = made(accumulate=2)
    for member in alone:
        assert member is not None
        member.accumulate = 2
    # In the midst of an update.
    step(pop, alone, count=1)
    model = variant(3)
    assert pop.start(None, model) == 4
    alone.append(Alone(copy.deepcopy(model), accumulate=2))
    alone += [None] * (len(pop) - len(alone))
    step(pop, alone, count=5)
    (group,) = pop.groups
    assert (group.kind, group.rows) == ("array", (0, 1, 2, 3, 4))
    assert group.why == "members that were fused as variants, as they differ in submodules"


def test_a_model_that_cannot_join_runs_apart(tmp_path: Path) -> None:
    pop, alone = made()
    other = nn.Linear(5, 3).double()
    pop.start(None, other)
    alone.append(Alone(copy.deepcopy(other)))
    step(pop, alone)
    assert [(group.kind, group.rows) for group in pop.groups] == [("array", (0, 1, 2, 3)), ("plain", (4,))]
    # A model that fits joins the array, and a copy between the groups moves a member.
    model = variant(4)
    assert pop.start(None, model) == 5
    alone.append(Alone(copy.deepcopy(model)))
    step(pop, alone, [0, 4, 5])
    pop.copy(5, 4)
    alone[4] = alone[5].twin() if alone[5] is not None else None
    step(pop, alone)
    assert [(group.kind, group.rows) for group in pop.groups] == [("array", (0, 1, 2, 3, 4, 5))]
    pop.start(None, nn.Linear(5, 3).double())
    pop.save(tmp_path)
    kinds = dict(zip(pop.tags, [*KINDS, 4, 4, None], strict=True))

    def make(tag: str) -> nn.Module:
        kind = kinds[tag]
        return nn.Linear(5, 3).double() if kind is None else variant(kind)

    again = hf.Population.load(tmp_path, make, optimizer=adamw, loss=F.cross_entropy, compile=False)
    assert [(group.kind, group.rows) for group in again.groups] == [("array", (0, 1, 2, 3, 4, 5)), ("plain", (6,))]
    step(again, [*alone, None])


def test_parameters_of_a_new_variant_need_one_param_group() -> None:
    def two_groups(params: Any) -> Any:
        first, *others = params
        return hf.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)

    pop, alone = made((0, 2), optimizer=two_groups)
    step(pop, alone)
    model = variant(1)  # PReLU has a parameter that no member has
    pop.start(None, model)
    alone.append(Alone(copy.deepcopy(model)))
    step(pop, alone)
    assert [(group.kind, group.rows) for group in pop.groups] == [("array", (0, 1)), ("plain", (2,))]


def test_members_of_a_save_load_as_an_array_or_alone(tmp_path: Path) -> None:
    pop, alone = made()
    step(pop, alone)
    pop.best.update([0.1, 0.2, 0.3, 0.4])
    step(pop, alone, count=1)
    pop.save(tmp_path)
    for names in (["member 3", "member 0"], ["member 1", "member 3"], ["member 2"]):
        rows = [int(name.split()[1]) for name in names]
        again = hf.Population.load(
            tmp_path,
            lambda tag: variant(KINDS[int(tag.split()[1])]),
            tags=names,
            optimizer=adamw,
            loss=F.cross_entropy,
            compile=False,
        )
        assert again.best.scores.tolist() == [[0.1, 0.2, 0.3, 0.4][row] for row in rows]
        same(again.best[0], pop.best[rows[0]])
        members = [alone[row] for row in rows]
        step(again, [None if member is None else member.twin() for member in members])
        # It takes models of other structures as before.
        again.append(variant(7))
        assert [group.kind for group in again.groups] == ["array"]
    model = variant(KINDS[2])
    hf.load(tmp_path, model, tags="member 2")
    assert alone[2] is not None
    same(model, alone[2].model)


def test_weights_of_variants() -> None:
    pop, alone = made()
    step(pop, alone)

    @hf.each
    def halve(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
        for value in params.values():
            value.mul_(0.5)

    pop.each(halve)
    for member in alone:
        assert member is not None
        with torch.no_grad():
            for parameter in member.model.parameters():
                parameter.mul_(0.5)
    step(pop, alone)
    with pytest.raises(ValueError, match="average of members of different shapes"):
        pop.average([0, 1])
    mean, first, second = pop.average([1, 3]), alone[1], alone[3]
    assert mean is not None
    assert first is not None
    assert second is not None
    for name, value in mean.state_dict().items():
        if value.is_floating_point():
            close(value, (first.model.state_dict()[name] + second.model.state_dict()[name]) / 2)
    pop.best.update([1.0] * 4)
    step(pop, alone)
    before = [copy.deepcopy(pop.best[row]) for row in range(4)]
    pop.best.restore()
    for restored, model in zip(pop.models, before, strict=True):
        assert restored is not None
        same(restored, model)


@pytest.mark.parametrize("scaled", [False, True])
def test_heads_of_different_sizes(scaled: bool) -> None:
    classes = (3, 10, 3, 5)
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, count)).double() for count in classes]
    alone = [Alone(copy.deepcopy(model), scaled=scaled) for model in models]
    scaler = hf.optim.GradScaler(init_scale=64.0, growth_interval=3) if scaled else None
    pop = hf.Population(hf.fuse(models), optimizer=adamw, loss=F.cross_entropy, scaler=scaler, compile=False)
    for rows in (None, [1, 3], [2, 0], None):
        x, chosen = torch.randn(6, 5, dtype=torch.float64), list(range(4)) if rows is None else rows
        targets = [torch.randint(classes[row], (6,)) for row in chosen]
        losses = pop.step(x, hf.stacked(targets), rows=rows)
        for row, target in zip(chosen, targets, strict=True):
            close(losses[row], alone[row].step(x, target))
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randint(3, (6,))
    values = pop.evaluate(F.cross_entropy, [(x, y)])
    for row, member in enumerate(alone):
        close(values[row], F.cross_entropy(member.model(x), y))
