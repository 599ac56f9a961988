"""Runs that are cut off and go on: what they train, and what they give."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.plan import Plan
from tests.trained import Way, adamw, fused, machine, planned, task


@cache
def _made(seed: int) -> tuple[hf.FusedModule, dict[str, Tensor]]:
    torch.manual_seed(seed)
    found = fused()
    return found, {name: tensor.clone() for name, tensor in found.state_dict().items()}


def array(seed: int) -> hf.FusedModule:
    """An array as it is before it is trained; captured once."""
    found, state = _made(seed)
    found.load_state_dict(state)
    return found


def shuffled(seed: int, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Five minibatches in an order that is drawn anew for every epoch; the last is smaller."""
    draw = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(28, 6, generator=draw, dtype=torch.float64), torch.randint(3, (28,), generator=draw)
    return DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True, generator=generator)


class Counted:
    """A loader that tells its position, and cannot be read twice up to one: it never gives a minibatch again."""

    def __init__(self) -> None:
        self.given = 0
        self._first = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self._first = self._first, 0
        for place in range(first, 5):
            self.given += 1
            draw = torch.Generator().manual_seed(self.given)
            self._place = place + 1
            yield torch.randn(6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (6,), generator=draw)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self._first = state["given"], state["place"]


class CutError(Exception):
    """Ends a run."""


def task_with(
    fused: hf.FusedModule, own: FusedOptimizer, way: Way, place: int, *, evaluated: bool, **more: Any
) -> hf.Task:
    """Task ``t0``, ``t1``, ... of an optimizer that exists, so that its state can be looked at."""
    one = Way(lambda params: own, way.clip, way.accumulate)
    return task(fused, one, shuffled(place), f"t{place}", eval_loader=shuffled(9) if evaluated else None, **more)


def planned_as(tasks: Sequence[hf.Task], on: hf.Machine, modes: Sequence[str]) -> Plan:
    """As `tests.trained.planned`, each task resident, or in four shards, spilled or with the last of them kept."""
    counts = [1 if mode == "resident" else 4 for mode in modes]
    return planned(tasks, on, counts, [mode == "resident" for mode in modes], [mode == "kept" for mode in modes])


def assert_equal(found: Any, wanted: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)


def results(report: Any, one: hf.Task) -> list[Any]:
    """The losses, the members and the optimizer's state."""
    make, models = one.optimizer, one.models
    assert callable(make)
    assert isinstance(models, hf.FusedModule)
    # It is made once, whoever asks.
    optimizer = make(list(models.parameters()))
    state = [entry[key] for entry in optimizer.state.values() for key in sorted(entry)]
    losses = [report.losses] if report.eval_losses is None else [report.losses, report.eval_losses]
    return [tensor.clone() for tensor in (*losses, *models.state_dict().values(), *state)]


def run(root: Path | None, kill: int | None) -> list[Any]:
    """A short run; the process is killed at a minibatch."""

    def killed(heard: Any) -> None:
        if isinstance(heard, hf.Step) and heard.epoch * 5 + heard.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    found = array(3)
    own = adamw(list(found.parameters()))
    one = task(found, Way(lambda params: own), shuffled(4), callbacks=[killed], eval_loader=shuffled(5))
    report = hf.train(one, machine(), checkpoint=root, every=1)
    return results(report["task"], one)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), int(sys.argv[2]))
