"""Policies, which choose the next unit of a device: pure functions that simulator and executor share.

The caller keeps the waiting tasks sorted by the order of the policy. So a decision compares two candidates, and its
cost hardly grows with the number of tasks.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hfusion.core.errors import PlanError
from hfusion.schedule.plan import Plan, TaskPlan, Unit


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
        self._order, self._largest = order, max(budgets)
        self._candidates: list[tuple[float, int, Candidate]] = []

    def __bool__(self) -> bool:
        return bool(self._candidates)

    def add(self, candidate: Candidate) -> None:
        """Let a candidate wait. Raises PlanError if it fits no device."""
        if candidate.need > self._largest:
            raise PlanError(f"task {candidate.task} needs {candidate.need:,} bytes: more than any device has")
        insort(self._candidates, (self._order(candidate), candidate.task, candidate))

    def first(self, budget: int) -> Candidate | None:
        """Return the first candidate that fits ``budget`` bytes, without removing it; None if there is none."""
        return next((candidate for *_, candidate in self._candidates if candidate.need <= budget), None)

    def take(self, budget: int) -> None:
        """Remove the candidate that ``first(budget)`` returns. Raises IndexError if there is none."""
        fitting = (place for place, (*_, candidate) in enumerate(self._candidates) if candidate.need <= budget)
        del self._candidates[next(fitting, len(self._candidates))]


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


# Choose the next task of a device, and keep the state of tasks that a policy sees.


@dataclass(slots=True)
class _Progress:
    """Progress of a task: the unit that starts next, None if all have started, and its view for the policy.

    ``units``: how many the task has.
    """

    plan: TaskPlan
    next: Unit | None
    candidate: Candidate
    units: int


class Dispatcher:
    """Chooses tasks for devices, and counts the units that began. At first every task waits.

    ``first``: how many units of each task ran in an earlier run; None for a new run.
    """

    def __init__(self, plan: Plan, policy: Policy, first: Sequence[int] | None = None) -> None:
        self._policy = policy
        self._devices = len(plan.devices)
        self._waiting = Waiting(policy.order, plan.devices.values())
        ran = [0] * len(plan.tasks) if first is None else first
        self._tasks = list[_Progress]()
        for number, (task, first_unit) in enumerate(zip(plan.tasks, ran, strict=True)):
            remaining = max(0.0, task.seconds - math.fsum(map(task.unit_seconds, map(task.unit, range(first_unit)))))
            quantum = max(task.unit_seconds(Unit(task.name, 0, *kind)) for kind in task.counts)
            candidate = Candidate(number, first_unit, remaining, quantum, 0, task.device_bytes)
            next_unit = task.unit(first_unit) if first_unit < task.units else None
            self._tasks.append(_Progress(task, next_unit, candidate, task.units))
        self._work = math.fsum(task.candidate.remaining for task in self._tasks)
        self._units = sum(task.units for task in plan.tasks) - sum(ran)
        self._started_units = 0
        for number in range(len(self._tasks)):
            self.add_waiting(number)

    def choose(self, budget: int, running: int | None) -> int | None:
        """Return the task that a device of ``budget`` bytes runs next, and remove it from the waiting ones.

        ``running``: the task whose unit the device has started. It may be chosen again if it has units left, and must
        be if its next unit has to follow immediately. Returns None if no waiting task fits the device and the running
        one does not continue. Raises PlanError if the policy returns another value.
        """
        present = None
        if running is not None and (next_unit := self._tasks[running].next) is not None:
            if self._tasks[running].plan.must_follow(next_unit):
                return running
            present = self._tasks[running].candidate
        first = self._waiting.first(budget)
        chosen = self._policy(State(budget, present, self._waiting, self._work / self._devices))
        if chosen is None:
            return None
        if chosen == present:
            return running
        if chosen != first or first != self._waiting.first(budget):
            raise PlanError(
                f"policy {self._policy.name!r} gave {chosen!r}: it may give state.running, what "
                "state.waiting.first(state.budget) gives, or None, and change nothing"
            )
        self._waiting.take(budget)
        return chosen.task

    def begin_unit(self, task: int) -> Unit:
        """Begin the next unit of a chosen task and return it. Raises IndexError if the task is done."""
        state = self._tasks[task]
        unit = state.next
        if unit is None:
            raise IndexError(f"task {state.plan.name!r} has no unit left to begin")
        seconds = state.plan.unit_seconds(unit)
        self._work -= seconds
        self._started_units += 1
        old = state.candidate
        number, remaining = old.unit + 1, max(0.0, old.remaining - seconds)
        state.candidate = Candidate(task, number, remaining, old.quantum, self._started_units, old.need)
        state.next = state.plan.unit(number) if number < state.units else None
        return unit

    def next(self, task: int) -> Unit | None:
        """Return the unit of a task that begins next; None if all have begun."""
        return self._tasks[task].next

    def end(self, task: int, units: int) -> None:
        """Shorten a task, which must not be waiting, to ``units`` more units."""
        state, old = self._tasks[task], self._tasks[task].candidate
        last = min(state.units, old.unit + units)
        remaining = math.fsum(map(state.plan.unit_seconds, map(state.plan.unit, range(old.unit, last))))
        self._work -= old.remaining - remaining
        self._units -= state.units - last
        state.units, state.candidate = last, old._replace(remaining=remaining)
        if last == old.unit:
            state.next = None

    def add_waiting(self, task: int) -> None:
        """Add a task to the waiting ones, unless it is done. Called if no device continues it after its unit."""
        if self._tasks[task].next is not None:
            self._waiting.add(self._tasks[task].candidate)

    def has_waiting(self) -> bool:
        """Return whether any task is waiting."""
        return bool(self._waiting)

    def unfinished(self) -> bool:
        """Return whether any task has units that have not started."""
        return self._started_units < self._units
