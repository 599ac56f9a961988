"""Learning rates over the processes of torchrun: each trains its members, and all see the best at every rung.

    torchrun --standalone --nproc-per-node 2 examples/over_ranks.py --members 16

An MLP learns scikit-learn's handwritten digits. After every epoch the worst quarter of all members begins again where
the best quarter is, whichever processes these are in. In one process, by python, it is the same study.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import distributed as dist
from torch import nn

import hfusion as hf


def make_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The mean losses of the last epoch, of all members."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    if dist.is_torchelastic_launched():
        dist.init_process_group()
    images, labels = (torch.tensor(part) for part in load_digits(return_X_y=True))
    images = images.float() / 16
    rates = torch.logspace(-5, -1, options.members).tolist()
    mine = hf.rows(options.members)
    pop = hf.Population(
        [make_model(seed) for seed in range(options.members)[mine]],
        optimizer=lambda params: hf.optim.Adam(params, lr=rates[mine]),
        loss=F.cross_entropy,
        compile=False,
    )
    quarter, means = options.members // 4, torch.empty(0)
    for epoch in range(options.epochs):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        losses = [pop.step(images[part], labels[part]) for part in order.split(64)]
        means = hf.gather_rows(torch.stack(losses).mean(0))
        ranked = means.argsort().tolist()
        if quarter and epoch < options.epochs - 1:
            hf.copy_rows(pop, ranked[:quarter], ranked[-quarter:])
        if mine.start == 0:
            print(f"epoch {epoch}: best {means.min():.4f}, worst {means.max():.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()
    return [float(each) for each in means]


if __name__ == "__main__":
    main()
