"""Policies, which choose the next unit of a device: pure functions that simulator and executor share.

The caller keeps the waiting tasks in a heap, sorted by the order of the policy. So a decision compares two candidates,
and its cost grows with the logarithm of the number of tasks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

from hfusion.core.errors import PlanError


class Candidate(NamedTuple):
    """A task that could run: ``task`` is its position in the plan, ``unit`` the number of its next unit.

    ``remaining``: seconds of computing in its units that have not begun; ``quantum``: seconds of its longest
    unit; ``since``: how many units of all tasks had begun when its last unit did; ``need``: bytes of a device.
    """

    task: int
    unit: int
    remaining: float
    quantum: float
    since: int
    need: int


Order = Callable[[Candidate], float]


class Waiting:
    """The waiting candidates, lowest ``order`` first; ties by position in the plan.

    ``budgets``: bytes of all devices. A device sees only the candidates that fit its budget.
    """

    def __init__(self, order: Order, budgets: Iterable[int]) -> None:
        self._order = order
        self._budgets = sorted(set(budgets))
        self._heaps: list[list[tuple[float, int, Candidate]]] = [[] for _ in self._budgets]

    def __bool__(self) -> bool:
        return any(self._heaps)

    def add(self, candidate: Candidate) -> None:
        """Let a candidate wait. Raises PlanError if it fits no device."""
        index = bisect_left(self._budgets, candidate.need)
        if index == len(self._budgets):
            raise PlanError(f"task {candidate.task} needs {candidate.need:,} bytes: more than any device has")
        heappush(self._heaps[index], (self._order(candidate), candidate.task, candidate))

    def first(self, budget: int) -> Candidate | None:
        """Return the first candidate that fits ``budget`` bytes, without removing it; None if there is none."""
        heap = self._first_heap(budget)
        return heap[0][2] if heap else None

    def take(self, budget: int) -> None:
        """Remove the candidate that ``first(budget)`` returns. Raises IndexError if there is none."""
        heappop(self._first_heap(budget))

    def _first_heap(self, budget: int) -> list[tuple[float, int, Candidate]]:
        first_heap: list[tuple[float, int, Candidate]] = []
        for heap in self._heaps[: bisect_left(self._budgets, budget + 1)]:
            if heap and (not first_heap or heap[0][:2] < first_heap[0][:2]):
                first_heap = heap
        return first_heap


class State(NamedTuple):
    """The state of a device that asks a policy for work.

    ``budget``: its bytes; ``running``: the next unit of its current task, None without one; ``waiting``: read-only;
    ``share``: seconds of all units that have not started, divided by the number of devices.
    """

    budget: int
    running: Candidate | None
    waiting: Waiting
    share: float


Choice = Callable[[Order, State], Candidate | None]


@dataclass(frozen=True)
class Policy:
    """``policy(state)`` returns the next candidate: ``state.running``, the first waiting one that fits, or None.

    ``patient``: whether it switches tasks on a device as rarely as possible, so that keeping a shard there pays off.
    """

    name: str
    about: str
    order: Order
    choice: Choice
    patient: bool = False

    def __call__(self, state: State) -> Candidate | None:
        return self.choice(self.order, state)


def best(order: Order, state: State) -> Candidate | None:
    """Return the candidate with the lowest ``order``; at a tie the running one, as it needs no new LOAD."""
    first, running = state.waiting.first(state.budget), state.running
    if first is None or (running is not None and order(running) <= order(first)):
        return running
    return first


def patient(order: Order, state: State) -> Candidate | None:
    """Stay with the running task until a waiting task would lengthen the whole run by waiting any longer.

    It does so once its remaining time plus one unit reaches the share of a device, and it has at least a unit more left
    than the running task (McNaughton 1959: with few interruptions, a run can take max(longest task, share)).
    """
    first, running = state.waiting.first(state.budget), state.running
    if first is None or running is None:
        return running if first is None else first
    late = first.remaining + first.quantum >= state.share
    longer = first.remaining >= running.remaining + running.quantum
    return first if late and longer else running


def _longest(candidate: Candidate) -> float:
    return -candidate.remaining


def _position(candidate: Candidate) -> float:
    return candidate.task


# Of `hfusion.simulate` and `hfusion.train`.
DEFAULT = "patient-lrtf"
POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("sharded-lrtf", "longest remaining time first (Hydra, arXiv:2110.08633)", _longest, best),
        Policy(DEFAULT, "the same, but a task is only interrupted when it must be", _longest, patient, True),
        Policy("fifo", "in the order of the plan", _position, best),
    )
}


def named(policy: str | Policy) -> Policy:
    """Return a policy by name. Raises PlanError, with the known names, if it does not exist."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        names = ", ".join(POLICIES)
        raise PlanError(f"unknown policy {policy!r}: choose from {names}, or give a Policy of hfusion.schedule.policy")
    return POLICIES[policy]
