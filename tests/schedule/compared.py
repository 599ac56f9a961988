"""Policies to compare with, of which none is the best in any plan of `plan_of`: many tasks on few devices."""

from __future__ import annotations

from operator import attrgetter
from random import Random

from hfusion.schedule.plan import Plan, TaskPlan
from hfusion.schedule.policy import POLICIES, Candidate, Policy, best
from tests.shards import task

MIXES = ("homogeneous", "heterogeneous")
GIB = 2**30
BUDGET = 16 * GIB
RATE = 8.0 * GIB
# A unit per task and minibatch is enough for many tasks; few tasks are cut finer, as they would be.
UNITS = 100_000


def random(seed: int) -> Policy:
    """A policy that gives every unit a priority drawn from ``seed``."""

    def drawn(candidate: Candidate) -> float:
        return _mix(_mix(_mix(seed) ^ candidate.task) ^ candidate.unit)

    return Policy("random", "a priority drawn anew for each unit", drawn, best)


def _mix(value: int) -> int:
    """Scatter 64 bits: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return value ^ (value >> 31)


COMPARED: dict[str, Policy] = POLICIES | {
    policy.name: policy
    for policy in (Policy("round-robin", "the task that has waited longest", attrgetter("since"), best), random(0))
}


def plan_of(count: int, devices: int, mix: str) -> Plan:
    """Return a plan of ``count`` tasks, after Hydra's study (arXiv:2110.08633).

    Heterogeneous tasks differ up to 8-fold in their seconds, and in shards and mode. A load takes less than the
    computing it is hidden behind, so that all losses are due to the policy.
    """
    drawn = Random(0)
    most = max(1, min(8, UNITS // (count * 40)))
    tasks = []
    for number in range(count):
        length, shards, resident = 1.0, max(1, most // 2), False
        if mix == "heterogeneous":
            length, shards = drawn.uniform(0.25, 2.0), drawn.randint(1, most)
            resident = drawn.random() < 0.5
            shards = 1 if resident else shards
        steps = max(10, min(100, round(length * UNITS / (2 * count * most))))
        tasks.append(_task(f"task{number}", length * 1000 / steps, shards, steps, resident))
    return Plan(tuple(tasks), {f"device{number}": BUDGET for number in range(devices)}, RATE, RATE)


def _task(name: str, seconds: float, count: int, steps: int, resident: bool) -> TaskPlan:
    """A task whose minibatch takes ``seconds`` without recomputation; its state moves in a fifth of that."""
    shard_seconds = seconds / count
    size = min(int(0.2 * shard_seconds * RATE), BUDGET // 4)
    sizes = {"weights": 4, "gradients": 4, "optimizer": 2, "activations": 8, "workspace": 16, "boundary": 64}
    shares = {"forward": 0.3, "backward": 0.6, "step": 0.1}
    values = {kind: size // part for kind, part in sizes.items()}
    values |= {phase: shard_seconds * share for phase, share in shares.items()}
    return task(name, count, steps, resident=resident, **values)
