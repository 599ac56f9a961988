"""The program of an evaluation is cut where the training has its tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from hfusion.core.program import Kind, Program
from hfusion.passes.cost.cost import operators
from hfusion.passes.partition.match_cuts import match_cuts
from hfusion.passes.partition.split_program import split


class Tied(nn.Module):
    """A layer that is used first and last, a view of a weight, and dropout between."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.a(x).relu())
        x = self.drop(x @ self.b.weight.t() + self.b.bias)
        return self.a(self.c(x).relu())


def program() -> Program:
    fused = hf.fuse([Tied().eval() for _ in range(2)])
    return fused.compiled(Arguments.of((torch.rand(3, 4),), {})).program


NAMES = {f"{layer}.{kind}": f"{layer}.{kind}" for layer in "abc" for kind in ("weight", "bias")}


def layers(*names: str) -> frozenset[str]:
    return frozenset(key for key in NAMES if key[0] in names)


@pytest.mark.parametrize(
    "held",
    [
        [layers("a", "b", "c")],
        [layers("a", "b"), layers("a", "c")],
        [layers("a"), layers("b"), layers("c", "a")],
        [layers("a"), layers("b", "c"), frozenset(), layers("a")],
        [layers("b"), layers("b")],
    ],
    ids=lambda held: str(len(held)),
)
def test_every_part_uses_what_its_shard_has(held: list[frozenset[str]]) -> None:
    whole = program()
    ends = match_cuts(whole, NAMES, held)
    assert len(ends) == len(held)
    assert sorted(ends) == ends
    assert ends[-1] == len(operators(whole))
    all_held = frozenset[str]().union(*held)
    for part, shard_names in zip(split(whole, ends), held, strict=True):
        assert {slot.name for slot in part.keys if slot.kind is Kind.PARAMETER} & all_held <= shard_names


def test_nothing_moves_to_a_later_shard_without_need() -> None:
    whole = program()
    count = len(operators(whole))
    assert match_cuts(whole, NAMES, [layers("a", "b", "c"), layers("a")]) == [count, count]


def test_another_order_is_refused() -> None:
    with pytest.raises(hf.PlanError, match=r"uses a\.\w+.* after tensors of later shards, .*hold the task whole"):
        match_cuts(program(), NAMES, [layers("a"), layers("b", "c")])
