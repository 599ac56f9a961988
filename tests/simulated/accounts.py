"""Compare the bytes that are accounted for with those of all tensors on a simulated device.

``python -m tests.simulated.accounts``
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

import hfusion as hf
from tests.simulated.device import install
from tests.trained import adamw, cross_entropy, fused, planned


class Wide(nn.Module):
    """Large enough for rounding to play no part."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(256, 256), nn.GELU())))
        self.head = nn.Linear(256, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x))


def main() -> int:
    torch.set_num_threads(1)
    install()
    from tests.simulated.queues import QUEUES

    loader = [(torch.randn(128, 256), torch.randint(3, (128,))) for _ in range(2)]
    # Minibatches that are evaluated may be larger. What was loaded of one stays to its end, which is not accounted for.
    evaluated = [(torch.randn(4096, 256), torch.randint(3, (4096,)))]
    on, ratios, larger = hf.Machine([hf.Device("sim:0", memory="1GiB")]), [], []
    for count, resident, eval_loader in (
        (1, True, None),
        (6, False, None),
        (1, True, evaluated),
        (6, False, evaluated),
    ):
        task = hf.Task(
            fused(Wide, torch.float32), cross_entropy, optimizer=adamw, loader=loader, eval_loader=eval_loader, seed=0
        )
        plan = planned([task], on, [count], [resident])
        before = list(QUEUES.taken)
        QUEUES.start(count)
        report = hf.train([task], on, plan=plan)
        peak, (accounted,) = QUEUES.peak[0] - before[0], report.peak.values()
        (ratios if eval_loader is None else larger).append(peak / accounted)
        print(f"{count} shards: {peak:,} bytes, {accounted:,} accounted for: {peak / accounted:.3f}")
        assert QUEUES.taken == before
    return max(ratios) > 1.1 or min(ratios) < 0.9 or max(larger) > 1.15 or min(larger) < 0.9


if __name__ == "__main__":
    sys.exit(main())
