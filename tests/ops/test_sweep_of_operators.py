"""A fixed part of the sweep over PyTorch's operators; `make ops-sweep` runs all of them."""

from __future__ import annotations

import warnings

import pytest

from tests.ops.sweep import Finding, Pattern, Verdict, cases, document, forms, patterns, sweep, worst

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


def test_patterns() -> None:
    assert [p.stacked for p in patterns(2, (3,))] == [(False, False), (True, True), (True, False), (False, True)]
    assert [str(p) for p in patterns(1, (1, 3))] == [
        "B=1 all shared",
        "B=1 all stacked",
        "B=3 all shared",
        "B=3 all stacked",
    ]


def test_of_several_samples_the_worst_counts() -> None:
    right, other = (
        Finding("add", "function, float64", Pattern(3, (True,)), verdict, "why")
        for verdict in (Verdict.RIGHT, Verdict.WRONG)
    )
    assert worst([right, other, right]) == [other]
    text = document([right, other], samples=2)
    assert "0.0% of the pairs" in text
    assert "## Wrong\n\n- why: add (B=3 all stacked)\n" in text
