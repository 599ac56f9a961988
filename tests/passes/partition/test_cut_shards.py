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
from hfusion.passes.cost.cost import Line, operators
from hfusion.passes.partition.cut_shards import cut, sharding, tightest
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


def test_bad_arguments() -> None:
    program = program_of(mlp, torch.randn(2, 12))
    with pytest.raises(PlanError, match="batch is 0"):
        shards(program, 0, HUGE, RATES)
    with pytest.raises(PlanError, match="optimizer_state -1"):
        shards(program, 2, HUGE, RATES, optimizer_state=-1)
