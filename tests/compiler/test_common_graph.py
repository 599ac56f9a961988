"""Models of one structure that do different things are refused with what differs, and fused group by group."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.core.errors import ForwardsDiffer
from tests.choices import CHOICES, Chosen

X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

NAMED = {
    "activation by name": "choice is 'relu' in model 0 and 'tanh' in model 1; step 10 is aten.relu.default in model 0",
    "number of steps": "choice is 1 in model 0 and 2 in model 1; the models' graphs have different numbers of nodes",
    "place of the norm": "choice is True in model 0 and False in model 1; step",
    "a number that decides": "choice is 0.1 in model 0 and 0.9 in model 1; step",
    "only in evaluation": "choice is 'relu' in model 0 and 'tanh' in model 1; step",
    "order": "choice is True in model 0 and False in model 1",
    "which layer": r"choice is 'first' in model 0 and 'second' in model 1; step .* has different operands",
    "a container": r"choice\['on'\]\[0\] is 'a' in model 0 and 'b' in model 1",
}


@pytest.mark.parametrize("name", CHOICES)
def test_what_differs_is_named_and_its_groups_can_be_fused(name: str) -> None:
    forward, choices, count = CHOICES[name]
    models: list[nn.Module] = [Chosen(choice, forward) for choice in [*choices, choices[0]]]
    if name == "only in evaluation":
        models = [model.eval() for model in models]
    groups: tuple[tuple[int, ...], ...] = (tuple(range(len(models))),)
    if count > 1:
        with pytest.raises(ForwardsDiffer, match=NAMED[name]) as raised:
            hf.fuse(models)(X)
        groups = raised.value.groups
        first = ", ".join(map(str, groups[0]))
        assert f"Fuse models {first} and model" in str(raised.value)
    assert len(groups) == count
    assert sorted(row for group in groups for row in group) == list(range(len(models)))
    for group in groups:
        members = [models[row] for row in group]
        torch.manual_seed(1)
        outputs = hf.fuse(members)(X)
        if name != "dropout":
            torch.testing.assert_close(outputs, torch.stack([model(X) for model in members]), rtol=1e-9, atol=1e-12)


def test_a_population_makes_groups_of_them() -> None:
    forward, choices, _ = CHOICES["activation by name"]
    y = torch.tensor([0, 1, 0, 1, 0])
    models: list[nn.Module] = [Chosen(choice, forward) for choice in choices]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.cross_entropy, compile=False)
    assert pop.step(X, y).isfinite().all()
    by_choice = {frozenset(row for row, other in enumerate(choices) if other == choice) for choice in choices}
    assert {frozenset(group.rows) for group in pop.groups} == by_choice
    assert all("choice is '" in group.why for group in pop.groups)
    late = pop.start(None, Chosen(choices[0], forward), tag="late")
    assert pop.step(X, y).isfinite().all()
    assert any({0, late} <= set(group.rows) for group in pop.groups)
