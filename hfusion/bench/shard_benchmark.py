"""A step of arrays that do not fit their device (``shard``), by hf.train and by what one could do without it.

A budget of 1/4 is a quarter of what the array needs to be trained in one piece. All contenders of a case train the
same array from the same weights, and their losses are compared.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from rich.table import Table
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

import hfusion as hf
from hfusion.bench import harness, models
from hfusion.bench.cases import Contender, Disagreement, Unavailable, check_agreement, classified, tokens
from hfusion.bench.contenders import trained
from hfusion.bench.harness import Benchmark, Row
from hfusion.core.errors import PlanError
from hfusion.device.backend import backend

# Sums in another order than the array's; Adam divides by small gradients.
TOLERANCE = 1e-2


# Cases


@dataclass(frozen=True)
class ShardCase:
    """Some members, one batch, and the parts of the need that are tried as budgets: 4 means a quarter.

    Attributes:
        make_models: makes the members, always with the same weights.
        units: the modules of a model that FSDP gathers one at a time.
    """

    name: str
    about: str
    make_models: Callable[[], list[nn.Module]]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    units: Callable[[Any], Sequence[nn.Module]]
    parts: tuple[int, ...] = (1, 2, 4, 8)


def seeded(make_models: Callable[[], list[nn.Module]]) -> list[nn.Module]:
    """Return models whose random weights are the same at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make_models()


def adapters(members: int, width: int, layers: int, rank: int) -> list[nn.Module]:
    """Return members that are adapters of one base, which is the same object in all."""
    base = models.frozen(width, layers)
    return [models.lora(base, rank) for _ in range(members)]


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def mlps(name: str, about: str, width: int, batch: int, parts: tuple[int, ...] = (1, 2, 4, 8)) -> ShardCase:
    make = partial(seeded, lambda: [models.mlp(*[width] * 21) for _ in range(4)])
    return ShardCase(name, about, make, partial(classified, batch, width), linears, parts)


def transformers(name: str, about: str, width: int, batch: int, parts: tuple[int, ...] = (1, 2, 4, 8)) -> ShardCase:
    make = partial(models.TransformerLM, vocabulary=64, width=width, layers=6, heads=4, length=32)
    members = partial(seeded, lambda: [make() for _ in range(4)])
    return ShardCase(name, about, members, partial(tokens, batch, 32, 64), lambda model: [*model.blocks], parts)


def _lora(members: int, parts: tuple[int, ...] = (1, 2)) -> ShardCase:
    about = f"{members} adapters of rank 8 on one frozen base, 6 layers of 1024, batch 32"
    make = partial(seeded, partial(adapters, members, 1024, 6, 8))
    return ShardCase(f"lora x {members}", about, make, partial(classified, 32, 1024), lambda model: [*model], parts)


CASES = (
    mlps("mlp, batch 128", "4 MLPs of 20 layers of 256: more to compute than to move", 256, 128),
    mlps("mlp, batch 16", "the same with less to compute", 256, 16),
    transformers("transformer", "4 transformer LMs d=128, 6 layers, sequence 32, batch 4", 128, 4),
    mlps("large mlp", "4 MLPs of 20 layers of 512, batch 128", 512, 128, (1, 4, 8)),
    transformers("large transformer", "the transformer LMs with d=256, batch 8", 256, 8, (1, 8)),
    *map(_lora, (1, 4, 16)),
)
QUICK_CASES = (replace(CASES[0], parts=(1, 4)), _lora(1, parts=(2,)), _lora(4, parts=(2,)))


# Contenders


@dataclass(frozen=True)
class ShardSample:
    """One run: seconds of a steady step, and losses ``[steps, B]`` on the CPU.

    Attributes:
        peak: bytes that the plan or the executor accounts for, None if they are not counted.
        shards: 1 is resident.
    """

    seconds: float
    losses: Tensor
    peak: int | None = None
    shards: int | None = None


def warm(steps: int) -> int:
    """Return the number of warm-up steps among ``steps``, which are not counted.

    They prepare kernels, and for some ten steps the heap grows until it has room for every shard: a page that is
    touched for the first time can cost thirty times its copy.
    """
    return steps // 2


def steady(ends: Sequence[float]) -> float:
    """Return the median seconds between the ends of steps, without those that are `warm`."""
    return statistics.median(b - a for a, b in pairwise(ends[warm(len(ends)) - 1 :]))


@dataclass(frozen=True)
class ShardWorkload:
    """A case on a device: every run trains the one array from the same weights."""

    case: ShardCase
    steps: int
    device: torch.device

    @cached_property
    def models(self) -> list[nn.Module]:
        return self.case.make_models()

    @cached_property
    def array(self) -> hf.FusedModule:
        return hf.fuse(self.models)

    @cached_property
    def _first(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.array.state_dict().items()}

    @property
    def rates(self) -> list[float]:
        return [1e-4 * (1 + member) for member in range(len(self.models))]

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        return self.case.make_batch()

    @cached_property
    def need(self) -> int:
        """Bytes to train the array in one piece."""
        return hf.plan([self.task()], self.machine(1 << 62)).tasks[0].device_bytes

    def _on(self, device: torch.device) -> hf.FusedModule:
        """Return the array, there; it forgets its captured programs when it is moved."""
        return self.array if next(self.array.parameters()).device.type == device.type else self.array.to(device)

    def task(self) -> hf.Task:
        """Return the training of the array, from its first weights."""
        self._on(harness.CPU).load_state_dict(self._first)
        self.array.zero_grad()
        optimizer = hf.optim.Adam(trained(self.array), lr=self.rates)
        return hf.Task(self.array, F.cross_entropy, optimizer, [self.batch] * self.steps)

    def machine(self, budget: int) -> hf.Machine:
        return hf.Machine([hf.Device(str(self.device), memory=budget)])

    def run_loop(self, budget: int) -> ShardSample:
        """Train in a loop, with all in memory."""
        need = self.need
        self.task()
        array = self._on(self.device)
        optimizer = hf.optim.Adam(trained(array), lr=self.rates)
        loss_of = hf.per_model(F.cross_entropy)
        inputs, target = (tensor.to(self.device) for tensor in self.batch)

        def step() -> Tensor:
            optimizer.zero_grad()
            losses: Tensor = loss_of(array(inputs), target)
            losses.sum().backward()
            optimizer.step()
            return losses.detach()

        return replace(self._timed(step), peak=need, shards=1)

    def _timed(self, step: Callable[[], Tensor]) -> ShardSample:
        """Make all steps, which return the losses of the members."""
        ends, losses = [], []
        for _ in range(self.steps):
            row = step()
            backend(self.device).wait()
            ends.append(time.perf_counter())
            losses.append(row.cpu())
        return ShardSample(steady(ends), torch.stack(losses))

    def run_hfusion(self, budget: int) -> ShardSample:
        """Train by hf.train."""
        task, machine = self.task(), self.machine(budget)
        report = hf.train([task], machine)
        ends = [0.0] * self.steps
        for action in report.timeline.actions:
            if action.act.lane == "compute":
                ends[action.step] = max(ends[action.step], action.end)
        (peak,) = report.peak.values()
        shards = len(report.plan.tasks[0].shards)
        return ShardSample(steady(ends), report[task.name].losses, peak, shards)

    def run_fsdp(self, budget: int) -> ShardSample:
        """Train the members one after the other in FSDP2, parameters, gradients and optimizer on the host.

        https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; one process, so that nothing is sharded
        but all is offloaded. Raises Unavailable with torch's message if torch cannot run it.
        """
        if dist.is_initialized():
            raise Unavailable("a process group exists already")
        try:
            store = dist.HashStore()  # type: ignore[attr-defined]
            backend_name = dist.get_default_backend_for_device(self.device)
            dist.init_process_group(backend_name, store=store, rank=0, world_size=1)
            try:
                with warnings.catch_warnings():
                    # Views that models return may not be written to from outside, which no code here does.
                    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
                    return self._run_fsdp(CPUOffloadPolicy(pin_memory=backend(self.device).pins))
            finally:
                dist.destroy_process_group()
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise Unavailable(f"FSDP2: {str(error).splitlines()[0]}") from error

    def _run_fsdp(self, policy: CPUOffloadPolicy) -> ShardSample:
        mesh = init_device_mesh(self.device.type, (1,))
        members = [copy.deepcopy(model) for model in self.models]
        for model in members:
            for unit in (*self.case.units(model), model):
                fully_shard(unit, mesh=mesh, offload_policy=policy)
        pairs = zip(members, self.rates, strict=True)
        steps = [(model, torch.optim.Adam(model.parameters(), lr=rate)) for model, rate in pairs]
        inputs, target = (tensor.to(self.device) for tensor in self.batch)

        def step() -> Tensor:
            losses = []
            for model, optimizer in steps:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(inputs), target)
                loss.backward()
                optimizer.step()
                losses.append(loss.detach())
            return torch.stack(losses)

        return self._timed(step)


PLAIN = Contender("plain loop", "the array in memory, in a loop: what everybody writes", ShardWorkload.run_loop)
OURS = Contender("hf.train", "resident where the budget holds the array; else in shards", ShardWorkload.run_hfusion)
FSDP = Contender("fsdp2 offload", "fully_shard with CPUOffloadPolicy; it knows no budget", ShardWorkload.run_fsdp)


def compare(workload: ShardWorkload, ways: Sequence[tuple[Contender, int]], rounds: int) -> list[Row]:
    """Return a row for each contender at a part of the need, 0 for none, which run in turn in every round.

    The first one must be the plain loop. Rows have medians of milliseconds per step, and bytes; ``speedup`` over the
    plain loop is the median of the ratios within rounds.
    """
    samples: list[list[ShardSample]] = [[] for _ in ways]
    failed: dict[int, Exception] = {}
    for _ in range(rounds):
        for number, (contender, part) in enumerate(ways):
            if number not in failed:
                harness.say(f"{workload.case.name}, {contender.name} 1/{part}")
                gc.collect()
                try:
                    with harness.collector_off():
                        sample: ShardSample = contender.start(workload, workload.need // max(part, 1))
                    expected = (samples[0] or [sample])[0].losses.double()
                    exact = contender is PLAIN or contender.name.startswith(OURS.name)
                    tolerance = 0.0 if exact else TOLERANCE
                    check_agreement(contender.name, expected, sample.losses.double(), tolerance)
                    samples[number].append(sample)
                except (Unavailable, PlanError, Disagreement) as error:
                    failed[number] = error
    rows: list[Row] = []
    plain = [] if 0 in failed else [sample.seconds for sample in samples[0]]
    for number, ((contender, part), found) in enumerate(zip(ways, samples, strict=True)):
        head = {"case": workload.case.name, "members": len(workload.models), "budget": f"1/{part}" if part else "-"}
        row: Row = head | {"contender": contender.name, "reason": str(failed.get(number, ""))}
        rows.append(row | {"disagrees": isinstance(failed.get(number), Disagreement)})
        if number not in failed:
            seconds, last = [sample.seconds for sample in found], found[-1]
            rows[-1] |= {"ms": 1e3 * statistics.median(seconds), "peak_bytes": last.peak, "shards": last.shards}
            rows[-1]["speedup"] = harness.speedup(plain, seconds) if plain else None
    return rows


def _run(options: argparse.Namespace) -> Iterator[Row]:
    for case in QUICK_CASES if options.quick else CASES:
        workload = ShardWorkload(case, 5 if options.quick else 24, options.device)
        ways = [(PLAIN, 1), *((OURS, part) for part in case.parts), (FSDP, 0)]
        yield from compare(workload, ways, options.repeats or (1 if options.quick else 3))


def _table(rows: Sequence[Row]) -> Table:
    columns: dict[str, Callable[[Row], harness.Cell]] = {
        "shards": lambda row: str(row["shards"] or "-"),
        "ms": lambda row: harness.number(row["ms"]),
        f"vs {PLAIN.name}": lambda row: harness.factor(row["speedup"]),
        "peak MiB": lambda row: harness.number(row["peak_bytes"] and row["peak_bytes"] / 2**20),
    }
    labels = ("case", "members", "budget", "contender")
    return harness.row_table("one training step of arrays that do not fit", rows, labels, columns)


BENCHMARK = Benchmark(__doc__, _run, _table, {"cases": CASES, "ways": (PLAIN, OURS, FSDP)})
