"""A loader that waits holds up its own task only."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

# Seconds after which a loader gives up; tasks that do not hold up one another need milliseconds.
PATIENCE = 2.0


class Meeting:
    """Two minibatches; with the second it waits for the other loader to be at its own."""

    def __init__(self, mine: Event, other: Event) -> None:
        self.mine, self.other, self.met = mine, other, False

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(2):
            if index:
                self.mine.set()
                self.met = self.other.wait(PATIENCE)
            yield torch.randn(3, 4), torch.randn(3, 2)


@pytest.mark.xfail(
    reason="A loader may draw from torch's generators, which are the process's: while it is asked for a minibatch, its "
    "task holds them"
)
def test_a_loader_may_wait_for_another_task() -> None:
    events = Event(), Event()
    loaders = [Meeting(*events), Meeting(*reversed(events))]
    tasks = [
        hf.Task([nn.Linear(4, 2) for _ in range(2)], F.mse_loss, hf.optim.SGD, loader, name=f"task-{k}")
        for k, loader in enumerate(loaders)
    ]
    # Before a run one minibatch of each is looked at.
    hf.train(tasks, hf.Machine([hf.Device(f"cpu:{k}", memory="1GiB") for k in range(2)]))
    assert all(loader.met for loader in loaders)
