"""Run a plan without running it: when would what happen, if every action took the seconds the plan says.

Each device computes one unit while the next is loaded beside it (double buffering), as far as memory allows.
The next unit is chosen when the present one begins; an action that is planned is never taken back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from hfusion.plan import Direction, Plan, TaskPlan
from hfusion.policy import DEFAULT, Candidate, Policy, State, Waiting, named
from hfusion.schedule import Action, Kind, Timeline


def simulate(plan: Plan, policy: str | Policy = DEFAULT) -> Timeline:
    """The timeline of ``plan`` under a policy or the name of one. Raises PlanError for an unknown name."""
    return _Simulation(plan, named(policy)).run()


class Costs(NamedTuple):
    """A unit in numbers: seconds until the boundary of BACKWARD and STEP and after it, and bytes."""

    direction: Direction
    shard: int
    main: float
    update: float
    held: int
    extra: int
    moved_in: int
    moved_out: int


def costs(task: TaskPlan) -> tuple[Costs, ...]:
    """The units of one minibatch of a task, in order."""
    made = []
    for number in range(2 * len(task.shards)):
        unit = task.unit(number)
        way, shard = unit.direction, unit.shard
        forward = way is Direction.FORWARD
        part = task.shards[shard]
        made.append(
            Costs(
                way,
                shard,
                main=part.forward if forward else task.backward_seconds(shard),
                update=0.0 if forward else part.step,
                held=task.held_bytes(way, shard),
                extra=task.extra_bytes(way, shard),
                moved_in=task.in_bytes(way, shard),
                moved_out=task.out_bytes(way, shard),
            )
        )
    return tuple(made)


@dataclass
class _Memory:
    """Bytes taken on a device: now, and the changes that are already decided."""

    budget: int
    taken: int = 0
    future: list[tuple[float, int]] = field(default_factory=list)

    def change(self, time: float, size: int) -> None:
        if size:
            heappush(self.future, (time, size))

    def settle(self, now: float) -> None:
        """Let what was decided until ``now`` happen."""
        while self.future and self.future[0][0] <= now:
            self.taken += heappop(self.future)[1]

    def earliest(self, now: float, size: int) -> float:
        """The first moment from ``now`` on at which ``size`` more bytes fit for good; infinite if none."""
        level, found = self.taken, now
        if level + size > self.budget:
            found = math.inf
        for time, change in sorted(self.future):
            level += change
            if level + size > self.budget:
                found = math.inf
            elif found == math.inf:
                found = max(now, time)
        return found

    def final(self) -> int:
        """Bytes taken when all that is decided has happened."""
        return self.taken + sum(change for _, change in self.future)


class _Loaded(NamedTuple):
    """A shard on a device: ready from ``ready`` on, ``owed`` bytes are to be written back."""

    size: int
    ready: float
    owed: int


@dataclass
class _Run:
    """The state of a task. ``host``: when its last bytes are back on the host; ``end``: of its last unit."""

    plan: TaskPlan
    units: tuple[Costs, ...]
    remaining: float
    quantum: float
    need: int
    unit: int = 0
    end: float = 0.0
    host: float = 0.0
    device: int | None = None
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)
    since: int = 0

    def costs(self, unit: int) -> Costs:
        return self.units[unit % len(self.units)]

    @property
    def count(self) -> int:
        return len(self.units) * self.plan.steps


@dataclass
class _Worker:
    """The state of a device.

    ``started`` and ``computes`` are the times of the last unit that is planned; ``loads`` and ``evicts``
    those from which the links are free; ``parked``: resident tasks that are loaded but do not run, oldest
    first.
    """

    name: str
    memory: _Memory
    started: float = 0.0
    computes: float = 0.0
    loads: float = 0.0
    evicts: float = 0.0
    task: int | None = None
    queued: int | None = None
    parked: dict[int, None] = field(default_factory=dict)


_END, _START = 0, 1


class _Simulation:
    """The clock and what it moves. A device gets its next task when its present unit starts."""

    def __init__(self, plan: Plan, policy: Policy) -> None:
        self.plan, self.policy = plan, policy
        self.workers = [_Worker(name, _Memory(budget)) for name, budget in plan.devices.items()]
        self.runs = [_begin(task) for task in plan.tasks]
        self.waiting = Waiting(policy.order, plan.devices.values())
        self.work = math.fsum(run.remaining for run in self.runs)
        self.actions: list[Action] = []
        self.events: list[tuple[float, int, int]] = []
        self.begun = 0
        self.largest = max(plan.devices.values())

    def run(self) -> Timeline:
        for task in range(len(self.runs)):
            self.waiting.add(self._candidate(task))
        idle = []
        for device in range(len(self.workers)):
            if not self._engage(device, 0.0):
                idle.append(device)
        heapify(idle)
        while self.events:
            now, what, device = heappop(self.events)
            if what == _START:
                self._start(device, now)
            elif (freed := self._end(device, now)) is not None:
                heappush(idle, freed)
            if what == _END:
                self._wake(idle, now)
        self.actions.sort(key=lambda action: action.start)
        return Timeline(tuple(self.actions), tuple(self.plan.devices), self.plan.lower_bound)

    def _candidate(self, task: int) -> Candidate:
        run = self.runs[task]
        return Candidate(task, run.unit, run.remaining, run.quantum, run.since, run.need)

    def _wake(self, idle: list[int], now: float) -> None:
        """Give idle devices, the first first, what fits them."""
        still = []
        while idle and self.waiting.first(self.largest) is not None:
            device = heappop(idle)
            if not self._engage(device, now):
                still.append(device)
        for device in still:
            heappush(idle, device)

    def _choose(self, device: int) -> int | None:
        """Ask the policy what a device does next, and take it from those that wait."""
        worker = self.workers[device]
        running = None
        if worker.task is not None and self.runs[worker.task].unit < self.runs[worker.task].count:
            running = self._candidate(worker.task)
        state = State(worker.memory.budget, running, self.waiting, self.work / len(self.workers))
        chosen = self.policy(state)
        if chosen is not None and chosen is not running:
            self.waiting.take(worker.memory.budget)
        return None if chosen is None else chosen.task

    def _engage(self, device: int, now: float) -> bool:
        """Let an idle device begin a task, if one waits that fits."""
        task = self._choose(device)
        if task is not None:
            self._commit(device, task, now)
        return task is not None

    def _start(self, device: int, now: float) -> None:
        """The queued unit begins: choose what comes after it, and what stays loaded."""
        worker = self.workers[device]
        worker.memory.settle(now)
        assert worker.queued is not None
        task, worker.task, worker.queued = worker.queued, worker.queued, None
        run = self.runs[task]
        unit = run.costs(run.unit)
        run.unit += 1
        seconds = unit.main + unit.update
        run.remaining = max(0.0, run.remaining - seconds)
        self.work -= seconds
        self.begun += 1
        run.since = self.begun
        heappush(self.events, (run.end, _END, device))
        chosen = self._choose(device)
        self._put_away(device, task, unit, chosen)
        if chosen is not None:
            self._commit(device, chosen, now)

    def _end(self, device: int, now: float) -> int | None:
        """A unit ended: its task waits, unless it goes on here. Returns an idle device."""
        worker = self.workers[device]
        task = worker.task
        assert task is not None
        if worker.queued != task and self.runs[task].unit < self.runs[task].count:
            self.waiting.add(self._candidate(task))
        if worker.queued is not None:
            return None
        worker.task = None
        return device

    def _put_away(self, device: int, task: int, unit: Costs, chosen: int | None) -> None:
        """Decide what becomes of the loaded shards of the unit that runs, from its end on."""
        run, worker = self.runs[task], self.workers[device]
        size, ready, owed = run.loaded[unit.shard]
        run.loaded[unit.shard] = _Loaded(size, ready, min(size, owed + unit.moved_out))
        if run.unit == run.count:
            self._leave(device, task, run.end)
        elif run.plan.resident:
            if chosen != task:
                worker.parked[task] = None
        else:
            after = run.costs(run.unit)
            stays = after.shard == unit.shard and size + after.extra <= worker.memory.budget
            if chosen != task or not stays:
                self._leave(device, task, run.end)

    def _leave(self, device: int, task: int, at: float) -> None:
        """Evict all that a task has on a device, from the time ``at`` on."""
        run, worker = self.runs[task], self.workers[device]
        step = (run.unit - 1) // len(run.units)
        for shard, entry in run.loaded.items():
            start = max(at, worker.evicts, entry.ready)
            end = start + entry.owed / self.plan.evict_rate
            worker.evicts = run.gone[shard] = end
            run.host = max(run.host, end)
            worker.memory.change(end, -entry.size)
            self._act(Kind.EVICT, run, shard, step, worker, start, end, entry.size)
        run.loaded.clear()
        run.device = None
        worker.parked.pop(task, None)

    def _commit(self, device: int, task: int, now: float) -> None:
        """Plan the next unit of a task on a device: its LOADs as early as they can be, then its computing."""
        run, worker = self.runs[task], self.workers[device]
        worker.memory.settle(now)
        if run.device is not None and run.device != device:
            self.workers[run.device].memory.settle(now)
            self._leave(run.device, task, now)
        run.device = device
        worker.parked.pop(task, None)
        unit = run.costs(run.unit)
        needed = [shard for shard in _needed(run, unit) if shard.shard not in run.loaded]
        self._make_room(worker, device, sum(shard.held for shard in needed) + unit.extra, now)
        for shard in needed:
            self._load(worker, run, shard, now, goes_on=worker.task == task)
        start = max(now, run.loaded[unit.shard].ready, worker.computes, run.end)
        self._compute(worker, run, unit, worker.memory.earliest(start, unit.extra))
        worker.queued = task
        heappush(self.events, (worker.started, _START, device))

    def _make_room(self, worker: _Worker, device: int, size: int, now: float) -> None:
        while worker.parked and worker.memory.final() + size > worker.memory.budget:
            task = next(iter(worker.parked))
            self._leave(device, task, max(now, self.runs[task].end))

    def _load(self, worker: _Worker, run: _Run, unit: Costs, now: float, *, goes_on: bool) -> None:
        """Load a shard, when it (or, for a task that did not run here, all of it) is on the host."""
        there = run.gone.get(unit.shard, 0.0) if goes_on else run.host
        start = worker.memory.earliest(max(now, worker.loads, there), unit.held)
        end = start + unit.moved_in / self.plan.load_rate
        worker.loads = end
        worker.memory.change(start, unit.held)
        run.loaded[unit.shard] = _Loaded(unit.held, end, 0)
        step = run.unit // len(run.units)
        self._act(Kind.LOAD, run, unit.shard, step, worker, start, end, unit.held)

    def _compute(self, worker: _Worker, run: _Run, unit: Costs, start: float) -> None:
        step = run.unit // len(run.units)
        middle = start + unit.main
        run.end = middle + unit.update
        worker.started, worker.computes = start, run.end
        worker.memory.change(start, unit.extra)
        worker.memory.change(run.end, -unit.extra)
        if unit.direction is Direction.FORWARD:
            self._act(Kind.FORWARD, run, unit.shard, step, worker, start, middle, unit.extra)
        else:
            self._act(Kind.BACKWARD, run, unit.shard, step, worker, start, middle, unit.extra)
            self._act(Kind.STEP, run, unit.shard, step, worker, middle, run.end, 0)

    def _act(
        self,
        kind: Kind,
        run: _Run,
        shard: int,
        step: int,
        worker: _Worker,
        start: float,
        end: float,
        size: int,
    ) -> None:
        self.actions.append(Action(kind, run.plan.name, shard, step, worker.name, start, end, size))


def _begin(task: TaskPlan) -> _Run:
    units = costs(task)
    quantum = max(unit.main + unit.update for unit in units)
    return _Run(task, units, task.seconds, quantum, task.device_bytes)


def _needed(run: _Run, unit: Costs) -> list[Costs]:
    """The shards that must be loaded for a unit, the unit's own first."""
    if not run.plan.resident:
        return [unit]
    others = [other for other in run.units if other.direction is unit.direction and other.shard != unit.shard]
    return [unit, *others]
