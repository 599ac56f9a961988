"""The sub-benchmark ``schedule``: the makespan of policies over the lower bound, in simulation.

Hydra's study (arXiv:2110.08633): many tasks on few devices, all alike or of different lengths and sizes. A load
takes less than the computing it is hidden behind, so all losses are due to the policy. The rows of ``placement`` are
of a cluster, where arrays are placed on the devices of nodes, and each device trains one after the other. In those of
``first plan``, ``made anew`` and ``rates known`` the estimates are wrong, or right: means of 20 cases each. Those of a
cluster cost CPU time for every message of a device.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean

from rich.table import Table

from hfusion.bench.placement_simulation import placed
from hfusion.bench.progress import Meter
from hfusion.bench.replanning import replanned
from hfusion.schedule.dispatch import Dispatcher
from hfusion.schedule.plan import Plan, Shard, TaskPlan
from hfusion.schedule.policy import Policy
from hfusion.schedule.simulate import simulate

MIXES = ("homogeneous", "heterogeneous")
GIB = 2**30
BUDGET = 16 * GIB
RATE = 8.0 * GIB
# A unit per task and minibatch is enough for many tasks; few tasks are cut finer, as they would be.
UNITS = 100_000
DECISIONS = 2_000


@dataclass(frozen=True)
class ScheduleCase:
    """A number of tasks and of devices."""

    tasks: int
    devices: int

    @property
    def name(self) -> str:
        return f"{self.tasks} on {self.devices}"


CASES = (
    ScheduleCase(8, 4),
    ScheduleCase(10, 4),
    ScheduleCase(64, 4),
    ScheduleCase(16, 8),
    ScheduleCase(128, 8),
    ScheduleCase(128, 64),
    ScheduleCase(1024, 64),
    ScheduleCase(2048, 1024),
    ScheduleCase(10_000, 1024),
)
QUICK_CASES = CASES[:2]
# Arrays on the devices of a cluster, each device a node.
PLACEMENT_CASES = (ScheduleCase(100, 10), ScheduleCase(10_000, 1_000))
# Estimates that measured rates replace.
REPLANNED_CASES = (ScheduleCase(4, 4), ScheduleCase(16, 4), ScheduleCase(40, 10))
REPLANNED_SEEDS = 20


@dataclass(frozen=True)
class ScheduleSettings:
    """Settings of the comparison."""

    cases: tuple[ScheduleCase, ...]
    policies: tuple[Policy, ...]
    placements: tuple[ScheduleCase, ...] = PLACEMENT_CASES
    replanned: tuple[ScheduleCase, ...] = REPLANNED_CASES


@dataclass(frozen=True)
class ScheduleRow:
    """The results of one policy: seconds, their ``ratio``, the cost of a decision, in a cluster of a message."""

    tasks: int
    devices: int
    mix: str
    policy: str
    makespan: float
    lower_bound: float
    ratio: float
    us_per_decision: float


def plan_of(case: ScheduleCase, mix: str, seed: int = 0) -> Plan:
    """The plan of a case. Heterogeneous tasks differ up to 8-fold in their seconds, and in shards and mode."""
    drawn = random.Random(seed)
    most = max(1, min(8, UNITS // (case.tasks * 40)))
    tasks = []
    for number in range(case.tasks):
        length, count, resident = 1.0, max(1, most // 2), False
        if mix == "heterogeneous":
            length, count = drawn.uniform(0.25, 2.0), drawn.randint(1, most)
            resident = drawn.random() < 0.5
        steps = max(10, min(100, round(length * UNITS / (2 * case.tasks * most))))
        tasks.append(_task(f"task{number}", length * 1000 / steps, count, steps, resident))
    return Plan(tuple(tasks), {f"device{number}": BUDGET for number in range(case.devices)}, RATE, RATE)


def _task(name: str, seconds: float, count: int, steps: int, resident: bool) -> TaskPlan:
    """A task whose minibatch takes ``seconds`` without recomputation; its state moves in a fifth of that."""
    shard_seconds = seconds / count
    size = min(int(0.2 * shard_seconds * RATE), BUDGET // 4 // (count if resident else 1))
    shards = tuple(
        Shard(
            index=index,
            first=index,
            last=index + 1,
            weights=size // 4,
            gradients=size // 4,
            optimizer=size // 2,
            activations=size // 8,
            workspace=size // 16,
            peak=size // 4 + size // 8 + size // 16,
            boundary=size // 64 if index < count - 1 else 0,
            forward=shard_seconds * 0.3,
            backward=shard_seconds * 0.6,
            step=shard_seconds * 0.1,
        )
        for index in range(count)
    )
    return TaskPlan(name, shards, steps, resident)


def us_per_decision(plan: Plan, policy: Policy) -> float:
    """Return the mean microseconds to begin a unit, choose the device's next one and queue the task that it left."""
    dispatcher = Dispatcher(plan, policy)
    running = [dispatcher.choose(budget, None) for budget in plan.devices.values()]
    start = time.perf_counter()
    for number in range(DECISIONS):
        index = number % len(running)
        task = running[index]
        if task is not None:
            dispatcher.begin_unit(task)
            running[index] = chosen = dispatcher.choose(BUDGET, task)
            if chosen != task:
                dispatcher.add_waiting(task)
    return (time.perf_counter() - start) / DECISIONS * 1e6


def pieces(settings: ScheduleSettings) -> int:
    """Return the number of pieces of work that ``run`` reports: one per case, mix and policy."""
    placed = len(settings.placements) + len(settings.replanned)
    return (len(settings.cases) * len(settings.policies) + placed) * len(MIXES)


def run(settings: ScheduleSettings, meter: Meter) -> Iterator[ScheduleRow]:
    """One policy in one case after the other."""
    for case in settings.cases:
        for mix in MIXES:
            plan = plan_of(case, mix)
            for policy in settings.policies:
                meter.say(f"{case.name} devices, {mix}, {policy.name}")
                yield _row(case, mix, plan, policy)
                meter.advance(1)
    for case in settings.placements:
        for mix in MIXES:
            meter.say(f"{case.name} nodes, {mix}, placement")
            yield _placed_row(case, mix)
            meter.advance(1)
    for case in settings.replanned:
        for mix in ("estimates wrong", "estimates right"):
            meter.say(f"{case.name} nodes, {mix}")
            yield from _replanned_rows(case, mix)
            meter.advance(1)


def _row(case: ScheduleCase, mix: str, plan: Plan, policy: Policy) -> ScheduleRow:
    timeline = simulate(plan, policy)
    return ScheduleRow(
        case.tasks,
        case.devices,
        mix,
        policy.name,
        timeline.makespan,
        timeline.lower_bound,
        timeline.makespan / timeline.lower_bound,
        us_per_decision(plan, policy),
    )


def _placed_row(case: ScheduleCase, mix: str) -> ScheduleRow:
    simulated = placed(case.tasks, case.devices, alike=mix == "homogeneous")
    return ScheduleRow(
        case.tasks,
        case.devices,
        mix,
        "placement",
        simulated.makespan,
        simulated.lower_bound,
        simulated.makespan / simulated.lower_bound,
        simulated.us_per_message,
    )


def _replanned_rows(case: ScheduleCase, mix: str) -> Iterator[ScheduleRow]:
    right = mix == "estimates right"
    samples = [replanned(case.tasks, case.devices, right=right, seed=seed) for seed in range(REPLANNED_SEEDS)]
    for name in samples[0]:
        makespan, bound, cost = (mean(sample[name][index] for sample in samples) for index in range(3))
        yield ScheduleRow(case.tasks, case.devices, mix, name, makespan, bound, makespan / bound, cost)


def table(rows: Sequence[ScheduleRow]) -> Table:
    """Makespan over the lower bound, a row per case, mix and policy."""
    shown = Table(title="makespan of policies over the lower bound, simulated")
    for heading in ("tasks", "devices"):
        shown.add_column(heading, justify="right")
    for heading in ("mix", "policy"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("makespan s", "lower bound s", "ratio", "us / decision"):
        shown.add_column(heading, justify="right")
    for row in rows:
        values = (f"{row.makespan:,.1f}", f"{row.lower_bound:,.1f}", f"{row.ratio:.3f}")
        counts = (f"{row.tasks:,}", f"{row.devices:,}")
        shown.add_row(*counts, row.mix, row.policy, *values, f"{row.us_per_decision:.1f}")
    return shown
