"""Sixteen networks on scikit-learn's digits, on all cores: how long a step takes, and that its parts show in no result.

    python examples/all_cores.py --members 16 --steps 200

The same array is trained with its operators divided among torch's threads (`parts=1`), with blocks of members on
threads of their own (`parts=n`), and as `hf.train_step` chooses (`parts="auto"`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hfusion as hf

BATCH = 64


def network() -> nn.Module:
    """Images [N, 64] -> logits [N, 10]."""
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    """The same for every way."""
    images, digits = load_digits(return_X_y=True)
    x, y = torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(digits)
    draw = torch.Generator().manual_seed(0)
    rows = [torch.randint(len(x), (BATCH,), generator=draw) for _ in range(steps)]
    return [(x[row], y[row]) for row in rows]


def train(members: int, given: Sequence[tuple[Tensor, Tensor]], parts: int | str) -> tuple[Tensor, float, str]:
    """The last losses ``[B]``, milliseconds of a step, the first half of them left out, and how they ran."""
    fused = hf.build(network, seeds=range(members))
    optimizer = hf.optim.AdamW(fused.parameters(), lr=[1e-3 * 1.1**member for member in range(members)])
    step = hf.train_step(fused, F.cross_entropy, optimizer, parts=parts, compile=True)
    half = len(given) // 2
    for x, y in given[:half]:
        step(x, y)
    start = time.perf_counter()
    for x, y in given[half:]:
        losses = step(x, y)
    return losses, 1e3 * (time.perf_counter() - start) / (len(given) - half), str(step.report())


def main(arguments: Sequence[str] | None = None) -> dict[str, Tensor]:
    """The last losses by ``parts``."""
    parser = argparse.ArgumentParser(description="Members of an array on all cores.")
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200, help="at least 2")
    chosen = parser.parse_args(arguments)
    given = batches(chosen.steps)
    shown = Table("parts", "ms per step", "mean loss", "how", title=f"{torch.get_num_threads()} threads of torch's")
    results = {}
    for parts in (1, min(torch.get_num_threads(), chosen.members), "auto"):
        losses, milliseconds, how = train(chosen.members, given, parts)
        results[str(parts)] = losses
        shown.add_row(str(parts), f"{milliseconds:.3g}", f"{losses.mean():.4f}", how)
    Console().print(shown)
    return results


if __name__ == "__main__":
    main()
