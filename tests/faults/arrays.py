"""Small arrays for runs that fail, what the plain loop makes of them, and what a run may not leave behind."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn

import hfusion as hf
from tests.trained import Way, batches, fused, plain

DTYPE = torch.float64
WAY = Way(clip=0.5, accumulate=2)
LOADER = batches(DTYPE)
Pair = tuple[Tensor, Tensor]


class Small(nn.Module):
    """A wide input takes one operator more."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[1] > 6:
            x = x[:, :6].sin()
        return self.out(self.drop(torch.relu(self.norm(self.first(x)))))


Result = tuple[Tensor, dict[str, Tensor]]


@cache
def made(index: int) -> tuple[hf.FusedModule, Result]:
    """An array for many runs, each of which puts its state back, and what the plain loop makes of it."""
    torch.manual_seed(index)
    module = fused(Small)
    return module, plain(module, WAY, LOADER)


def array(index: int) -> hf.FusedModule:
    return made(index)[0]


def by_loop(index: int) -> Result:
    return made(index)[1]


def state_of(module: hf.FusedModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def equal_states(module: hf.FusedModule, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())


@contextmanager
def nothing_left(on: hf.Machine) -> Iterator[None]:
    """No thread, no file, and torch's random numbers as they were."""
    threads, drawn = threading.enumerate(), torch.get_rng_state()
    yield
    assert set(threading.enumerate()) <= set(threads)
    assert not on.disk.exists()
    assert torch.equal(torch.get_rng_state(), drawn)
