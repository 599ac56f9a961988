"""`hf.train_step` on CUDA: few replays of graphs, no wait, also after tensors have moved."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.null.arrays import losses_of, move
from tests.null.calls import calls_per_step

pytestmark = pytest.mark.null

MEMBERS = 4


class Attentive(nn.Module):
    """A layer of a transformer, and a head on the mean of its positions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layer(x).mean(1))
        return scores


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (8,)),
    "cnn": (cnn, (3, 8, 8)),
    "transformer": (Attentive, (5, 8)),
    "transformer of many tokens": (Attentive, (96, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "autocast"])
@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_recorded(name: str, dtype: torch.dtype) -> None:
    make, shape = MODELS[name]
    fused = hf.fuse([make() for _ in range(MEMBERS)], verify=False).cuda()
    opt = hf.optim.AdamW(fused.parameters(), lr=[0.1, 0.2, 0.3, 0.4])
    step = hf.train_step(fused, losses_of, opt, compile=True)
    inputs, target = torch.zeros(6, *shape, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")

    def train() -> None:
        with torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            step(inputs, target)

    for _ in range(2):
        calls = calls_per_step(train)
        assert (calls.waits, calls.refused) == (0, ())
        # Forward with backward, and the optimizer.
        assert calls.graphs == 2
        (row,) = step.report().rows
        assert row.how.endswith("recorded and replayed as one")
        assert opt.launches == "recorded and replayed as one"
        move(list(fused.parameters()))


def test_after_members_left_and_joined() -> None:
    fused = hf.fuse([mlp() for _ in range(MEMBERS)], verify=False).cuda()
    opt = hf.optim.AdamW(fused.parameters(), lr=0.1)
    step = hf.train_step(fused, losses_of, opt, compile=True)
    inputs, target = torch.zeros(6, 8, device="cuda"), torch.zeros(6, dtype=torch.int64, device="cuda")
    for rows in ([0, 1, 2, 3], [0, 2, 3], [1, 2]):
        fused.keep(rows)
        opt.keep(rows)
        calls = calls_per_step(lambda: step(inputs, target))
        assert (calls.graphs, calls.waits, calls.refused) == (2, 0, ())
