"""The sub-benchmark ``shard``: a step of arrays that do not fit their device, with and without hfusion's runtime.

A budget of 1/4 is a quarter of what the array needs to be trained in one piece. All contenders of a case train the
same array from the same weights, and their losses are compared.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from hfusion import optim
from hfusion.array.fuse import fuse
from hfusion.array.module import FusedModule
from hfusion.array.per_model import per_model
from hfusion.bench.offload import ComputeOnly, FsdpWorkload, LoadComputeEvict, fsdp_offload
from hfusion.bench.progress import Meter
from hfusion.bench.shard_cases import ShardCase
from hfusion.bench.shard_results import (
    ALONE,
    BY_HAND,
    FSDP,
    OURS,
    PLAIN,
    STILL,
    Sample,
    ShardRow,
    StepTimes,
    filled,
    limits,
    steady,
    warm,
)
from hfusion.bench.timing import collector_off
from hfusion.bench.workload import Disagreement, Unavailable, check_agreement
from hfusion.cluster.train_tasks import train
from hfusion.core.errors import PlanError
from hfusion.device.backend import backend
from hfusion.device.machine import Device, Machine
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Phase, Plan, TaskPlan
from hfusion.schedule.task_plan import UnitActions
from hfusion.schedule.timeline import Timeline
from hfusion.tasks.arrange import arrange
from hfusion.tasks.task import Task

# Sums in another order than the array's; Adam divides by small gradients.
TOLERANCE = 1e-2


@dataclass(frozen=True)
class ShardSettings:
    """Settings of the comparison, in runs of ``steps`` minibatches, the first of which are not counted."""

    cases: tuple[ShardCase, ...]
    rounds: int
    steps: int
    device: torch.device


@dataclass(frozen=True)
class Entry:
    """A contender at a budget; ``equal``: its losses must be the plain loop's to the last bit."""

    budget: str
    contender: str
    run: Callable[[], Sample]
    equal: bool = False


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
    def array(self) -> FusedModule:
        return fuse(self.models)

    @cached_property
    def _first(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.array.state_dict().items()}

    def _on(self, device: torch.device) -> FusedModule:
        """The array, there; it forgets its captured programs when it is moved."""
        return self.array if next(self.array.parameters()).device.type == device.type else self.array.to(device)

    @property
    def rates(self) -> list[float]:
        return [1e-4 * (1 + member) for member in range(len(self.models))]

    @cached_property
    def batch(self) -> tuple[Tensor, Tensor]:
        return self.case.make_batch()

    @cached_property
    def need(self) -> int:
        """Bytes to train the array in one piece."""
        return self.plan(1 << 62).tasks[0].device_bytes

    def optimizer(self, params: Sequence[nn.Parameter]) -> optim.Adam:
        return optim.Adam([param for param in params if param.requires_grad], lr=self.rates)

    def task(self) -> Task:
        """The training of the array, from its first weights."""
        self._on(torch.device("cpu")).load_state_dict(self._first)
        self.array.zero_grad()
        optimizer = self.optimizer(list(self.array.parameters()))
        return Task(self.array, self.case.loss, optimizer, [self.batch] * self.steps)

    def machine(self, budget: int) -> Machine:
        return Machine([Device(str(self.device), memory=budget)])

    def plan(self, budget: int) -> Plan:
        return arrange([self.task()], self.machine(budget))[1]

    def plain(self) -> Sample:
        """The loop in memory."""
        need = self.need
        self.task()
        array = self._on(self.device)
        optimizer = self.optimizer(list(array.parameters()))
        loss_of = per_model(self.case.loss)
        inputs, target = (tensor.to(self.device) for tensor in self.batch)
        ends, losses = [], []
        for _ in range(self.steps):
            optimizer.zero_grad()
            row = loss_of(array(inputs), target)
            row.sum().backward()
            optimizer.step()
            backend(self.device).wait()
            ends.append(time.perf_counter())
            losses.append(row.detach().cpu())
        return Sample(steady(ends), torch.stack(losses), peak=need, moved=0.0, shards=1)

    def run_hfusion(self, budget: int, *, prefetch: bool) -> Sample:
        """hf.train; without ``prefetch`` on a device that holds no more than the largest shard with its unit."""
        training_plan = self.plan(budget)
        if not prefetch:
            training_plan = without_prefetch(training_plan)
        task = self.task()
        report = train([task], self.machine(budget), plan=training_plan)
        (peak,) = report.peak.values()
        return replace(read(report.timeline, training_plan), losses=report[task.name].losses, peak=peak)

    def by_hand(self, budget: int) -> Sample:
        """The same shards without the runtime."""
        (arrangement,), training_plan = arrange([self.task()], self.machine(budget))
        return LoadComputeEvict(arrangement, training_plan.tasks[0], self.device).run()

    def still(self, budget: int) -> Sample:
        """The computing of these shards with nothing copied; it needs as much memory as the plain loop."""
        (arrangement,), training_plan = arrange([self.task()], self.machine(budget))
        return replace(ComputeOnly(arrangement, training_plan.tasks[0], self.device).run(), peak=None, moved=None)

    def fsdp(self) -> Sample:
        workload = FsdpWorkload(self.models, self.case.units, self.rates, self.case.loss, self.batch)
        return fsdp_offload(workload, self.steps, self.device)

    def entries(self) -> list[Entry]:
        """Return the contenders; the plain loop is first, since its losses are the reference."""
        entries = [Entry("1/1", PLAIN, self.plain, equal=True)]
        for part in self.case.parts:
            name, budget = f"1/{part}", self.need // part
            entries.append(Entry(name, OURS, partial(self.run_hfusion, budget, prefetch=True), equal=True))
            if part > 1:
                entries.append(Entry(name, ALONE, partial(self.run_hfusion, budget, prefetch=False), equal=True))
                entries.append(Entry(name, BY_HAND, partial(self.by_hand, budget)))
                entries.append(Entry(name, STILL, partial(self.still, budget)))
        return [*entries, Entry("-", FSDP, self.fsdp)]


def without_prefetch(plan: Plan) -> Plan:
    """The plan of one task, on a device that holds no more than its largest shard with its unit."""
    return replace(plan, devices=dict.fromkeys(plan.devices, plan.tasks[0].device_bytes))


def read(timeline: Timeline, plan: Plan) -> Sample:
    """Read the times of the steady steps of one task from its timeline, which has no losses."""
    (task,) = plan.tasks
    # The last step writes back what no other step does, and loads nothing ahead.
    first = warm(task.steps)
    counted = range(first, task.steps - 1) if task.steps > first + 1 else range(task.steps)
    spent = [{"compute": 0.0, "in": 0.0, "out": 0.0} for _ in range(task.steps)]
    ends = [0.0] * task.steps
    for action in timeline.actions:
        spent[action.step][action.act.lane] += action.end - action.start
        if action.act.lane == "compute":
            ends[action.step] = max(ends[action.step], action.end)
    lanes = StepTimes.middle([StepTimes(*spent[step].values()) for step in counted])
    moved = _moved(timeline, task)
    mean = statistics.mean(moved[step] for step in counted)
    return Sample(steady(ends), torch.empty(0), lanes, moved=mean, shards=len(task.shards))


def _moved(timeline: Timeline, task: TaskPlan) -> list[int]:
    """Return the planned bytes that each step of an unclipped task copies; a load counts in the step that uses it."""
    moved = [0] * task.steps
    loading: set[int] = set()
    ran: dict[int, UnitActions] = {}
    for action in timeline.actions:
        if action.act is Act.LOAD:
            loading.add(action.shard)
        elif action.act is Act.EVICT:
            actions = ran.pop(action.shard, None)
            moved[action.step] += 0 if actions is None else actions.evict.moves
        elif action.act is not Act.STEP:
            phase = Phase.FORWARD if action.act is Act.FORWARD else Phase.BACKWARD
            ran[action.shard] = actions = task.unit_actions[phase, action.shard]
            if action.shard in loading:
                loading.remove(action.shard)
                load = actions.load or task.pins.get(action.shard)
                moved[action.step] += 0 if load is None else load.moves
    return moved


def pieces(settings: ShardSettings) -> int:
    """Return the number of pieces of work that ``run`` reports: one per contender, budget and round."""
    return settings.rounds * sum(4 * len(case.parts) - 3 * (1 in case.parts) + 2 for case in settings.cases)


def run(settings: ShardSettings, meter: Meter) -> Iterator[list[ShardRow]]:
    """The rows of one case after the other; contenders run in turn, in every round."""
    for case in settings.cases:
        meter.say(case.name)
        workload = ShardWorkload(case, settings.steps, settings.device)
        yield compare(workload, workload.entries(), settings.rounds, meter)


def compare(workload: ShardWorkload, entries: Sequence[Entry], rounds: int, meter: Meter) -> list[ShardRow]:
    """Return the rows of ``entries``; those that cannot run, or whose losses differ from the first, have a reason."""
    samples: list[list[Sample]] = [[] for _ in entries]
    failed: dict[int, Exception] = {}
    for _ in range(rounds):
        for number, entry in enumerate(entries):
            if number not in failed:
                try:
                    samples[number].append(_sample(entry, samples[0]))
                except (Unavailable, PlanError, Disagreement) as error:
                    failed[number] = error
            meter.advance(1)
    good = {
        (e.budget, e.contender): s for i, (e, s) in enumerate(zip(entries, samples, strict=True)) if i not in failed
    }
    limit = limits(good)
    plain = [] if 0 in failed else samples[0]
    rows = []
    for number, entry in enumerate(entries):
        head = ShardRow(workload.case.name, len(workload.models), entry.budget, entry.contender)
        reason = failed.get(number)
        if reason is None:
            rows.append(filled(head, samples[number], plain, limit.get(entry.budget, ())))
        else:
            rows.append(replace(head, reason=str(reason), disagrees=isinstance(reason, Disagreement)))
    return rows


def _sample(entry: Entry, plain: Sequence[Sample]) -> Sample:
    gc.collect()
    with collector_off():
        sample = entry.run()
    expected = (plain[0] if plain else sample).losses.double()
    check_agreement(entry.contender, expected, sample.losses.double(), 0.0 if entry.equal else TOLERANCE)
    return sample
