"""Attention with dropout on CUDA: one launch for all members, and no matrix of weights is kept."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.null.calls import calls_per_step

pytestmark = pytest.mark.null

MEMBERS, SAMPLES, HEADS, TOKENS, SIZE = 4, 2, 4, 512, 16


class Dropped(nn.Module):
    """One attention whose weights are dropped with probability ``p``."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        y: Tensor = F.scaled_dot_product_attention(q, q, q, dropout_p=self.p)
        return y


@pytest.mark.parametrize(
    ("rates", "kernels"), [([0.1] * MEMBERS, 1), ([0.1, 0.1, 0.2, 0.2], 2)], ids=["one p", "own p"]
)
def test_weights_are_not_kept(rates: tuple[float, ...], kernels: int) -> None:
    fused = hf.fuse([Dropped(p) for p in rates], verify=False).cuda()
    x = torch.zeros(SAMPLES, HEADS, TOKENS, SIZE, device="cuda")
    fused(x)
    assert "members as batch, own draws" in str(fused.report())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = fused(x)
    y.sum().backward()
    weights = MEMBERS * SAMPLES * HEADS * TOKENS * TOKENS * x.element_size()
    assert torch.cuda.max_memory_allocated() - before < weights / 2
    calls = calls_per_step(lambda: fused(x))
    assert (calls.waits, calls.refused) == (0, ())
    # The product, the kernels of attention, and for several the copy of their results.
    assert calls.launches <= 4 + 2 * kernels


def test_attention_without_a_kernel_is_written_out() -> None:
    fused = hf.fuse([Dropped(0.1).double() for _ in range(MEMBERS)], verify=False).cuda()
    x = torch.zeros(9, HEADS, TOKENS, SIZE, device="cuda", dtype=torch.float64)
    fused(x).sum().backward()
    assert "written out, own draws" in str(fused.report())
    assert calls_per_step(lambda: fused(x).sum().backward()).waits == 0
