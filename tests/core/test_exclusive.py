"""Arrays in several threads: each trains as alone, and what else the process does goes on meanwhile."""

from __future__ import annotations

import copy
import io
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.exclusive import tracing
from tests.alone import normal
from tests.forwards.table import Sevenfold


class Branch(nn.Linear):
    """No graph can hold it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.sum() > 0 else 3)


def train(rounds: int) -> None:
    for _ in range(rounds):
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(2)]
        alone, fused = copy.deepcopy(models), hf.fuse(models)
        step = hf.train_step(
            fused, lambda out, y: F.mse_loss(out, y), hf.optim.SGD(fused.parameters(), 0.1), compile=False
        )
        x, y = normal(5, 4), normal(5, 1)
        for _ in range(2):
            losses = step(x, y)
            for loss, model in zip(losses, alone, strict=True):
                expected = F.mse_loss(model(x), y)
                torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=1e-11)
                grads = torch.autograd.grad(expected, list(model.parameters()))
                for parameter, grad in zip(model.parameters(), grads, strict=True):
                    parameter.data -= 0.1 * grad
        hf.fuse([Branch(4, 1).double(), Branch(4, 1).double()])(x)


def chatter(counts: dict[str, int]) -> None:
    x = torch.ones(2, requires_grad=True)
    print(".", end="")
    Sevenfold.apply(x).sum().backward()
    assert x.grad is not None
    assert (x.grad == 7).all()
    nn.Linear(2, 2)(x.detach())
    counts["rounds"] += 1


def repeated(run: Callable[[], None], stop: threading.Event, errors: list[BaseException]) -> None:
    try:
        while not stop.wait(0.005):
            run()
    except BaseException as error:
        errors.append(error)


def test_threads_that_capture_and_one_that_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[BaseException] = []
    stop, counts, out = threading.Event(), {"rounds": 0}, io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    before = torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr

    def guarded() -> None:
        try:
            train(2)
        except BaseException as error:
            errors.append(error)

    threads: list[Any] = [threading.Thread(target=guarded) for _ in range(2)]
    talker = threading.Thread(target=repeated, args=(lambda: chatter(counts), stop, errors))
    for thread in (talker, *threads):
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    talker.join()
    if errors:
        raise errors[0]
    assert (torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr) == before
    assert counts["rounds"] == out.getvalue().count(".") > 0


class Interrupted(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise KeyboardInterrupt


def test_an_interrupt_in_a_capture_frees_the_way() -> None:
    before = torch.autograd.Function.__dict__["apply"], list(warnings.filters)
    with pytest.raises(KeyboardInterrupt):
        hf.fuse([Interrupted(2, 2), Interrupted(2, 2)])(torch.ones(1, 2))
    assert (torch.autograd.Function.__dict__["apply"], list(warnings.filters)) == before
    acquired: list[bool] = []

    def take() -> None:
        with tracing:
            acquired.append(True)

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    thread.join(5)
    assert acquired == [True]
