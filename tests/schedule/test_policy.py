"""Policies: which candidate they choose, and that they are pure."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfusion.core.errors import PlanError
from hfusion.schedule.policy import Candidate, State, Waiting
from tests.schedule import compared as policies
from tests.schedule.compared import COMPARED

CANDIDATES = st.lists(
    st.builds(
        Candidate,
        task=st.integers(0, 99),
        unit=st.integers(0, 9),
        remaining=st.floats(0, 100),
        quantum=st.floats(0.1, 10),
        since=st.integers(0, 99),
        need=st.integers(0, 30),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda candidate: candidate.task,
)


def state(name: str, candidates: list[Candidate], running: Candidate | None = None, share: float = 0.0) -> State:
    waiting = Waiting(COMPARED[name].order, [10, 20, 30])
    for candidate in candidates:
        waiting.add(candidate)
    return State(20, running, waiting, share)


A = Candidate(task=0, unit=1, remaining=5.0, quantum=1.0, since=7, need=3)
B = Candidate(task=1, unit=1, remaining=9.0, quantum=1.0, since=8, need=15)
C = Candidate(task=2, unit=1, remaining=7.0, quantum=1.0, since=2, need=3)
TOO_LARGE = Candidate(task=3, unit=0, remaining=99.0, quantum=1.0, since=0, need=21)


@pytest.mark.parametrize(
    ("name", "chosen"), [("sharded-lrtf", B), ("patient-lrtf", B), ("fifo", A), ("round-robin", C)]
)
def test_an_idle_device_gets_the_first_that_fits(name: str, chosen: Candidate) -> None:
    assert COMPARED[name](state(name, [A, B, C, TOO_LARGE])) is chosen


@pytest.mark.parametrize(
    ("name", "chosen"), [("sharded-lrtf", B), ("patient-lrtf", A), ("fifo", A), ("round-robin", C)]
)
def test_a_running_task_goes_on_or_not(name: str, chosen: Candidate) -> None:
    assert COMPARED[name](state(name, [B, C], running=A, share=20.0)) is chosen


@pytest.mark.parametrize("name", ["sharded-lrtf", "patient-lrtf"])
@pytest.mark.parametrize("share", [0.0, 99.0])
def test_of_two_that_are_equal_the_running_one_goes_on(name: str, share: float) -> None:
    assert COMPARED[name](state(name, [A._replace(task=9)], running=A, share=share)) is A


def test_patience_ends_when_a_task_would_end_too_late() -> None:
    patient = COMPARED["patient-lrtf"]
    assert patient(state("patient-lrtf", [B], running=A, share=10.1)) is A
    assert patient(state("patient-lrtf", [B], running=A, share=10.0)) is B
    assert patient(state("patient-lrtf", [B], running=A._replace(remaining=8.5), share=10.0)).task == A.task


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_nothing_waits(name: str) -> None:
    assert COMPARED[name](state(name, [])) is None
    assert COMPARED[name](state(name, [TOO_LARGE])) is None
    assert COMPARED[name](state(name, [TOO_LARGE], running=A)) is A


@given(CANDIDATES, st.sampled_from(sorted(COMPARED)))
def test_a_decision_is_pure_and_finds_the_least(candidates: list[Candidate], name: str) -> None:
    chooser = COMPARED[name]
    current_state = state(name, candidates)
    chosen = chooser(current_state)
    assert chooser(current_state) is chosen
    assert chooser(state(name, candidates[::-1])) is chosen
    fitting = [candidate for candidate in candidates if candidate.need <= current_state.budget]
    least = min(fitting, key=lambda candidate: (chooser.order(candidate), candidate.task), default=None)
    assert chosen is least


def test_waiting_gives_all_in_order() -> None:
    waiting = state("sharded-lrtf", [A, B, C, TOO_LARGE]).waiting
    ordered = []
    while (first := waiting.first(30)) is not None:
        ordered.append(first)
        waiting.take(30)
        assert bool(waiting) == (len(ordered) < 4)
    assert ordered == [TOO_LARGE, B, C, A]
    with pytest.raises(IndexError):
        waiting.take(30)
    with pytest.raises(PlanError, match="needs 31 bytes"):
        waiting.add(A._replace(need=31))


def test_seeds_differ() -> None:
    orders = [[policies.random(seed).order(A._replace(task=task)) for task in range(20)] for seed in (0, 1)]
    assert orders[0] != orders[1]
    assert len(set(orders[0])) == 20
