"""Idle members: computation in blocks leaves them out, and the results of the others do not change."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

MEMBERS = 6


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(9, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 3))


def convolved() -> nn.Module:
    return nn.Sequential(nn.Unflatten(1, (1, 3, 3)), nn.Conv2d(1, 4, 2), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))


def shuffling() -> nn.Module:
    """Draws from the generator of all members."""

    class Shuffled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, torch.randperm(9)]

    return nn.Sequential(Shuffled(), nn.Linear(9, 3))


@pytest.mark.parametrize(
    ("make", "size", "parts", "left_out"),
    [
        (dense, None, 1, []),
        (dense, 2, 1, [2, 3]),
        (dense, None, 2, [0, 1, 2]),
        (dense, 4, 1, []),
        (convolved, 1, 1, [0, 2, 3]),
        (shuffling, 2, 1, []),
    ],
    ids=["one program", "blocks", "threads", "blocks of two sizes", "members", "drawn together"],
)
def test_others_do_not_notice(make: type[nn.Module], size: int | None, parts: int, left_out: list[int]) -> None:
    idle = frozenset([0, 1, 2] if parts == 2 else [0, 2, 3])

    def run(resting: bool) -> tuple[list[Tensor], list[Tensor]]:
        torch.manual_seed(0)
        fused = hf.fuse([make() for _ in range(MEMBERS)])
        opt = hf.optim.AdamW(fused.parameters(), lr=0.01)
        step, losses = hf.train_step(fused, F.cross_entropy, opt, parts=parts, compile=True), []
        step.at_once = size
        for number in range(8):
            if number == 4 and resting:
                step.idle = idle
            losses.append(step(torch.randn(5, 9), torch.randint(3, (5,))))
        states = [tensor for entry in opt.state.values() for tensor in entry.values()]
        return losses, [*fused.state_dict().values(), *states]

    whole, with_idle = run(False), run(True)
    others = [member for member in range(MEMBERS) if member not in idle]
    for actual, expected in zip([*with_idle[0], *with_idle[1]], [*whole[0], *whole[1]], strict=True):
        assert torch.equal(actual[others], expected[others])
    assert with_idle[0][-1].isnan().nonzero().flatten().tolist() == left_out
