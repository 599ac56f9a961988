"""Policies, which choose the next unit of a device: pure functions that simulator and executor share.

The caller keeps the state: the tasks that wait, in a heap that is sorted the way the policy wants, so that a
decision looks at two candidates and costs the logarithm of the number of tasks.
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
    """The candidates that no device runs, least ``order`` first, ties by position in the plan.

    ``budgets`` are those of all devices: a device sees the candidates that fit it.
    """

    def __init__(self, order: Order, budgets: Iterable[int]) -> None:
        self._order = order
        self._budgets = sorted(set(budgets))
        self._heaps: list[list[tuple[float, int, Candidate]]] = [[] for _ in self._budgets]

    def __bool__(self) -> bool:
        return any(self._heaps)

    def add(self, candidate: Candidate) -> None:
        """Let a candidate wait. Raises PlanError if it fits no device."""
        place = bisect_left(self._budgets, candidate.need)
        if place == len(self._budgets):
            raise PlanError(f"task {candidate.task} needs {candidate.need:,} bytes: more than any device has")
        heappush(self._heaps[place], (self._order(candidate), candidate.task, candidate))

    def first(self, budget: int) -> Candidate | None:
        """The first candidate that fits ``budget`` bytes; it keeps waiting."""
        heap = self._first_heap(budget)
        return heap[0][2] if heap else None

    def take(self, budget: int) -> None:
        """The candidate that ``first`` shows waits no longer. Raises IndexError if there is none."""
        heappop(self._first_heap(budget))

    def _first_heap(self, budget: int) -> list[tuple[float, int, Candidate]]:
        found: list[tuple[float, int, Candidate]] = []
        for heap in self._heaps[: bisect_left(self._budgets, budget + 1)]:
            if heap and (not found or heap[0][:2] < found[0][:2]):
                found = heap
        return found


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
    """``policy(state)`` is the next candidate, ``state.running`` or the first that waits, or None.

    ``patient``: it alternates tasks on a device as rarely as it can, so that keeping a shard there pays off.
    """

    name: str
    about: str
    order: Order
    choice: Choice
    patient: bool = False

    def __call__(self, state: State) -> Candidate | None:
        return self.choice(self.order, state)


def best(order: Order, state: State) -> Candidate | None:
    """The least in ``order``; the running one if there is a tie, as it needs no new LOAD."""
    first, running = state.waiting.first(state.budget), state.running
    if first is None or (running is not None and order(running) <= order(first)):
        return running
    return first


def patient(order: Order, state: State) -> Candidate | None:
    """Stay with the running task until one that waits would make the whole run longer if it waited on.

    That is so when its remaining time reaches the share of a device, less one unit (McNaughton 1959: with
    tasks that may be interrupted, max(longest task, share) can be met by interrupting few of them).
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
    """The policy of this name. Raises PlanError that lists the names for an unknown one."""
    if isinstance(policy, Policy):
        return policy
    if not isinstance(policy, str) or policy not in POLICIES:
        names = ", ".join(POLICIES)
        raise PlanError(f"unknown policy {policy!r}: choose from {names}, or give a Policy of hfusion.schedule.policy")
    return POLICIES[policy]
