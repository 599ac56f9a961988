"""A small population that is saved, resumed and damaged by the tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import hfusion as hf


class Net(nn.Module):
    """With statistics, and with draws at random."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6, bias=False)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2, self.training))


class Batches:
    """A loader that knows where it is."""

    def __init__(self) -> None:
        self.place = 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            generator = torch.Generator().manual_seed(self.place)
            self.place += 1
            yield torch.randn(8, 4, generator=generator), torch.randint(3, (8,), generator=generator)

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.place = state_dict["place"]


OPTIONS: dict[str, Any] = {
    "optimizer": lambda params: hf.optim.AdamW(params, lr=0.01, weight_decay=0.1),
    "loss": F.cross_entropy,
    "scheduler": lambda optimizer: CosineAnnealingLR(optimizer, 20),
    "clip_norm": 1.0,
    "compile": False,
}


def population(members: int = 3, seed: int = 0, **options: Any) -> hf.Population:
    torch.manual_seed(seed)
    tags = [f"net {seed}.{member}" for member in range(members)]
    pop = hf.Population([Net() for _ in range(members)], **{**OPTIONS, **options}, tags=tags)
    pop.hparams["lr"][:] = torch.tensor([0.01 * (member + 1) for member in range(members)])
    return pop


def train(pop: hf.Population, batches: Batches, steps: int) -> Tensor:
    """The losses ``[steps, rows]``."""
    losses = []
    for (x, y), _ in zip(batches, range(steps), strict=False):
        losses.append(pop.step(x, y))
        assert pop.scheduler is not None
        pop.scheduler.step()
    batches.place -= 1
    return torch.stack(losses)


def same(pop: hf.Population, other: hf.Population) -> bool:
    """Return True if two populations are bitwise equal, ignoring free rows."""
    live = [row for row, tag in enumerate(pop.tags) if tag is not None]
    if (pop.tags, pop.lineage, pop.steps) != (other.tags, other.lineage, other.steps):
        return False
    pairs = list(zip(pop.fused.state_dict().values(), other.fused.state_dict().values(), strict=True))
    for p, q in zip(pop.fused.parameters(), other.fused.parameters(), strict=True):
        state, other_state = pop.optimizer.state.get(p, {}), other.optimizer.state.get(q, {})
        if state.keys() != other_state.keys():
            return False
        pairs += [(state[key], other_state[key]) for key in state]
    pairs += [
        (torch.as_tensor(pop.hparams[key].tolist()), torch.as_tensor(other.hparams[key].tolist())) for key in ("lr",)
    ]
    pairs.append((pop.ages, other.ages))
    return all(torch.equal(a[live], b[live]) for a, b in pairs)
