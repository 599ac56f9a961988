"""Shards: the cut is the best there is, every shard fits, costs come from the shapes."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.core.program import Program
from hfusion.device.calibrate import Rates
from hfusion.passes.cost.cost import Line, OperatorCost, Weight, line, operators
from hfusion.passes.partition.cut_shards import _between, cut, sharding, tightest
from hfusion.passes.partition.segments import Segments
from hfusion.schedule.plan import Shard, TaskPlan
from tests.lines import crossing, lines, need

RATES = Rates(flops=1e9, memory=1e9, load=1e9, evict=1e9, read=1e9, write=1e9, calls=1e6)
HUGE = 2**50


def shards(program: Program, batch: int, budget: int, rates: Rates, optimizer_state: float = 2) -> tuple[Shard, ...]:
    return sharding(program, batch, budget, rates, optimizer_state).shards


def brute(plain: Line, budget: int, state: float) -> tuple[tuple[int, int] | None, int]:
    """(bytes at the cuts, number of shards) of the best cut, and the smallest budget, of all ways to cut."""
    count = len(plain.steps)
    best, smallest = None, None
    for number in range(count):
        for cuts in combinations(range(1, count), number):
            largest = max(need(plain, a, b, state) for a, b in pairwise((0, *cuts, count)))
            smallest = largest if smallest is None else min(smallest, largest)
            score = (sum(crossing(plain, index) for index in cuts), number + 1)
            if largest <= budget and (best is None or score < best):
                best = score
    assert smallest is not None
    return best, smallest


@given(lines(), st.integers(0, 150), st.sampled_from([0, 1, 2, 0.5]))
def test_the_cut_is_the_best_of_all(plain: Line, budget: int, state: float) -> None:
    segments = Segments(plain, state)
    best, smallest = brute(plain, budget, state)
    cuts = cut(segments, budget)
    assert (cuts is None) == (best is None)
    if cuts is not None:
        assert (sum(crossing(plain, index) for index in cuts), len(cuts) + 1) == best
        assert all(need(plain, a, b, state) <= budget for a, b in pairwise((0, *cuts, len(plain.steps))))
    least, first, last = tightest(segments)
    assert least == smallest == need(plain, first, last, state)
    assert cut(segments, least) is not None
    assert cut(segments, least - 1) is None


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)) + x)


class Layer(nn.Module):
    """Attention and a feed-forward part, each with a skip."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    """The embedding is also the output's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 8)
        self.layers = nn.Sequential(*[Layer(8) for _ in range(3)])

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.embedding(tokens)) @ self.embedding.weight.T


def mlp() -> nn.Module:
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(12, 12), nn.ReLU())], nn.Linear(12, 3))


def cnn() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *[Block(4) for _ in range(4)], nn.Flatten(), nn.Linear(144, 3))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (mlp, lambda n: torch.randn(n, 12)),
    "cnn": (cnn, lambda n: torch.randn(n, 2, 6, 6)),
    "transformer": (Language, lambda n: torch.randint(0, 13, (n, 5))),
}


def program_of(make: Callable[[], nn.Module], x: Any, members: int = 3) -> Program:
    fused = hf.fuse([make() for _ in range(members)], verify=False)
    fused(x)
    return fused.report().parts[0].program


def spilled(cut_shards: tuple[Shard, ...]) -> int:
    return TaskPlan("t", cut_shards, 1, resident=False).device_bytes


def smallest_budget(program: Program, batch: int) -> int:
    with pytest.raises(PlanError) as caught:
        shards(program, batch, 1, RATES)
    match = re.search(r"would do is ([\d,]+) bytes", str(caught.value))
    assert match is not None
    return int(match[1].replace(",", ""))


@pytest.mark.parametrize("name", MODELS)
def test_shards_of_a_program(name: str) -> None:
    make, data = MODELS[name]
    program = program_of(make, data(4))
    (whole,) = shards(program, 16, HUGE, RATES)
    least, most = smallest_budget(program, 16), spilled((whole,))
    counts, alive = [], []
    for budget in (most, (most + least) // 2, (most + 3 * least) // 4, least):
        cut_shards = shards(program, 16, budget, RATES)
        assert spilled(cut_shards) <= budget
        assert [shard.first for shard in cut_shards] == [0, *(shard.last for shard in cut_shards[:-1])]
        assert cut_shards[-1].last == len(operators(program))
        assert sum(shard.forward for shard in cut_shards) == pytest.approx(whole.forward)
        assert sum(shard.backward for shard in cut_shards) == pytest.approx(whole.backward)
        counts.append(len(cut_shards))
        alive.append(sum(shard.boundary for shard in cut_shards))
    assert counts == sorted(counts)
    assert alive == sorted(alive)
    assert counts[0] == 1
    assert counts[-1] > 3


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_of_the_array(name: str) -> None:
    make, data = MODELS[name]
    fused = hf.fuse([make() for _ in range(3)], verify=False)
    fused(data(4))
    (whole,) = shards(fused.report().parts[0].program, 16, HUGE, RATES, optimizer_state=1)
    parameters = sum(p.nbytes for p in fused.parameters())
    assert whole.weights == parameters + sum(b.nbytes for b in fused.buffers())
    assert whole.gradients == whole.optimizer == parameters


def test_a_frozen_base_costs_once_and_gets_no_gradient() -> None:
    base = nn.Linear(12, 12).requires_grad_(False)
    program = program_of(lambda: nn.Sequential(base, nn.Linear(12, 3)), torch.randn(4, 12))
    (whole,) = shards(program, 4, HUGE, RATES)
    trained = 3 * 4 * (12 * 3 + 3)
    assert (whole.weights, whole.gradients, whole.optimizer) == (4 * (12 * 12 + 12) + trained, trained, 2 * trained)


def test_frozen_are_the_parameters_that_are_not_trained_in_each_shard_that_uses_them() -> None:
    base = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 6)).requires_grad_(False)
    program = program_of(lambda: nn.Sequential(base, nn.BatchNorm1d(6), nn.Linear(6, 3)), torch.randn(4, 12))
    frozen = 4 * sum(p.numel() for p in base.parameters())
    (whole,) = shards(program, 4, HUGE, RATES)
    assert whole.frozen == frozen
    cut_shards = shards(program, 4, smallest_budget(program, 4), RATES)
    assert len(cut_shards) > 1
    assert sum(shard.frozen for shard in cut_shards) == frozen
    twice = Line(
        (OperatorCost("a"), OperatorCost("b"), OperatorCost("c")),
        (),
        (Weight(7, (0, 2), trained=False, written=False),),
    )
    cut_there = _between(Segments(twice, 2), [1, 2], RATES)
    assert [shard.frozen for shard in cut_there] == [7, 0, 7]
    assert [shard.borrows for shard in cut_there] == [(), (), (0,)]


class Sequence(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.LSTM(8, 16, num_layers=2, batch_first=True), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layers(x)[0])


def mixed() -> nn.Module:
    """Functions that keep their operand, their result, a mask, indices."""
    norm = (nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.1))
    return nn.Sequential(*norm, nn.Linear(16, 16), nn.Tanh(), nn.MaxPool1d(2), nn.Linear(8, 4), nn.Softmax(-1))


KEEPING = MODELS | {"lstm": (Sequence, lambda n: torch.randn(n, 9, 8)), "mixed": (mixed, lambda n: torch.randn(n, 8))}


@pytest.mark.parametrize("name", KEEPING)
def test_activations_are_what_autograd_saves(name: str) -> None:
    """Against what torch really keeps, storages counted once; the estimate may be above, not much below."""
    make, data = KEEPING[name]
    fused = hf.fuse([make() for _ in range(3)], verify=False)
    fused(data(4))
    array_storages = {t.untyped_storage().data_ptr() for t in (*fused.parameters(), *fused.buffers())}
    saved_bytes: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in array_storages:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = fused(data(32))
    (program,) = (part.program for part in fused.report().parts)
    (whole,) = shards(program, 32, HUGE, RATES)
    assert result.requires_grad
    assert 0.9 * sum(saved_bytes.values()) <= whole.activations <= 1.2 * sum(saved_bytes.values())


def work(program: Program, batch: int) -> list[int]:
    """FLOPs of the operators that count them: on an accelerator, whose memory and calls take no time."""
    rates = Rates(flops=1.0, memory=1e30, load=1.0, evict=1.0, read=1.0, write=1.0, calls=1e30, device="cuda")
    return [round(step.forward) for step in line(program, batch, rates).steps if step.forward >= 1]


@pytest.mark.parametrize(
    ("make", "shape", "flops"),
    [
        (lambda: nn.Linear(5, 7), (4, 5), 2 * 10 * 5 * 7),
        (lambda: nn.Linear(5, 7), (4, 3, 5), 2 * 10 * 3 * 5 * 7),
        (lambda: nn.Conv2d(2, 6, 3, stride=2), (4, 2, 9, 9), 2 * 10 * 6 * 4 * 4 * 2 * 9),
        (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 4, 5, 5), 2 * 10 * 6 * 3 * 3 * 2 * 9),
        (lambda: nn.ConvTranspose1d(3, 5, 4, stride=2), (4, 3, 8), 2 * 10 * 3 * 8 * 5 * 4),
        (lambda: nn.Bilinear(2, 3, 4), None, 2 * 10 * 4 * 2 * 3),
    ],
)
def test_flops(make: Callable[[], nn.Module], shape: tuple[int, ...] | None, flops: int) -> None:
    fused = hf.fuse([make() for _ in range(3)], verify=False)
    if shape is None:
        fused(torch.randn(4, 2), torch.randn(4, 3))
    else:
        fused(torch.randn(shape))
    assert work(fused.report().parts[0].program, 10) == [3 * flops]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        q = x * self.scale
        return torch.einsum("bhtd,de->bhte", F.scaled_dot_product_attention(q, x, x), x[0, 0].T @ x[0, 0])


def test_flops_of_attention_and_einsum() -> None:
    program = program_of(Attention, torch.randn(4, 2, 7, 6), members=2)
    attention = 2 * 10 * 2 * 7 * 7 * (6 + 6)
    square = 2 * 6 * 6 * 7
    einsum = 2 * 10 * 2 * 7 * 6 * 6
    assert sorted(work(program, 10)) == sorted([2 * attention, square, 2 * einsum])


def test_an_infeasible_budget_names_the_node_and_the_smallest_budget() -> None:
    program = program_of(lambda: nn.Sequential(nn.Linear(4, 400), nn.ReLU(), nn.Linear(400, 4)), torch.randn(2, 4))
    with pytest.raises(PlanError) as caught:
        shards(program, 2, 1000, RATES)
    text = str(caught.value)
    assert re.search(r"program Sequential: no cut into shards fits 1,000 bytes; the smallest budget", text)
    assert re.search(r"which node linear_shared_input\w* \(linear at \S+\.py:\d+\) needs: weights \d\d,\d+", text)
    least = smallest_budget(program, 2)
    assert spilled(shards(program, 2, least, RATES)) == least
    with pytest.raises(PlanError, match="smallest budget"):
        shards(program, 2, least - 1, RATES)


def test_a_program_without_operators() -> None:
    program = program_of(nn.Identity, hf.stacked(torch.randn(3, 2, 4)))
    with pytest.raises(PlanError, match="holds no operator"):
        shards(program, 2, 1000, RATES)


def test_bad_arguments() -> None:
    program = program_of(mlp, torch.randn(2, 12))
    with pytest.raises(PlanError, match="batch is 0"):
        shards(program, 0, HUGE, RATES)
    with pytest.raises(PlanError, match="optimizer_state -1"):
        shards(program, 2, HUGE, RATES, optimizer_state=-1)


def test_more_samples_need_more_but_no_more_weights() -> None:
    program = program_of(cnn, torch.randn(4, 2, 6, 6))
    (few,), (many,) = (shards(program, batch, HUGE, RATES) for batch in (8, 24))
    assert (few.weights, few.gradients, few.optimizer) == (many.weights, many.gradients, many.optimizer)
    assert many.activations == 3 * few.activations
    assert many.forward > few.forward


def test_a_tied_embedding_lies_in_the_first_and_the_last_shard() -> None:
    program = program_of(Language, torch.randint(0, 13, (4, 5)))
    (whole,) = shards(program, 16, HUGE, RATES)
    cut_shards = shards(program, 16, smallest_budget(program, 16), RATES)
    embedding = 3 * 4 * 13 * 8
    assert min(cut_shards[0].weights, cut_shards[0].gradients) >= embedding
    assert any(
        min(shard.weights, shard.gradients) >= embedding for shard in cut_shards[1:] if shard.last > whole.last - 4
    )
    assert sum(shard.weights for shard in cut_shards) >= whole.weights + embedding


def test_the_optimizer_step_takes_the_time_of_its_traffic() -> None:
    program = program_of(lambda: nn.Linear(5, 7), torch.randn(4, 5))
    trained = 3 * 4 * (5 * 7 + 7)
    for state in (0, 2):
        (whole,) = shards(program, 4, HUGE, RATES, optimizer_state=state)
        assert whole.step == pytest.approx((3 + 2 * state) * trained / RATES.memory)


class Twice(nn.Module):
    """One value goes two ways, a weight is used twice, and there is a view."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.tied = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z = self.tied(torch.tanh(y).unflatten(1, (2, 2)).flatten(1))
        return self.tied(y) + z


def test_gradients_that_are_summed_are_alive_twice() -> None:
    program = program_of(Twice, torch.randn(5, 4), members=1)
    costs = [(node.meta["origin"].target, step) for node, step in zip(*costed(program, 5), strict=True)]
    value, weight = 5 * 4 * 4, 4 * 4 * 4
    sizes = {str(target).split(".")[1]: step.summed for target, step in costs}
    assert sizes.pop("tanh") == value
    assert [step.summed for target, step in costs if "linear" in str(target)] == [0, weight, weight]
    assert not any(sizes[name] for name in sizes if name != "linear")


def costed(program: Program, batch: int) -> tuple[tuple[Any, ...], tuple[OperatorCost, ...]]:
    return operators(program), line(program, batch, RATES).steps
