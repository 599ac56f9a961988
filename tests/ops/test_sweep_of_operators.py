"""A fixed part of the sweep over PyTorch's operators; `make ops-sweep` runs all of them."""

from __future__ import annotations

import warnings

import pytest

from tests.ops.sweep import Verdict, cases, forms, sweep

# One or two of every family, and those that needed mending.
OPERATORS = """
add addcdiv as_strided_scatter block_diag broadcast_shapes bucketize clamp complex cumsum diagonal_scatter equal
fft.rfft gather index_put item kthvalue linalg.cholesky linspace logsumexp masked_fill masked_scatter
masked_select matmul meshgrid mode native_batch_norm
nn.functional.batch_norm nn.functional.conv_transpose2d nn.functional.cross_entropy
nn.functional.embedding nn.functional.multi_margin_loss nonzero polar repeat_interleave renorm
scatter_add split squeeze stft tensor_split trace view_as_complex where zeros_like
"""
# Their statistics are one tensor for all members, or their values decide what follows.
REFUSED = {"native_batch_norm", "nn.functional.batch_norm", "item"}


@pytest.mark.parametrize("name", OPERATORS.split())
def test_right_or_refused(name: str) -> None:
    with warnings.catch_warnings():
        # The database's own samples warn.
        warnings.simplefilter("ignore")
        findings = [finding for form in forms([name]) for case in cases(form, 1) for finding in sweep(case, (3,))]
    allowed = {Verdict.NONE, Verdict.RIGHT, Verdict.LOOPED} | ({Verdict.REFUSED} if name in REFUSED else set())
    assert [finding for finding in findings if finding.verdict not in allowed] == []
