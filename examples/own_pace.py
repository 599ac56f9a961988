"""A model for each of many shops, with 1 to 300 sales each: every one goes through its own data, at its own pace.

python examples/own_pace.py --shops 100 --epochs 5
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import hfusion as hf

FEATURES, BATCH = 6, 32


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Tanh(), nn.Linear(16, 1))


def sales(shops: int) -> list[tuple[Tensor, Tensor]]:
    """For each shop its sales ``[N, features]`` and their prices ``[N, 1]``; N is from 1 to 300."""
    generator = torch.Generator().manual_seed(0)
    data = []
    for _ in range(shops):
        count = int(torch.randint(1, 301, (), generator=generator))
        x = torch.randn(count, FEATURES, generator=generator)
        data.append((x, (x @ torch.randn(FEATURES, 1, generator=generator)).tanh()))
    return data


def main(arguments: Sequence[str] | None = None) -> hf.Population:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shops", type=int, default=100)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    data = sales(options.shops)
    loaders = [list(zip(x.split(BATCH), y.split(BATCH), strict=True)) for x, y in data]
    pop = hf.Population(
        hf.build(make_model, seeds=range(options.shops)),
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-2),
        loss=F.mse_loss,
        compile=not options.eager,
    )
    begin = time.perf_counter()
    for inputs, target, rows in hf.zip_loaders(loaders, epochs=options.epochs):
        pop.step(inputs, target, rows=rows)
    Console().print(
        f"{options.shops} shops of {min(len(y) for _, y in data)} to {max(len(y) for _, y in data)} sales made "
        f"{int(pop.ages.min())} to {int(pop.ages.max())} updates in {time.perf_counter() - begin:.1f} s"
    )
    return pop


if __name__ == "__main__":
    main()
