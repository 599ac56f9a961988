from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hfusion.ops.index import own_rows, rows_of_all
from tests.oracle import Case, check, t

aten = torch.ops.aten


def indices(*shape: int) -> object:
    return t(*shape, kind="integers", high=5)


CASES = [
    Case(aten.embedding.default, (t(5, 3), indices(2, 4))),
    Case(aten.embedding.default, (t(5, 3), indices(4))),
    Case(aten.embedding.default, (t(5, 3), indices())),
    Case(aten.embedding.default, (t(5, 3), indices(0, 4))),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), 2)),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), 0, True)),
    Case(aten.embedding.default, (t(5, 3), indices(3, 4), -1, True)),
    # Offsets that are all 0: an empty bag, and one that holds everything.
    *(
        Case(
            aten.embedding_bag.padding_idx,
            (t(5, 3), indices(6), t(2, kind="integers", high=1), False, mode, False, None, False, 2),
            members=(1, 3),
        )
        for mode in (0, 1)
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_embedding(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("wrong", [5, -1, 7])
@pytest.mark.parametrize(
    "lookup",
    [
        lambda index, weight: rows_of_all(index, weight, -1),
        lambda index, weight: own_rows(index.expand(3, 2), weight, -1, False),
    ],
    ids=["shared", "own"],
)
def test_an_index_out_of_range_never_reads_another_member(wrong: int, lookup: Callable[..., Tensor]) -> None:
    weight, index = torch.randn(3, 5, 2), torch.tensor([0, wrong])
    with pytest.raises((IndexError, RuntimeError), match="out of"):
        lookup(index, weight)
