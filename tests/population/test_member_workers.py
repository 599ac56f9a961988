"""Plain members in forked processes: the same bits as in one process, whatever is read or changed in between."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler

import hfusion as hf
from hfusion.device.worker_process import why_no_fork

STEPS = 9


@pytest.fixture(autouse=True)
def no_orphans() -> Iterator[None]:
    if reason := why_no_fork(torch.device("cpu")):
        pytest.skip(reason)
    # Of earlier tests.
    gc.collect()
    yield
    gc.collect()
    assert not multiprocessing.active_children()


class Dense(nn.Module):
    """Draws, writes buffers, and counts its calls in an attribute and in a list that its part holds, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.layers, self.calls, self.unused = [self.first, self.last], 0, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.layers[1](F.dropout(self.norm(self.layers[0](x)).relu(), 0.2, self.training))
        return y * (1 + 0.1 * (self.calls % 2))


class Changing(Dense):
    """Replaces buffers, one of them twice, and freezes and adds modules."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.mean: Tensor | None
        self.register_buffer("mean", None)
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.seen = x.detach()[: self.calls]
        if self.calls == 5:
            self.mean, self.act, self.norm.training = x.mean(0), nn.Tanh(), False
            self.kept = self.mean
            self.first.weight.requires_grad_(False)
        if self.mean is not None and self.kept is self.mean:
            y = self.act(y) * self.mean.mul_(0.9).sum()
        return y


class Failing(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[0] == 5:
            raise RuntimeError("five samples")
        return y


def population(processes: int, steps: int = 0, **options: Any) -> hf.Population:
    torch.manual_seed(0)
    members: list[nn.Module] = [Dense(5), Dense(7), Failing(3), nn.Linear(4, 3), Dense(6), Changing(8)]
    options = {"optimizer": lambda p: hf.optim.AdamW(p, lr=0.01), "clip_norm": 0.5, **options}
    pop = hf.Population(members, loss=F.cross_entropy, processes=processes, **options)
    torch.manual_seed(1)
    for step in range(steps):
        pop.step(*batch(step))
    return pop


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draws), torch.randint(3, (8,), generator=draws)


def lived(processes: int, change: Callable[[hf.Population], object], **options: Any) -> tuple[list[Any], list[str]]:
    """All that can be seen of a population after some steps, in the middle of which it was changed."""
    pop = population(processes, **options)
    losses = []
    for step in range(STEPS):
        if step == 5:
            assert bool(multiprocessing.active_children()) is (processes > 1 and options.get("on_nonfinite") != "raise")
            change(pop)
        losses.append(pop.step(*batch(step)))
    states = [None if model is None else model.state_dict() for model in pop.models]
    calls = [getattr(model, "calls", 0) for model in pop.models]
    numbers = [pop.hparams[name][:] for name in ("lr", "weight_decay")]
    return [losses, states, calls, numbers, pop.ages, pop.steps, torch.rand(2)], list(map(str, pop.lineage))


def halved(pop: hf.Population) -> None:
    with torch.no_grad():
        for model in pop.models:
            for parameter in [] if model is None else model.parameters():
                parameter.mul_(0.5)


def poisoned(pop: hf.Population) -> None:
    with torch.no_grad():
        assert pop.models[1] is not None
        pop.models[1].get_parameter("last.weight").fill_(float("nan"))


def slower(pop: hf.Population) -> None:
    rates = pop.hparams["lr"]
    for step in range(3):
        pop.step(*batch(step))
    rates[1:3] *= 0.1


def moved_about(pop: hf.Population) -> None:
    pop.copy(3, 1)
    pop.stop(4)
    pop.start(4, Dense(9))
    pop.start(None, Dense(10))


def stepped_otherwise(pop: hf.Population) -> None:
    x, y = batch(9)
    pop.step(x, y, rows=[0, 2])
    pop.step(x, y, weights=torch.arange(1.0, 9))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pop.step(x, y)


def stacked(pop: hf.Population) -> None:
    for step in range(4):
        x, y = batch(step)
        pop.step(hf.stacked([x + row for row in range(6)]), hf.stacked([y.roll(row) for row in range(6)]))


CHANGES: dict[str, tuple[Callable[[hf.Population], object], dict[str, Any]]] = {
    "nothing": (lambda pop: None, {}),
    "read": (lambda pop: pop.evaluate(F.cross_entropy, [batch(7)]), {}),
    "weights": (halved, {}),
    "eval mode": (lambda pop: [model.eval() for model in pop.models if model is not None], {}),
    "not finite": (poisoned, {}),
    "not finite is an error": (lambda pop: None, {"on_nonfinite": "raise"}),
    "hyper-parameters": (slower, {}),
    "members": (moved_about, {}),
    "rows, weights, autocast": (stepped_otherwise, {}),
    "stacked": (stacked, {}),
    "accumulate": (lambda pop: None, {"accumulate": [1, 2, 1, 3, 2, 1]}),
    "schedules": (
        lambda pop: pop.scheduler and pop.scheduler.step(),
        {"scheduler": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5)},
    ),
    "scaler": (lambda pop: None, {"scaler": hf.optim.GradScaler(init_scale=8.0, growth_interval=2)}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_same_bits_as_in_one_process(name: str) -> None:
    change, options = CHANGES[name]
    (actual, lineage), (expected, expected_lineage) = (lived(count, change, **options) for count in (3, 1))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)
    assert lineage == expected_lineage


def test_errors_are_those_of_the_member_and_others_have_stepped() -> None:
    pop = population(6, steps=4)
    x, y = batch(4)
    with pytest.raises(RuntimeError, match="five samples"):
        pop.step(x[:5], y[:5])
    assert pop.ages.tolist() == [5, 5, 4, 5, 5, 5]
    pop.step(x, y)
    assert pop.ages.tolist() == [6, 6, 5, 6, 6, 6]


def test_a_killed_process_is_an_error_at_every_later_use() -> None:
    pop = population(3, steps=4)
    [killed, _] = multiprocessing.active_children()
    assert killed.pid is not None
    os.kill(killed.pid, signal.SIGKILL)
    for use in (lambda: pop.step(*batch(4)), lambda: pop.models[0], lambda: pop.ages):
        with pytest.raises(hf.HFusionError, match="weights of its members are lost: load the last save"):
            use()


def test_a_process_that_cannot_be_forked_says_so() -> None:
    with ThreadPoolExecutor(1) as threads, pytest.warns(UserWarning, match="processes=3, .* not in the main thread"):
        threads.submit(population, 3, steps=4).result()
