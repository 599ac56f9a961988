"""The best weights of each member are those that it had alone, wherever it has gone since; how patience counts."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.acts.zoo import ZOO

DOUBLE = torch.float64
OPTIONS: dict[str, Any] = {
    "optimizer": lambda params: hf.optim.Adam(params, lr=0.05),
    "loss": F.cross_entropy,
    "compile": False,
}


def normed() -> nn.Module:
    return ZOO["batch norm"].model(0)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, dtype=DOUBLE, generator=generator), torch.randint(3, (8,), generator=generator)


def same(model: nn.Module, state: dict[str, Tensor]) -> None:
    for (name, value), expected in zip(model.state_dict().items(), state.values(), strict=True):
        torch.testing.assert_close(value, expected, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def population(count: int, **options: Any) -> hf.Population:
    torch.manual_seed(7)
    return hf.Population([normed() for _ in range(count)], **OPTIONS, **options)


def shot(pop: hf.Population, row: int) -> dict[str, Tensor]:
    return copy.deepcopy(pop.fused[row].state_dict())


def test_records_follow_members() -> None:
    pop = population(4, tags=list("abcd"))
    assert pop.best.update([4.0, 3.0, math.nan, 1.0]) == [0, 1, 3]
    assert pop.best.ages.tolist() == [0, 0, -1, 0]
    first = [shot(pop, row) for row in range(4)]
    pop.step(*batch(0))
    pop.copy([0, 1], [1, 0])
    assert pop.best.scores[:2].tolist() == [3.0, 4.0]
    same(pop.best[0], first[1])
    same(pop.best[1], first[0])
    pop.copy(2, 3)
    assert pop.best.scores[2:].isnan().all()
    assert pop.best.waited.tolist() == [0, 0, 1, 1]
    pop.stop(3)
    pop.start(3, normed(), tag="d")
    assert pop.best.ages.tolist() == [0, 0, -1, -1]
    pop.stop([0, 2])
    assert pop.compact() == [1, 3]
    assert pop.best.scores.tolist()[0] == 4.0
    same(pop.best[0], first[0])
    row = pop.start(None, normed(), tag="a")
    assert math.isnan(pop.best.scores[row])
    pop.copy(0, row)
    same(pop.best[row], first[0])
    # Whoever goes on from the same record has its own from the next improvement on.
    assert pop.best.update([5.0] * row + [2.0] + [math.nan] * (len(pop) - row - 1)) == [1, row]
    same(pop.best[0], first[0])
    pop.best.clear(0)
    with pytest.raises(ValueError, match="'b' in row 0 has no best weights"):
        pop.best[0]
    twin = copy.deepcopy(pop)
    pop.best.clear()
    assert twin.best.scores[row] == 2.0


def test_patience_restores_the_best() -> None:
    pop = population(3, tags=list("abc"))
    patience = hf.Patience(2, restore_best=True, mode="max")
    assert patience(pop, [0.5, 0.5, math.nan]) == []
    best = shot(pop, 0)
    pop.step(*batch(0))
    assert patience(pop, [0.5, 0.6, math.nan]) == [2]
    pop.copy(0, 2)
    pop.step(*batch(1))
    # The copy has waited as long as its source.
    assert patience(pop, [0.4, 0.7, 0.4]) == [0, 2]
    same(pop.stop(0), best)
    same(pop.fused[2], best)
    kept = [pop.best[1].state_dict(), pop.best[2].state_dict()]
    pop.step(*batch(2))
    assert pop.best.restore([1]) == [1]
    same(pop.fused[1], kept[0])
    assert pop.best.restore() == [1, 2]
    same(pop.fused[2], kept[1])


@pytest.mark.parametrize(("mode", "patience", "restore"), [("min", 0, False), ("max", 1, True), ("min", 3, True)])
def test_patience_counts_as_lightning(mode: Any, patience: int, restore: bool) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import EarlyStopping

    pop = population(20)
    draws = random.Random(patience)
    early_stoppings = [EarlyStopping("x", 0.1, patience, mode=mode, check_finite=False) for _ in range(20)]
    hf_patience = hf.Patience(patience, mode=mode, least=0.1, restore_best=restore)
    ended: set[int] = set()
    for _ in range(12):
        values = [draws.choice([math.nan, *(k / 10 for k in range(9))]) for _ in early_stoppings]
        judged = [
            early_stopping._evaluate_stopping_criteria(torch.tensor(v, dtype=DOUBLE))[0]
            for early_stopping, v in zip(early_stoppings, values, strict=True)
        ]
        over = set(hf_patience(pop, values))
        assert over - ended == {row for row, stops in enumerate(judged) if stops} - ended
        ended |= over
    assert len(ended) > 10
