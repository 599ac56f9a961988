"""Earlier training with a loss leaves later results unchanged to the bit, and saves captures."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.array import function_program_cache

SOURCE = """
def loss(outputs, target, scale=scale):
    "Number {number}."
    losses = F.cross_entropy(outputs, target, reduction="none")
    return (losses * torch.linspace(0.5, 1.5, len(target))).mean() * scale
"""
COUNT = iter(range(1000))

Loss = Callable[[Tensor, Tensor], Tensor]
Batches = Sequence[tuple[Tensor, Tensor]]


def new_loss() -> Callable[[float], Loss]:
    """A function that makes losses whose code no other loss has, so that the process has not met it."""
    code = compile(SOURCE.format(number=next(COUNT)), "<loss>", "exec")

    def make(scale: float = 1.0) -> Loss:
        names: dict[str, Any] = {"F": nn.functional, "torch": torch, "scale": scale}
        exec(code, names)
        loss: Loss = names["loss"]
        return loss

    return make


def batches(sizes: Sequence[int]) -> Batches:
    generator = torch.Generator().manual_seed(0)
    draw = [torch.randn(size, 5, generator=generator) for size in sizes]
    return [(x, torch.randint(3, (len(x),), generator=generator)) for x in draw]


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3)) for _ in range(3)]


def _loop(loss_of: Callable[..., Tensor], sizes: Sequence[int]) -> Iterator[Tensor]:
    fused = hf.fuse(models())
    optimizer = hf.optim.Adam(fused.parameters(), lr=0.1)
    for x, target in batches(sizes):
        losses = loss_of(fused(x), target)
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
        yield losses.detach()
    yield from fused.parameters()


def kept_in_a_variable(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    losses = hf.per_model(make())
    return lambda sizes: _loop(losses, sizes)


def made_at_each_call(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    return lambda sizes: _loop(lambda y, target: hf.per_model(make())(y, target), sizes)


def of_many_scales(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    """More scales than one run may have before its loss runs in a loop over members."""
    scales = iter([*(2.0 + k for k in range(18)), 1.0])
    return lambda sizes: _loop(hf.per_model(make(1.0 if sizes == OURS else next(scales))), sizes[:2])


def of_plain_tensors(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    def run(sizes: Sequence[int]) -> Iterator[Tensor]:
        for x, target in batches(sizes):
            outputs = (x[None, :, :3] * torch.linspace(0.1, 1, 4)[:, None, None]).requires_grad_()
            losses = hf.per_model(make())(outputs, target)
            yield from (losses.detach(), *torch.autograd.grad(losses.sum(), outputs))

    return run


def by_train_step(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    def run(sizes: Sequence[int]) -> Iterator[Tensor]:
        fused = hf.fuse(models())
        step = hf.train_step(fused, make(), hf.optim.Adam(fused.parameters(), lr=0.1), compile=False)
        yield from [step(x, target) for x, target in batches(sizes)]
        yield from fused.parameters()

    return run


def beside_an_array(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    """Of plain tensors, while the array that was called last still exists."""
    other = hf.fuse(models())
    hf.per_model(make())(other(torch.randn(6, 5)), torch.zeros(6, dtype=torch.int64))

    def run(sizes: Sequence[int]) -> Iterator[Tensor]:
        yield from of_plain_tensors(make)(sizes)
        assert len(other) == 3

    return run


def by_population(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    def run(sizes: Sequence[int]) -> Iterator[Tensor]:
        pop = hf.Population(models(), optimizer=lambda p: hf.optim.Adam(p, lr=0.1), loss=make(), compile=False)
        for index, (x, target) in enumerate(batches(sizes)):
            yield pop.step(x, target)
            if index == 1:
                pop.stop([1])
                pop.compact()
        yield from pop.fused.parameters()

    return run


def by_train(make: Callable[..., Loss]) -> Callable[[Sequence[int]], Iterator[Tensor]]:
    def run(sizes: Sequence[int]) -> Iterator[Tensor]:
        trained = models()
        task = hf.Task(
            trained, make(), lambda p: hf.optim.Adam(p, lr=0.1), sorted(batches(sizes), key=lambda b: -len(b[1]))
        )
        hf.train(task, hf.Machine([hf.Device("cpu:0", memory="64MiB")]), progress=False)
        yield from (parameter.detach() for model in trained for parameter in model.parameters())

    return run


RUNS = [
    kept_in_a_variable,
    made_at_each_call,
    of_many_scales,
    of_plain_tensors,
    beside_an_array,
    by_train_step,
    by_population,
    by_train,
]
OURS = (32, 20, 7, 20)
OTHERS = dict.fromkeys(RUNS, ((64, 5), (20, 3))) | {of_many_scales: ((5,),) * 18}


@pytest.mark.parametrize("train", RUNS)
def test_earlier_training_changes_no_bit(train: Any) -> None:
    """Other sizes before, for which programs were made that would serve these, and after which a loss would loop."""
    expected = [tensor.clone() for tensor in train(new_loss())(OURS)]
    run = train(new_loss())
    for sizes in OTHERS[train]:
        list(run(sizes))
    for actual, expected_tensor in zip(run(OURS), expected, strict=True):
        assert torch.equal(actual.nan_to_num(), expected_tensor.nan_to_num())


def test_arrays_share_programs_for_the_same_sizes() -> None:
    """One that is like another captures nothing again."""
    make, programs = new_loss(), set()
    for _ in range(3):
        losses = hf.per_model(make())
        list(_loop(losses, OURS[:2]))
        programs |= set(losses.programs)
    assert len(programs) == 2


def test_calls_for_no_array_of_many_sizes_share_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(function_program_cache, "MAX_VARIANTS", 2)
    monkeypatch.setattr(function_program_cache, "_of_many_variants", function_program_cache.FunctionPrograms())
    make, programs = new_loss(), set()
    for size in range(2, 9):
        losses = hf.per_model(make())
        losses(torch.randn(2, size, 3), torch.zeros(size, dtype=torch.int64))
        programs |= set(losses.programs)
    # Two closed ones, and of those that are shared one closed, one open.
    assert len(programs) == 4


def test_a_function_that_is_called_with_many_sizes_leaves_them_open() -> None:
    losses = hf.per_model(new_loss()())
    for size in range(2, 9):
        losses(torch.randn(2, size, 3), torch.zeros(size, dtype=torch.int64))
    assert len(losses.programs) == 2
