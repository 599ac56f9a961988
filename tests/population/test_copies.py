"""Copies of populations, and saves while other threads or processes train or save."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.checkpoint.files import saves


def test_a_save_is_of_one_step_whoever_trains_meanwhile(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda params: hf.optim.SGD(params, lr=0.1, momentum=0.5),
        "loss": F.mse_loss,
        "compile": False,
    }

    def make() -> nn.Module:
        return nn.Linear(64, 64, bias=False)

    pop, over, errors = hf.Population([make() for _ in range(4)], **options), threading.Event(), list[BaseException]()

    def save() -> None:
        try:
            while not over.is_set():
                pop.save(tmp_path, keep=1000)
        except BaseException as error:
            errors.append(error)

    def state(source: hf.Population) -> list[torch.Tensor]:
        entry = source.optimizer.state[source.fused.weight]
        return [source.fused.weight.detach().clone(), *(entry[key].clone() for key in sorted(entry))]

    x, y = torch.randn(8, 64), torch.randn(8, 64)
    pop.step(x, y)
    (thread := threading.Thread(target=save)).start()
    states = {}
    while len(saves(tmp_path)) < 6 and pop.steps < 10000:
        states[pop.steps] = state(pop)
        pop.step(x, y)
    over.set()
    thread.join()
    assert not errors
    paths = saves(tmp_path)
    assert len(paths) >= 6
    for path in paths[:6]:
        loaded = hf.Population.load(path, make, **options)
        if loaded.steps in states:
            assert all(torch.equal(a, b) for a, b in zip(state(loaded), states[loaded.steps], strict=True))
