from __future__ import annotations

import pytest
import torch

from tests.oracle import Case, check, t

aten = torch.ops.aten

CASES = [
    Case(aten.cosine_similarity.default, (t(2, 3, 4), t(2, 3, 4))),
    Case(aten.cosine_similarity.default, (t(2, 3, 4), t(3, 1), -2, 1e-3)),
    Case(aten.cosine_similarity.default, (t(4), t(2, 4), -1)),
    Case(aten.cosine_similarity.default, (t(4), t(4), 0)),
    Case(aten.cosine_similarity.default, (t(), t(), 0)),
    Case(aten.cosine_similarity.default, (t(3), t(), 0)),
    Case(aten.pairwise_distance.default, (t(2, 3), t(2, 3))),
    Case(aten.pairwise_distance.default, (t(2, 3), t(3), 1.0, 1e-6, True)),
    Case(aten.pairwise_distance.default, (t(3), t(5, 2, 3), 3.0)),
    Case(aten.pairwise_distance.default, (t(3), t(3))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_distance(case: Case) -> None:
    check(case)
