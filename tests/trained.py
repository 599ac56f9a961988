"""The oracle of the runtime: training in shards on devices equals the plain loop over the same array, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.calibrate import Rates
from hfusion.optim.base import FusedOptimizer
from hfusion.passes.cost.cost import operators, symbol_sizes
from hfusion.passes.partition.cut_shards import shards_at
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import Policy
from hfusion.tasks.arrange import arrange
from hfusion.tasks.train import Report

RATES = Rates(flops=1e9, memory=1e9, load=1e9, evict=1e9, read=1e9, write=1e9, calls=1e6)
SEED = 7
MEMBERS = 3
RATE = [0.1, 0.03, 0.01]
BATCHES = 5
EPOCHS = 2

Factory = Callable[[list[nn.Parameter]], FusedOptimizer]


class Knotted(nn.Module):
    """Dropout, BatchNorm, a weight that is used three times, skip connections over several cuts, a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 8)
        self.third.weight = self.second.weight
        self.drop = nn.Dropout(0.3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm(self.first(x)))
        y = self.drop(self.second(h)) + x[:, :1]
        z = self.third(self.drop(y) * h) + h
        a, b = self.frozen(z).chunk(2, 1)
        w = z + F.linear(torch.cat([b, a], 1).T.T, self.second.weight.T)
        return self.out(torch.tanh(self.norm(self.third(w)) + y))


class Dropping(nn.Module):
    """Draws as often as it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.dropout(self.first(x), 0.3, self.training))


def wide(size: int) -> nn.Module:
    """Return a model large enough for rounding of sizes to play no part."""
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(size, size), nn.GELU())), nn.Linear(size, 3))


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


def momentum(params: list[nn.Parameter]) -> FusedOptimizer:
    return hf.optim.SGD(params, lr=RATE, momentum=0.9, weight_decay=[0.0, 0.01, 0.0])


def adamw(params: list[nn.Parameter]) -> FusedOptimizer:
    return hf.optim.AdamW(params, lr=RATE)


@dataclass(frozen=True)
class Way:
    """How a task is trained, apart from where."""

    optimizer: Factory = adamw
    clip: Any = None
    accumulate: int = 1


def batches(dtype: torch.dtype, count: int = BATCHES) -> list[tuple[Tensor, Tensor]]:
    """Minibatches for `Knotted`; the last is smaller."""
    generator = torch.Generator().manual_seed(1)
    sizes = [6] * (count - 1) + [4]
    draw = torch.float64
    return [
        (torch.randn(n, 6, generator=generator, dtype=draw).to(dtype), torch.randint(3, (n,), generator=generator))
        for n in sizes
    ]


def fused(make: Callable[[], nn.Module] = Knotted, dtype: torch.dtype = torch.float64) -> hf.FusedModule:
    return hf.fuse([make().to(dtype) for _ in range(MEMBERS)], verify=False)


def plain(
    array: hf.FusedModule,
    way: Way,
    loader: Sequence[tuple[Any, Any]],
    loss: Callable[..., Any] = cross_entropy,
    after_epoch: Callable[[Callable[..., Tensor]], None] = lambda each: None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loop that people write; gives losses ``[steps, B]`` and the state after it, and puts the state back."""
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    optimizer = way.optimizer(list(array.parameters()))
    each = hf.per_model(loss)
    torch.manual_seed(SEED)
    losses = []
    for _ in range(EPOCHS):
        for index, (inputs, target) in enumerate(loader, start=1):
            row = each(array(*inputs) if isinstance(inputs, tuple) else array(inputs), target)
            losses.append(row.detach())
            total = row.sum()
            (total / way.accumulate if way.accumulate > 1 else total).backward()
            if index % way.accumulate == 0 or index == len(loader):
                if way.clip is not None:
                    hf.optim.clip_grad_norm_(array.parameters(), way.clip)
                optimizer.step()
                optimizer.zero_grad()
        after_epoch(each)
    after = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    array.load_state_dict(before)
    return torch.stack(losses), after


def task(
    array: hf.FusedModule, way: Way, loader: Sequence[tuple[Any, Any]], name: str = "task", **more: Any
) -> hf.Task:
    options = {"loss": cross_entropy, "epochs": EPOCHS, "seed": SEED} | more
    return hf.Task(
        array,
        optimizer=way.optimizer,
        loader=loader,
        name=name,
        clip_norm=way.clip,
        accumulate=way.accumulate,
        **options,
    )


def machine(devices: int = 1, memory: str = "1GiB", **more: Any) -> hf.Machine:
    return hf.Machine([hf.Device(f"cpu:{index}", memory=memory) for index in range(devices)], **more)


def planned(
    tasks: Sequence[hf.Task],
    on: hf.Machine,
    counts: Sequence[int],
    resident: Sequence[bool],
    kept: Sequence[bool] | None = None,
) -> Plan:
    """The plan of ``tasks`` with their programs cut evenly into ``counts`` shards, on devices with not a byte more.

    A resident one is not cut.
    """
    arrangements, made = arrange(tasks, on)
    found = []
    keeps = [False] * len(tasks) if kept is None else kept
    for one, plan, count, stays, keep in zip(arrangements, made.tasks, counts, resident, keeps, strict=True):
        minibatch = one.minibatch()
        program = one.array.compiled(minibatch.arguments).program
        total = len(operators(program))
        cuts = sorted({total * place // count for place in range(1, 1 if stays else count)} - {0})
        sizes = symbol_sizes(program, minibatch.shapes)
        shards = shards_at(program, cuts, sizes, RATES, one.optimizer.state_stacks)
        found.append(replace(plan, shards=shards, resident=stays, keeps_last_shard=keep))
    need = max(plan.device_bytes for plan in found)
    return Plan(tuple(found), dict.fromkeys(made.devices, need), 1e9, 1e9)


def assert_same(
    arrays: Sequence[hf.FusedModule],
    tasks: Sequence[hf.Task],
    expected: Sequence[tuple[Tensor, dict[str, Tensor]]],
    on: hf.Machine,
    plan: Plan,
    policy: str | Policy = "sharded-lrtf",
) -> Report:
    """Train by ``plan`` and compare every bit; the timeline is valid and no budget exceeded. The state is put back."""
    before = [{name: tensor.clone() for name, tensor in array.state_dict().items()} for array in arrays]
    report = hf.train(tasks, on, policy, plan=plan)
    report.timeline.validate(plan)
    for name, peak in report.peak.items():
        assert report.timeline.peak[name] <= peak <= plan.devices[name]
    for array, one, (losses, after), start in zip(arrays, tasks, expected, before, strict=True):
        assert torch.equal(report[one.name].losses, losses)
        for name, tensor in array.state_dict().items():
            assert torch.equal(tensor, after[name]), name
            assert tensor.is_contiguous(), name
        array.load_state_dict(start)
    return report
