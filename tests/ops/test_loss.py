from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.ops import loss
from tests.oracle import Case, Draw, check, t

aten = torch.ops.aten

NONE, MEAN, SUM = 0, 1, 2
REDUCTIONS = (NONE, MEAN, SUM)


def labels(*shape: int, high: int = 4) -> Draw:
    return t(*shape, kind="integers", high=high)


def fixed(*shape: int, kind: str = "normal") -> Draw:
    return t(*shape, kind=kind, grad=False)


WEIGHTS = fixed(4, kind="positive")
FEW = (1, 3)

CASES = [
    *(
        case
        for r in REDUCTIONS
        for case in (
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r)),
            Case(aten.multi_margin_loss.default, (t(), t(kind="integers", high=1), 1, 1, None, r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(), t(kind="integers", high=1), r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), None, r, 2, 0.1), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 20), labels(5, high=20), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), WEIGHTS, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), labels(5), WEIGHTS, r, 2, 0.1), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(5, 4), t(5, 4, kind="unit"), None, r), members=FEW),
            Case(
                aten.cross_entropy_loss.default,
                (t(2, 4, 3), t(2, 4, 3, kind="unit"), WEIGHTS, r, -100, 0.1),
                members=FEW,
            ),
            Case(aten.cross_entropy_loss.default, (t(4), t(4, kind="unit"), None, r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(4), labels(), None, r), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(4), labels(), WEIGHTS, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(2, 4, 3), labels(2, 3), None, r, 2), members=FEW),
            Case(aten.cross_entropy_loss.default, (t(2, 4, 3, 2), labels(2, 3, 2), WEIGHTS, r), members=FEW),
            Case(aten.nll_loss_nd.default, (t(5, 4), labels(5), WEIGHTS, r, 2), members=FEW),
            Case(aten.nll_loss_nd.default, (t(4), labels(), None, r), members=FEW),
            Case(aten.nll_loss_nd.default, (t(2, 4, 3), labels(2, 3), None, r, 2), members=FEW),
            Case(aten.nll_loss.default, (t(5, 4), labels(5), None, r), members=FEW),
            Case(aten.nll_loss2d.default, (t(2, 4, 3, 2), labels(2, 3, 2), WEIGHTS, r, 2), members=FEW),
            Case(aten.mse_loss.default, (t(3, 4), t(3, 4), r)),
            Case(aten.mse_loss.default, (t(), t(), r), members=FEW),
            Case(aten.l1_loss.default, (t(3, 4), t(3, 4), r), members=FEW),
            Case(aten.smooth_l1_loss.default, (t(3, 4), t(3, 4), r, 0.5), members=FEW),
            Case(aten.huber_loss.default, (t(3, 4), t(3, 4), r, 0.5), members=FEW),
            Case(aten.binary_cross_entropy.default, (t(3, 4, kind="unit"), fixed(3, 4, kind="unit"), None, r)),
            Case(
                aten.binary_cross_entropy.default,
                (t(3, 4, kind="unit"), fixed(3, 4, kind="unit"), fixed(4, kind="positive"), r),
                members=FEW,
            ),
            Case(aten.binary_cross_entropy_with_logits.default, (t(3, 4), t(3, 4, kind="unit"), None, None, r)),
            Case(
                aten.binary_cross_entropy_with_logits.default,
                (t(3, 4), t(3, 4, kind="unit"), fixed(3, 1, kind="positive"), fixed(4, kind="positive"), r),
                members=FEW,
            ),
            Case(aten.kl_div.default, (t(3, 4), t(3, 4, kind="unit"), r), members=FEW),
            Case(aten.kl_div.default, (t(3, 4), t(3, 4), r), {"log_target": True}, members=FEW),
            Case(
                aten.poisson_nll_loss.default,
                (t(3, 4), t(3, 4, kind="positive"), True, True, 1e-8, r),
                members=FEW,
            ),
            Case(aten.soft_margin_loss.default, (t(3, 4), t(3, 4, kind="sign"), r), members=FEW),
            Case(aten.hinge_embedding_loss.default, (t(3, 4), t(3, 4, kind="sign"), 1.0, r), members=FEW),
            Case(aten.margin_ranking_loss.default, (t(3), t(3), t(3, kind="sign"), 0.5, r), members=FEW),
            Case(
                aten.triplet_margin_loss.default,
                (t(3, 4), t(3, 4), t(3, 4), 1.0, 2.0, 1e-6, True, r),
                members=FEW,
            ),
            Case(aten.triplet_margin_loss.default, (t(4), t(4), t(4), 1.0, 2.0, 1e-6, False, r), members=FEW),
            Case(aten.cosine_embedding_loss.default, (t(3, 4), t(3, 4), t(3, kind="sign"), 0.5, r), members=FEW),
            Case(aten.cosine_embedding_loss.default, (t(4), t(4), t(kind="sign"), 0.5, r), members=FEW),
            Case(aten.multi_margin_loss.default, (t(3, 4), labels(3), 1, 1.0, WEIGHTS, r), members=FEW),
            Case(aten.multi_margin_loss.default, (t(3, 4), labels(3), 2, 1.0, None, r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(3, 4), labels(3, 4), r), members=FEW),
            Case(aten.multilabel_margin_loss.default, (t(4), labels(4), r), members=FEW),
        )
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_loss(case: Case) -> None:
    check(case)


def cross_entropy(x: Tensor, target: Tensor, shared: bool, reduction: int = MEAN) -> Tensor:
    return loss.of_indices(aten.cross_entropy_loss.default, reduction, x, target, shared, None, (-100, 0.0))


@pytest.mark.parametrize("feature_major", [True, False])
def test_a_member_whose_targets_are_all_ignored_is_nan_alone(feature_major: bool) -> None:
    x = torch.randn(2, 4, 3, dtype=torch.float64).mT if feature_major else torch.randn(2, 3, 4, dtype=torch.float64)
    target = torch.tensor([[0, 1, -100], [-100, -100, -100]])
    losses = cross_entropy(x, target, shared=False)
    assert losses[1].isnan()
    torch.testing.assert_close(losses[0], F.cross_entropy(x[0], target[0]), rtol=1e-12, atol=0)


@pytest.mark.parametrize("feature_major", [True, False])
@pytest.mark.parametrize("wrong", [4, -1])
def test_a_target_out_of_range_raises_as_in_torch(feature_major: bool, wrong: int) -> None:
    x = torch.randn(2, 4, 3).mT if feature_major else torch.randn(2, 3, 4)
    target = torch.tensor([0, wrong, 1])
    with pytest.raises(IndexError, match="out of bounds") as expected:
        F.cross_entropy(x[0], target)
    with pytest.raises(IndexError, match=str(expected.value)):
        cross_entropy(x, target, shared=True)
