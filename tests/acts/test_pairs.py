"""Every act with every client and model, every client with every model, and every two acts in a row, beside torch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest

from tests.acts.clients import CLIENTS, Setup
from tests.acts.sweeps import ACTS as SWEEP_ACTS
from tests.acts.sweeps import Sweep, sweep_of
from tests.acts.walk import Plan, possible, run, setup_of
from tests.acts.zoo import ZOO

ACTS_OF_A_WALK = 8


def pairs(client: str, entry: str, acts: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield what a walk shows together."""
    for act in acts:
        yield "client", client, act
        yield "model", entry, act
    for two in itertools.pairwise(acts):
        yield "acts", *two


def needed() -> set[tuple[str, ...]]:
    """Return all pairs that some walk can show."""
    found = set[tuple[str, ...]]()
    for client in CLIENTS:
        for entry in ZOO:
            acts = possible(client, entry)
            found.update(*(pairs(client, entry, (first, second)) for first in acts for second in acts))
    return found


def table() -> list[Plan]:
    """Choose a walk for each client with each model; the next act is the one that adds the most pairs.

    Further walks follow until every pair is shown.
    """
    draw, missing, plans = random.Random(0), needed(), list[Plan]()
    for turn in range(4):
        for entry in ZOO:
            for client in CLIENTS:
                choices, acts = possible(client, entry), tuple[str, ...]()
                while choices and len(acts) < ACTS_OF_A_WALK:
                    draw.shuffle(choices)
                    gains = {act: len(missing & set(pairs(client, entry, (*acts[-1:], act)))) for act in choices}
                    if turn:
                        for act in choices:
                            gains[act] += any(("acts", act, then) in missing for then in choices)
                    act = max(choices, key=gains.__getitem__)
                    if turn and not gains[act]:
                        break
                    acts = (*acts, act)
                    missing -= set(pairs(client, entry, acts[-2:]))
                if acts:
                    plans.append(Plan(client, setup_of(client, entry, acts, draw), acts, len(plans)))
    return plans


# Members that come in every way, under all options together.
JOINING = [
    Plan(
        client,
        Setup(ZOO["mlp"], optimizer, True, True, True, True, (2,)),
        ("overflow", "put", "copy", "stop", "start", "grow", "compact", "save", "start"),
        1000 + seed,
    )
    for seed, (client, optimizer) in enumerate(itertools.product(("alike", "unlike"), ("sgd", "adagrad")))
]
# Members that are thawed while others are amid an update.
THAWED = [
    Plan("alike", Setup(ZOO["mlp"], optimizer, False, False, True, False, (2,)), ("poison", "thaw") * 3, 2000 + seed)
    for seed, optimizer in enumerate(("sgd", "adamax"))
]
PLANS = [*table(), *JOINING, *THAWED]


def name_of(plan: Plan | Sweep) -> str:
    client = plan.client if isinstance(plan, Plan) else "sweep"
    return f"{client}-{plan.setup.entry}-{plan.seed}"


@pytest.mark.parametrize("plan", PLANS[::3], ids=name_of)
def test_one_walk_of_three(plan: Plan) -> None:
    run(plan)


@pytest.mark.parametrize("plan", [plan for number, plan in enumerate(PLANS) if number % 3], ids=name_of)
def test_other_walks(plan: Plan) -> None:
    run(plan)


def test_the_table_shows_every_pair() -> None:
    shown = {pair for plan in PLANS for pair in pairs(plan.client, str(plan.setup.entry), plan.acts)}
    assert needed() - shown == set()


def sweeps() -> list[Sweep]:
    """Choose sweeps with four acts each, such that every act meets every model and every other act."""
    draw, plans = random.Random(0), list[Sweep]()
    missing = {(entry, act) for entry in ZOO for act in SWEEP_ACTS}
    missing |= set(itertools.combinations(sorted(SWEEP_ACTS), 2))
    while missing:
        shows = {}
        for entry in ZOO:
            acts = tuple(sorted(draw.sample(SWEEP_ACTS, 4)))
            shows[entry, acts] = {(entry, act) for act in acts} | set(itertools.combinations(acts, 2))
        entry, acts = max(shows, key=lambda sweep: len(shows[sweep] & missing))
        missing -= shows[entry, acts]
        plans.append(sweep_of(entry, acts, draw, len(plans)))
    return plans


SWEEPS = sweeps()


@pytest.mark.parametrize("sweep", SWEEPS[::4], ids=name_of)
def test_one_sweep_of_four(sweep: Sweep) -> None:
    sweep.run()


@pytest.mark.parametrize("sweep", [sweep for number, sweep in enumerate(SWEEPS) if number % 4], ids=name_of)
def test_other_sweeps(sweep: Sweep) -> None:
    sweep.run()
