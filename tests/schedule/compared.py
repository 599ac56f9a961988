"""Policies to compare with, of which none is the best in any plan of `plan_of`: many tasks on few devices."""

from __future__ import annotations

from operator import attrgetter
from random import Random

from hypothesis import strategies as st

from hfusion.schedule.plan import Plan, Shard, TaskPlan
from hfusion.schedule.policy import POLICIES, Candidate, Policy, best

MIXES = ("homogeneous", "heterogeneous")
GIB = 2**30
BUDGET = 16 * GIB
RATE = 8.0 * GIB
# A unit per task and minibatch is enough for many tasks; few tasks are cut finer, as they would be.
UNITS = 100_000


def drawn(candidate: Candidate) -> float:
    """A priority as if it were drawn for each unit: hashes of numbers are the same in every process."""
    return float(hash((candidate.task, candidate.unit)))


COMPARED: dict[str, Policy] = POLICIES | {
    policy.name: policy
    for policy in (
        Policy("round-robin", "the task that has waited longest", attrgetter("since"), best),
        Policy("random", "a priority drawn anew for each unit", drawn, best),
    )
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


# Plans to test with: small ones that hypothesis draws, and plain ones with round numbers.
SIZES = st.integers(0, 20)
SECONDS = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))


def shard(index: int, **values: float) -> Shard:
    """A shard with a byte of each kind and a second each way, where ``values`` say nothing else."""
    sizes = dict.fromkeys(
        ("weights", "gradients", "optimizer", "activations", "workspace", "boundary"), 1
    ) | dict.fromkeys(("forward", "backward", "step"), 1.0)
    made = sizes | values
    peak = sum(made[name] for name in ("gradients", "activations", "workspace"))
    return Shard(index, index, index + 1, **({"peak": peak} | made))  # type: ignore[arg-type]


def task(
    name: str,
    count: int = 1,
    steps: int = 1,
    *,
    resident: bool | None = None,
    epoch: int | None = None,
    accumulate: int = 1,
    clipped: bool = False,
    evaluated: int = 0,
    kept: bool = False,
    save_every: int | None = None,
    growth: float = 1.0,
    **values: float,
) -> TaskPlan:
    """A task of ``count`` equal shards; the last has no boundary. One of a single shard is resident by default."""
    shards = [shard(index, **values) for index in range(count - 1)]
    last = shard(count - 1, **(values | {"boundary": 0}))
    settings = {
        "epoch": epoch,
        "accumulate": accumulate,
        "clipped": clipped,
        "evaluated": evaluated,
        "keeps_last_shard": kept,
    }
    settings |= {"save_every": save_every, "growth": growth}
    return TaskPlan(name, (*shards, last), steps, count == 1 if resident is None else resident, **settings)  # type: ignore[arg-type]


@st.composite
def parts(draw: st.DrawFn, index: int) -> Shard:
    """Any small shard."""
    fields = ("weights", "gradients", "optimizer", "activations", "workspace", "peak", "boundary")
    sizes = {field: draw(SIZES) for field in fields}
    seconds = {field: draw(SECONDS) for field in ("forward", "backward", "step")}
    return Shard(index, index, index + 1, **sizes, **seconds, frozen=draw(st.integers(0, sizes["weights"])))


@st.composite
def tasks(draw: st.DrawFn, name: str) -> TaskPlan:
    """Any small task: plain, clipped, with gradients summed over minibatches, with epochs, with evaluations."""
    resident = draw(st.booleans())
    shards = tuple(draw(parts(index)) for index in range(1 if resident else draw(st.integers(1, 4))))
    epochs, epoch = draw(st.sampled_from([(1, None), (1, 2), (2, 1), (2, 2), (1, 3)]))
    return TaskPlan(
        name,
        shards,
        steps=epochs * (epoch or draw(st.integers(1, 3))),
        resident=resident,
        epoch=epoch,
        accumulate=draw(st.integers(1, 3)),
        clipped=draw(st.booleans()),
        evaluated=draw(st.sampled_from([0, 0, 1, 2])),
        keeps_last_shard=draw(st.booleans()),
        save_every=draw(st.sampled_from([None, None, 1, 2, 3])),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any small plan: the first device is at least as large as the largest task needs, the others are any."""
    made = tuple(draw(tasks(f"task{number}")) for number in range(draw(st.integers(1, 6))))
    need = max(each.device_bytes for each in made)
    budgets = [need + draw(st.integers(0, 60))]
    budgets += [draw(st.integers(0, 2 * need)) for _ in range(draw(st.integers(0, 3)))]
    rates = st.sampled_from([1.0, 30.0, 1e9])
    return Plan(made, {f"d{n}": budget for n, budget in enumerate(budgets)}, draw(rates), draw(rates))
