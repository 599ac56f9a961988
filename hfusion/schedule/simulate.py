"""Run a plan without running it: when would what happen, if every action took the seconds the plan says.

Each device computes one unit while the next is loaded beside it (double buffering), as far as memory allows.
The next unit is chosen when the present one begins; an action that is planned is never taken back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from hfusion.schedule.dispatch import Dispatcher
from hfusion.schedule.plan import Direction, Plan, TaskPlan, Unit
from hfusion.schedule.policy import DEFAULT, Policy, named
from hfusion.schedule.timeline import PASSES, Action, Kind, Timeline


def simulate(plan: Plan, policy: str | Policy = DEFAULT) -> Timeline:
    """The timeline of ``plan`` under a policy or the name of one. Raises PlanError for an unknown name."""
    return _Simulation(plan, named(policy)).run()


class Costs(NamedTuple):
    """A direction of a shard in numbers: seconds of its pass and of the optimizer step, and bytes.

    ``settles``: whether what it writes back is all that is owed, whatever ran before it.
    """

    direction: Direction
    shard: int
    main: float
    update: float
    held: int
    extra: int
    fresh: int
    freed: int
    moved_in: int
    moved_out: int
    settles: bool


def costs(task: TaskPlan) -> dict[tuple[Direction, int], Costs]:
    """All directions of all shards of a task."""
    return {
        (way, part.index): Costs(
            way,
            part.index,
            main=task.pass_seconds(way, part.index),
            update=part.step,
            held=task.held_bytes(way, part.index),
            extra=task.extra_bytes(way, part.index),
            fresh=task.fresh_bytes(way, part.index),
            freed=task.freed_bytes(way, part.index),
            moved_in=task.in_bytes(way, part.index),
            moved_out=task.out_bytes(way, part.index),
            settles=not task.resident and way in (Direction.BACKWARD, Direction.UPDATE),
        )
        for way in task.directions
        for part in task.shards
    }


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
    """The state of a task on devices. ``host``: when its last bytes are back on the host; ``end``: of its last unit.

    ``step``: the minibatch of the unit that began last.
    """

    plan: TaskPlan
    costs: dict[tuple[Direction, int], Costs]
    step: int = 0
    end: float = 0.0
    host: float = 0.0
    device: int | None = None
    loaded: dict[int, _Loaded] = field(default_factory=dict)
    gone: dict[int, float] = field(default_factory=dict)

    def needed(self, unit: Unit) -> list[Costs]:
        """The shards that must be loaded for a unit, the unit's own first, the others as they will run."""
        own = self.costs[unit.direction, unit.shard]
        if not self.plan.resident:
            return [own]
        order = [part.index for part in self.plan.shards if part.index != unit.shard]
        if unit.direction is Direction.BACKWARD:
            order.reverse()
        return [own, *(self.costs[unit.direction, shard] for shard in order)]


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
        self.plan = plan
        self.dispatcher = Dispatcher(plan, policy)
        self.workers = [_Worker(name, _Memory(budget)) for name, budget in plan.devices.items()]
        self.runs = [_Run(task, costs(task)) for task in plan.tasks]
        self.actions: list[Action] = []
        self.events: list[tuple[float, int, int]] = []

    def run(self) -> Timeline:
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

    def _wake(self, idle: list[int], now: float) -> None:
        """Give idle devices, the first first, what fits them."""
        still = []
        while idle and self.dispatcher.waits():
            device = heappop(idle)
            if not self._engage(device, now):
                still.append(device)
        for device in still:
            heappush(idle, device)

    def _engage(self, device: int, now: float) -> bool:
        """Let an idle device begin a task, if one waits that fits."""
        task = self.dispatcher.choose(self.workers[device].memory.budget, None)
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
        unit = self.dispatcher.begin(task)
        run.step = unit.step
        heappush(self.events, (run.end, _END, device))
        chosen = self.dispatcher.choose(worker.memory.budget, task)
        self._put_away(device, task, unit, chosen)
        if chosen is not None:
            self._commit(device, chosen, now)

    def _end(self, device: int, now: float) -> int | None:
        """A unit ended: its task waits, unless it goes on here. Returns an idle device."""
        worker = self.workers[device]
        task = worker.task
        assert task is not None
        if worker.queued != task:
            self.dispatcher.wait(task)
        if worker.queued is not None:
            return None
        worker.task = None
        return device

    def _put_away(self, device: int, task: int, unit: Unit, chosen: int | None) -> None:
        """Decide what becomes of the loaded shards of the unit that runs, from its end on."""
        run, worker = self.runs[task], self.workers[device]
        size, ready, owed = run.loaded[unit.shard]
        done = run.costs[unit.direction, unit.shard]
        owed = done.moved_out if done.settles else owed + done.moved_out
        run.loaded[unit.shard] = _Loaded(size, ready, min(size, owed))
        after = self.dispatcher.next(task)
        if after is None:
            self._leave(device, task, run.end)
        elif run.plan.resident:
            if chosen != task:
                worker.parked[task] = None
        else:
            extra = run.costs[after.direction, after.shard].extra
            size += extra + run.plan.beside_bytes(after.shard)
            stays = run.plan.stays(unit, after) and size <= worker.memory.budget
            if chosen != task:
                self._leave(device, task, run.end)
            elif not stays and not run.plan.keeps(unit.shard):
                self._evict(device, task, unit.shard, run.end)

    def _leave(self, device: int, task: int, at: float) -> None:
        """Evict all that a task has on a device, from the time ``at`` on."""
        run = self.runs[task]
        for shard in [*run.loaded]:
            self._evict(device, task, shard, at)
        run.device = None
        self.workers[device].parked.pop(task, None)

    def _evict(self, device: int, task: int, shard: int, at: float) -> None:
        run, worker = self.runs[task], self.workers[device]
        entry = run.loaded.pop(shard)
        start = max(at, worker.evicts, entry.ready)
        end = start + entry.owed / self.plan.evict_rate
        worker.evicts = run.gone[shard] = end
        run.host = max(run.host, end)
        worker.memory.change(end, -entry.size)
        self._act(Kind.EVICT, run, shard, run.step, worker, start, end, entry.size)

    def _commit(self, device: int, task: int, now: float) -> None:
        """Plan the next unit of a task on a device: its LOADs as early as they can be, then its computing."""
        run, worker = self.runs[task], self.workers[device]
        worker.memory.settle(now)
        if run.device is not None and run.device != device:
            self.workers[run.device].memory.settle(now)
            self._leave(run.device, task, now)
        run.device = device
        worker.parked.pop(task, None)
        unit = self.dispatcher.next(task)
        assert unit is not None
        fresh = run.costs[unit.direction, unit.shard].fresh
        needed = [shard for shard in run.needed(unit) if shard.shard not in run.loaded]
        self._make_room(worker, device, sum(shard.held for shard in needed) + fresh, now)
        for shard in needed:
            self._load(worker, run, shard, unit.step, now, goes_on=worker.task == task)
        start = max(now, run.loaded[unit.shard].ready, worker.computes, run.end)
        self._compute(worker, run, unit, worker.memory.earliest(start, fresh))
        worker.queued = task
        heappush(self.events, (worker.started, _START, device))

    def _make_room(self, worker: _Worker, device: int, size: int, now: float) -> None:
        while worker.parked and worker.memory.final() + size > worker.memory.budget:
            task = next(iter(worker.parked))
            self._leave(device, task, max(now, self.runs[task].end))

    def _load(self, worker: _Worker, run: _Run, shard: Costs, step: int, now: float, *, goes_on: bool) -> None:
        """Load a shard, when it (or, for a task that did not run here, all of it) is on the host."""
        there = run.gone.get(shard.shard, 0.0) if goes_on else run.host
        start = worker.memory.earliest(max(now, worker.loads, there), shard.held)
        end = start + shard.moved_in / self.plan.load_rate
        worker.loads = end
        worker.memory.change(start, shard.held)
        run.loaded[shard.shard] = _Loaded(shard.held, end, 0)
        self._act(Kind.LOAD, run, shard.shard, step, worker, start, end, shard.held)

    def _compute(self, worker: _Worker, run: _Run, unit: Unit, start: float) -> None:
        cost = run.costs[unit.direction, unit.shard]
        middle = start + cost.main
        run.end = middle + cost.update if unit.updates else middle
        worker.started, worker.computes = start, run.end
        worker.memory.change(start, cost.fresh)
        worker.memory.change(run.end, -cost.freed)
        if run.plan.recomputes(unit.direction, unit.shard):
            first, start = start, min(middle, start + run.plan.shards[unit.shard].forward)
            again = run.plan.again_bytes(unit.shard)
            self._act(Kind.RECOMPUTE, run, unit.shard, unit.step, worker, first, start, again)
        if unit.direction is not Direction.UPDATE:
            kind = PASSES[unit.direction]
            self._act(kind, run, unit.shard, unit.step, worker, start, middle, cost.extra)
        if unit.updates:
            self._act(Kind.STEP, run, unit.shard, unit.step, worker, middle, run.end, 0)

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
