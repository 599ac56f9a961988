"""Plain members in forks of this process: the same bits as in this process alone, whatever is changed meanwhile."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.forked_process import why_no_fork
from hfusion.population import spread_members

FACTOR = 1.0
STEPS = 6


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Processes start at the second step, and stay, however slow they are."""
    if why_no_fork(torch.device("cpu")):
        pytest.skip("processes cannot be forked here")
    monkeypatch.setattr(spread_members, "start_seconds", lambda: 0.0)
    monkeypatch.setattr(spread_members, "_STEPS", 1000)
    yield
    gc.collect()
    assert not multiprocessing.active_children()


class Dense(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3)
        self.p, self.unused = 0.2, nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        y = F.dropout(F.relu(self.norm(self.first(x))), self.p, self.training)
        output: Tensor = self.last(y) * FACTOR
        return output


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(4, width, dropout=0.1, num_layers=2), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        states = []
        for sample in self.lstm(x[None])[0]:
            states.append(self.last(sample))
        return torch.cat(states)


class Tied(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.mix, self.out = nn.Linear(4, width), nn.Linear(width, width), nn.Linear(width, 3)
        self.again = self.mix
        self.mix.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.again(self.mix(self.embed(x))).tanh())
        return y


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [Dense(5), Dense(7), Recurrent(3), Tied(4), Tied(6), Dense(6)]


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target) * SCALES["loss"]


SCALES = {"loss": 1.0}


def population(processes: int, members: list[nn.Module] | None = None, **options: Any) -> hf.Population:
    make = lambda p: hf.optim.AdamW(p, lr=0.01)  # noqa: E731
    options = {"loss": cross_entropy, "optimizer": make, "clip_norm": 0.5, **options}
    return hf.Population(models() if members is None else members, processes=processes, **options)


def batch(step: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=draws), torch.randint(3, (8,), generator=draws)


def forks(pop: hf.Population) -> Any:
    return pop._spread._forks


def lived(processes: int, change: Callable[[hf.Population, int], None], **options: Any) -> tuple[hf.Population, Any]:
    """A population after some steps, before each of which it was changed, and all that can be seen of it."""
    pop = population(processes, **options)
    torch.manual_seed(1)
    losses, held = [], []
    for step in range(STEPS):
        change(pop, step)
        losses.append(pop.step(*batch(step)))
        held += [None if model is None else [p.grad for p in model.parameters()] for model in pop.models]
    states = [None if model is None else model.state_dict() for model in pop.models]
    return pop, (losses, states, held, pop.ages, torch.rand(2))


def same(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def nothing(pop: hf.Population, step: int) -> None:
    pass


def at_third(change: Callable[[Any], object]) -> Callable[[hf.Population, int], None]:
    def changed(pop: hf.Population, step: int) -> None:
        if step == 3:
            change(pop)

    return changed


def of_models(change: Callable[[Any], object]) -> Callable[[hf.Population, int], None]:
    def each(pop: hf.Population) -> None:
        for model in pop.models:
            change(model)

    return at_third(each)


def halved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)


def replaced(model: Any) -> None:
    for layer in model.modules():
        if isinstance(layer, nn.Linear) and layer.weight.requires_grad:
            layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


def slower(pop: hf.Population) -> None:
    pop.hparams["lr"][:] = 0.001


def moved_about(pop: hf.Population) -> None:
    pop.copy(0, 1)
    pop.stop(4)
    pop.start(4, Dense(9))


def global_factor(pop: hf.Population, step: int) -> None:
    globals()["FACTOR"] = 1.0 + step // 3


def global_scale(pop: hf.Population, step: int) -> None:
    SCALES["loss"] = 1.0 + step // 3


CHANGES: dict[str, Callable[[hf.Population, int], None]] = {
    "nothing": nothing,
    "weights": of_models(halved),
    "data": of_models(lambda model: [setattr(p, "data", p.data * 0.5) for p in model.parameters()]),
    "parameters": of_models(replaced),
    "mode": of_models(lambda model: model.eval()),
    "attribute": of_models(lambda model: setattr(model, "p", 0.5)),
    "frozen": of_models(lambda model: next(model.parameters()).requires_grad_(False)),
    "hook": of_models(lambda model: model.register_forward_hook(lambda module, args, output: output * 2)),
    "gradient hook": of_models(lambda model: next(model.parameters()).register_hook(lambda grad: grad * 2)),
    "buffers": of_models(lambda model: [buffer.zero_() for buffer in model.buffers()]),
    "load": of_models(lambda model: model.load_state_dict({k: v * 0 + 1 for k, v in model.state_dict().items()})),
    "learning rate": at_third(slower),
    "members": at_third(moved_about),
    "global": global_factor,
    "loss": global_scale,
    "default dtype": at_third(lambda pop: pop.models[0].double().float()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_same_bits_as_in_one_process(change: str) -> None:
    try:
        alone, expected = lived(0, CHANGES[change])
        spread, actual = lived(3, CHANGES[change])
    finally:
        globals()["FACTOR"] = SCALES["loss"] = 1.0
    assert forks(alone) is None
    assert forks(spread) is not None
    same(actual, expected)


@pytest.mark.parametrize("options", [{"on_nonfinite": "raise"}, {"on_nonfinite": "ignore"}, {"accumulate": 2}])
def test_options(options: dict[str, Any]) -> None:
    _, expected = lived(0, nothing, **options)
    spread, actual = lived(3, nothing, **options)
    assert (forks(spread) is None) is ("accumulate" in options)
    same(actual, expected)


@pytest.mark.parametrize("mode", ["freeze", "raise"])
def test_a_member_that_becomes_nonfinite_keeps_its_buffers(mode: Any) -> None:
    results = []
    for processes in (0, 3):
        pop = population(processes, on_nonfinite=mode)
        for step in range(3):
            pop.step(*batch(step))
        [model] = [pop.models[1]]
        assert model is not None
        with torch.no_grad():
            model.get_parameter("last.weight").fill_(float("nan"))
        if mode == "raise":
            with pytest.raises(hf.NonFiniteError, match="member 1"):
                pop.step(*batch(3))
            pop.stop(1)
        results.append([pop.step(*batch(step)) for step in range(3, 6)])
        results[-1] += [model.state_dict(), *(None if m is None else m.state_dict() for m in pop.models)]
    same(*results)


def test_arguments() -> None:
    x, y = batch(0)
    wide = torch.randn(8, 9)
    cases: list[tuple[Any, Any]] = [
        (hf.stacked([x + k for k in range(6)]), hf.stacked([y.roll(k) for k in range(6)])),
        (wide[:, 2:6], y),
        (x[:1].expand(8, 4), y),
        (torch.randn(4, 8).t(), y),
        (x, y),
    ]
    results = []
    for processes in (0, 3):
        pop = population(processes, loss=F.cross_entropy)
        torch.manual_seed(1)
        pop.step(x, y)
        results.append([pop.step(*case) for case in cases])
        results[-1].append(pop.step(x, y, rows=[0, 2]))
        results[-1].append(pop.step(x, y, weights=torch.arange(1.0, 9)))
        results[-1].append(pop.step(x, y))
    same(*results)


def test_gradient_hooks_draw_as_in_one_process() -> None:
    results = []
    for processes in (0, 3):
        pop = population(processes)
        order: list[int] = []

        def hook(params: Any, grads: Any, order: list[int] = order) -> None:
            order.append(sum(param.numel() for param in params.values()))
            for grad in grads.values():
                grad.add_(torch.randn_like(grad))

        pop.register_gradient_hook(hook)
        torch.manual_seed(1)
        losses = [pop.step(*batch(step)) for step in range(4)]
        results.append([losses, order])
    assert forks(pop) is not None
    same(*results)


def test_a_process_that_is_killed() -> None:
    _, expected = lived(0, nothing)

    def kill(pop: hf.Population) -> None:
        for process in multiprocessing.active_children():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)

    _, actual = lived(3, at_third(kill))
    same(actual, expected)


class Failing(Dense):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if x.shape[0] == 5:
            raise RuntimeError("five samples")
        return y


def test_errors_are_those_of_the_member() -> None:
    torch.manual_seed(0)
    pop = population(3, [Failing(width) for width in (3, 4, 5, 6)])
    for step in range(3):
        pop.step(*batch(step))
    assert forks(pop) is not None
    x, y = batch(3)
    with pytest.raises(RuntimeError, match="five samples"):
        pop.step(x[:5], y[:5])
    assert forks(pop) is None
    # The buffers of the first one were written before it failed, as in plain torch; the others' were not.
    counts = [int(model.get_buffer("norm.num_batches_tracked")) for model in pop.models if model is not None]
    assert sorted(counts) == [3, 3, 3, 4]
    assert pop.ages.tolist() == [3] * 4
    pop.step(x, y)
    assert pop.ages.tolist() == [4] * 4


def test_processes_that_are_slower_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_members, "_STEPS", 2)
    pop = population(3)
    spread = pop._spread
    pop.step(*batch(0))
    for seconds in spread._walls.values():
        # As if steps had taken no time here.
        seconds.extend([0.0] * 9)
    for step in range(7):
        pop.step(*batch(step))
    assert spread._forks is None
    assert spread._processes_are_slower


class Threaded(Dense):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.get_num_threads()


def test_one_thread_each_here_and_there() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads, processes in ((1, 0), (2, 3)):
            torch.set_num_threads(threads)
            torch.manual_seed(0)
            pop = population(processes, [Threaded(width) for width in (3, 4, 5)])
            results.append([pop.step(*batch(step)) for step in range(4)])
            assert torch.get_num_threads() == threads
    finally:
        torch.set_num_threads(before)
    same(*results)


def test_large_members_keep_all_threads() -> None:
    pop = population(8, [Dense(3), Dense(4), Dense(5)])
    for step in range(4):
        pop.step(*batch(step))
    assert forks(pop) is None


@pytest.mark.parametrize("alike", [True, False])
def test_a_loaded_population_has_its_processes(alike: bool, tmp_path: Path) -> None:
    widths = [4, 4, 4] if alike else [3, 4, 5]
    population(2, [Dense(width) for width in widths]).save(tmp_path)
    pop = hf.Population.load(
        tmp_path,
        lambda tag: Dense(widths[int(tag[-1])]),
        optimizer=lambda p: hf.optim.AdamW(p),
        loss=cross_entropy,
        processes=0,
    )
    pop.start(None, Dense(7))
    for step in range(4):
        pop.step(*batch(step))
    assert forks(pop) is None


def test_processes_must_be_a_number() -> None:
    for wrong in (-1, 1.5, "two"):
        with pytest.raises(ValueError, match="processes="):
            population(wrong)  # type: ignore[arg-type]
