"""Runs that are interrupted and resumed: their tasks and their results."""

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
def _captured(seed: int) -> tuple[hf.FusedModule, dict[str, Tensor]]:
    torch.manual_seed(seed)
    module = fused()
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def array(seed: int) -> hf.FusedModule:
    """An array as it is before it is trained; captured once."""
    module, state = _captured(seed)
    module.load_state_dict(state)
    return module


def shuffled(seed: int, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Five minibatches in an order that is drawn again for every epoch; the last is smaller."""
    draw = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(28, 6, generator=draw, dtype=torch.float64), torch.randint(3, (28,), generator=draw)
    return DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True, generator=generator)


class Counted:
    """A loader that saves its position, and cannot be read up to it again: it gives each minibatch once."""

    def __init__(self) -> None:
        self.given = 0
        self._first = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self._first = self._first, 0
        for index in range(first, 5):
            self.given += 1
            draw = torch.Generator().manual_seed(self.given)
            self._place = index + 1
            yield torch.randn(6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (6,), generator=draw)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self._first = state["given"], state["place"]


class CutError(Exception):
    """Ends a run."""


def task_with(
    fused: hf.FusedModule, optimizer: FusedOptimizer, settings: Way, index: int, *, evaluated: bool, **more: Any
) -> hf.Task:
    """Task ``t0``, ``t1``, ... of an optimizer that exists, so that its state can be looked at."""
    task_settings = Way(lambda params: optimizer, settings.clip, settings.accumulate)
    return task(
        fused, task_settings, shuffled(index), f"t{index}", eval_loader=shuffled(9) if evaluated else None, **more
    )


def planned_as(tasks: Sequence[hf.Task], on: hf.Machine, modes: Sequence[str]) -> Plan:
    """As `tests.trained.planned`, each task resident, or in four shards, spilled or with the last of them kept."""
    counts = [1 if mode == "resident" else 4 for mode in modes]
    return planned(tasks, on, counts, [mode == "resident" for mode in modes], [mode == "kept" for mode in modes])


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def results(report: Any, hf_task: hf.Task) -> list[Any]:
    """The losses, the members and the optimizer's state."""
    make, models = hf_task.optimizer, hf_task.models
    assert callable(make)
    assert isinstance(models, hf.FusedModule)
    # The function returns the same optimizer each time.
    optimizer = make(list(models.parameters()))
    state = [entry[key] for entry in optimizer.state.values() for key in sorted(entry)]
    losses = [report.losses] if report.eval_losses is None else [report.losses, report.eval_losses]
    return [tensor.clone() for tensor in (*losses, *models.state_dict().values(), *state)]


def run(root: Path | None, kill: int | None) -> list[Any]:
    """A short run; the process is killed at a minibatch."""

    def killed(heard: Any) -> None:
        if isinstance(heard, hf.Step) and heard.epoch * 5 + heard.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    module = array(3)
    optimizer = adamw(list(module.parameters()))
    hf_task = task(module, Way(lambda params: optimizer), shuffled(4), callbacks=[killed], eval_loader=shuffled(5))
    report = hf.train(hf_task, machine(), checkpoint=root, every=1)
    return results(report["task"], hf_task)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), int(sys.argv[2]))
