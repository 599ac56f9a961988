from __future__ import annotations

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.ops import norm
from hfusion.passes.inductor.batch_member_loops import batch_member_loops


class Norms(nn.Module):
    """Enough elements for a loop of kernels."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.layer = nn.LayerNorm((4, 32), bias=affine)
        self.rms = nn.RMSNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.rms(self.layer(x * self.layer.weight).sin())
        return y


# As many members as rows of the weight: no shape alone tells them apart.
@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("affine", [False, True])
def test_norms_of_all_members_at_once(affine: bool, members: int) -> None:
    models = [Norms(affine).double() for _ in range(members)]
    for model in models:
        nn.init.normal_(model.layer.weight)
    if affine:
        for model in models:
            model.layer.bias = models[0].layer.bias.requires_grad_(False)
    fused = hf.fuse(models)
    x = torch.randn(norm.ROWS_FROM // 128, 4, 32, dtype=torch.float64)
    y = fused(x)
    (part,) = fused.report().parts
    before = part.program.module
    after = batch_member_loops(before)
    assert norm.rows in {node.target for node in before.graph.nodes}
    assert norm.rows not in {node.target for node in after.graph.nodes}
    state = fused.state_dict(keep_vars=True)
    (output,) = after(*[x if slot.name == "0" else state[slot.name] for slot in part.program.slots])
    torch.testing.assert_close(output, y, rtol=1e-9, atol=1e-12)
    parameters = [p for p in fused.parameters() if p.requires_grad]
    actual, expected = (torch.autograd.grad(o.sin().sum(), parameters) for o in (output, y))
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
