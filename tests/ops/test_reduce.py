from __future__ import annotations

import pytest
import torch

from tests.oracle import Case, check, t

aten = torch.ops.aten

X = t(2, 3, 4, 5)
DIMS: list[list[int]] = [[0], [1], [-1], [2, 3], [0, 2, 3], [], [0, 1, -1, -2]]

SEVERAL = [aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default, aten.logsumexp.default]
ONE = [
    aten.max.dim,
    aten.min.dim,
    aten.median.dim,
    aten.prod.dim_int,
    aten.argmax.default,
    aten.all.dim,
    aten.any.dim,
]
ALL = [
    aten.sum.default,
    aten.mean.default,
    aten.prod.default,
    aten.max.default,
    aten.min.default,
    aten.all.default,
    aten.any.default,
    aten.norm.Scalar,
    aten.argmax.default,
    aten.argmin.default,
    aten.median.default,
    aten.nansum.default,
    aten.count_nonzero.default,
    aten.linalg_vector_norm.default,
]
SPREAD = [aten.var.default, aten.std.default, aten.var_mean.default, aten.std_mean.default]
SAME = [
    aten.cumsum.default,
    aten.cumprod.default,
    aten.logcumsumexp.default,
    aten.cummax.default,
    aten.cummin.default,
]
SOFT = [aten.softmax.int, aten.log_softmax.int, aten.special_softmax.default]

CASES = [
    *(Case(target, (X, dim, keep)) for target in SEVERAL for dim in DIMS for keep in (False, True) if dim),
    *(Case(target, (X, dim, keep)) for target in ONE for dim in (0, 1, -1) for keep in (False, True)),
    *(Case(target, (shape,)) for target in ALL for shape in (X, t(3), t())),
    *(Case(target, (X, dim)) for target in SAME for dim in (0, 1, -1)),
    *(Case(target, (X, dim)) for target in SOFT for dim in (0, 1, 2, -1)),
    *(Case(target, (shape, unbiased)) for target in SPREAD for shape in (X, t(3)) for unbiased in (True, False)),
    *(Case(target, (X, dim)) for target in (aten.sort.default, aten.argsort.default) for dim in (0, 1, -1)),
    Case(aten.sum.dim_IntList, (X, [])),
    Case(aten.sum.dim_IntList, (t(), [0])),
    Case(aten.sum.dim_IntList, (X, None, True)),
    Case(aten.sum.default, (t(2, 3, kind="integers", high=9),), {"dtype": torch.float32}),
    Case(aten.sum.default, (t(2, 3, kind="bool"),)),
    Case(aten.sum.dim_IntList, (t(2, 3, 4, kind="integers", high=9), [-1]), {"dtype": torch.float64}),
    Case(aten.amax.default, (X,)),
    Case(aten.amax.default, (t(3, 4, kind="integers", high=3),)),
    Case(aten.max.default, (t(3, 4, kind="integers", high=3),)),
    Case(aten.var.correction, (X, [2, 3]), {"correction": 0}),
    Case(aten.var.correction, (X, [1])),
    Case(aten.std.correction, (X,), {"correction": 2, "keepdim": True}),
    Case(aten.var_mean.correction, (X, [0, 2, 3]), {"correction": 0, "keepdim": True}),
    Case(aten.var.dim, (X, [-1], True, True)),
    Case(aten.norm.ScalarOpt_dim, (X, 2, [1], True)),
    Case(aten.norm.ScalarOpt_dim, (X, 1, [2, 3])),
    Case(aten.norm.ScalarOpt_dtype, (X, 2), {"dtype": torch.float64}),
    Case(aten.linalg_vector_norm.default, (X, 3, [1, 2], True)),
    Case(aten.linalg_vector_norm.default, (X, 2, [-1])),
    Case(aten.linalg_norm.default, (t(3, 4),)),
    Case(aten.topk.default, (X, 2)),
    Case(aten.topk.default, (X, 2, 1)),
    Case(aten.sort.stable, (X,), {"stable": True, "dim": 1, "descending": True}),
    Case(aten.kthvalue.default, (X, 2, 2)),
    Case(aten.mode.default, (t(3, 6, kind="integers", high=3),)),
    Case(aten._softmax.default, (X, 1, False)),
    Case(aten._log_softmax.default, (X, -1, False)),
    Case(aten.softmax.int, (t(), 0)),
    Case(aten.cumsum.default, (t(), -1)),
    Case(aten.aminmax.default, (t(3, 4, grad=False),)),
    Case(aten.count_nonzero.dim_IntList, (t(3, 4, 2, kind="integers", high=2), [2])),
    Case(aten.all.dims, (t(3, 4, 2, kind="bool"), [1, -1])),
    Case(aten.any.dims, (t(3, 4, 2, kind="bool"),)),
    Case(aten.any.dims, (t(3, 4, 2, kind="bool"), [])),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_reduce(case: Case) -> None:
    check(case)
