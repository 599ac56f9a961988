"""The engine: it decides what each device does, and a worker executes or simulates it.

A device computes one unit while it loads the next shard (double buffering). The next unit is chosen when one starts.
All decisions are made in one thread, when an action ends; an action starts only if its bytes are free.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from itertools import count
from math import ceil, fsum
from statistics import median
from typing import Protocol, TypeAlias

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act, Action, Section, estimate
from hfusion.schedule.plan import Phase, Plan, TaskPlan, Unit, UnitActions
from hfusion.schedule.policy import DEFAULT, Dispatcher, Policy, named
from hfusion.schedule.timeline import Span, Timeline


@dataclass(eq=False)
class _HeldShard:
    """A shard that is loaded, or will be, for ``unit``. ``owed``: evictions of its units so far, merged at its end."""

    load: Action
    unit: Unit
    waits: list[Ticket]
    ticket: Ticket | None = None
    owed: set[Action] = field(default_factory=set)


@dataclass(eq=False)
class _Run:
    """State of a task.

    ``unit``: the unit that started last; ``evictions``: the last eviction of each shard; ``taken``: the bytes that its
    computations have taken and not freed.
    """

    number: int
    plan: TaskPlan
    unit: Unit
    device: _DeviceState | None = None
    held: dict[int, _HeldShard] = field(default_factory=dict)
    evictions: dict[int, Ticket] = field(default_factory=dict)
    taken: int = 0

    @property
    def size(self) -> int:
        """Bytes of all shards that are loaded or being loaded."""
        return sum(held.load.takes for held in self.held.values())


@dataclass(eq=False)
class _Visit:
    """A unit that a device runs, or runs next. ``tickets``: its computations that have begun and not ended.

    ``empty``: nothing is computed because the task was stopped.
    """

    run: _Run
    unit: Unit
    actions: UnitActions
    tickets: dict[Ticket, Action] = field(default_factory=dict)
    submitted: bool = False
    started: bool = False
    goes_on: bool = False
    empty: bool = False

    @property
    def load(self) -> Ticket | None:
        """The ticket of its shard's load; None if that cannot start yet."""
        return self.run.held[self.unit.shard].ticket

    @property
    def frees(self) -> int:
        """Bytes that its computations free when they end."""
        return sum(action.frees for action in self.tickets.values())


@dataclass(eq=False)
class _DeviceState:
    """State of a device. ``current``: the unit that runs, ``queued``: the next one.

    ``loads``: loads that wait for memory or for evictions, in order. ``parked``: resident tasks that are loaded but do
    not run, oldest first.
    """

    number: int
    name: str
    budget: int
    allocated: int = 0
    peak: int = 0
    current: _Visit | None = None
    queued: _Visit | None = None
    loads: deque[tuple[_Run, _HeldShard]] = field(default_factory=deque)
    parked: dict[_Run, None] = field(default_factory=dict)

    @property
    def reserved(self) -> int:
        """Bytes that the queued unit, if it has begun, needs beyond those that the current unit frees."""
        if self.queued is None or not self.queued.submitted:
            return 0
        return max(0, self.queued.actions.takes - (0 if self.current is None else self.current.frees))

    def fits(self, size: int) -> bool:
        return self.allocated + self.reserved + size <= self.budget

    def take(self, size: int) -> None:
        self.allocated += size
        self.note()

    def take_unit(self, visit: _Visit) -> None:
        """Take what the computations of a unit take."""
        visit.run.taken += visit.actions.takes
        self.take(visit.actions.takes)

    def note(self) -> None:
        self.peak = max(self.peak, self.allocated + self.reserved)


class Engine:
    """Runs a plan once.

    Args:
        over: called with a task after each of its units. Returns whether the task ends before its plan does; the worker
            then only loads and evicts for it.
        first: how many units of each task ran in an earlier run; None for a new run.
    """

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        worker: Worker,
        over: Callable[[int], bool] = lambda task: False,
        first: Sequence[int] | None = None,
    ) -> None:
        self._plan = plan
        self._worker = worker
        self._over = over
        self._dispatcher = Dispatcher(plan, policy, first)
        self._runs = [_Run(number, task, task.unit(0)) for number, task in enumerate(plan.tasks)]
        self._devices = [_DeviceState(number, *device) for number, device in enumerate(plan.devices.items())]
        self._idle: list[int] = []
        self._unfinished_actions: dict[Ticket, tuple[_DeviceState, _Run, Unit, Action]] = {}
        self._spans: list[Span] = []

    def run(self) -> None:
        """Run all tasks. Raises TaskFailed, and PlanError if the policy leaves all devices idle or breaks its rules."""
        self._idle = [device.number for device in self._devices]
        self._wake()
        while self._unfinished_actions:
            for ticket in self._worker.wait():
                self._end(ticket)
        if self._dispatcher.has_waiting():
            raise PlanError("the policy gave None to every device while none ran and tasks waited: let it choose one")
        if self._dispatcher.unfinished():
            raise AssertionError(f"nothing runs, but not all has ended: {self._devices}")
        if any(device.allocated for device in self._devices):
            raise AssertionError(f"all has ended, but not all is free: {self._devices}")

    @property
    def timeline(self) -> Timeline:
        """Return the actions that have ended so far."""
        spans = sorted(self._spans, key=lambda span: span.start)
        return Timeline(tuple(spans), tuple(self._plan.devices), self._plan.lower_bound)

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes allocated at one time, by device."""
        return {device.name: device.peak for device in self._devices}

    def done(self, task: int) -> bool:
        """Return whether all units of a task have run and its state is back in host memory."""
        run = self._runs[task]
        at_home = not run.held and all(ticket.done for ticket in run.evictions.values())
        return self._dispatcher.next(task) is None and at_home

    def _submit_action(
        self, device: _DeviceState, run: _Run, unit: Unit, action: Action, after: Sequence[Ticket]
    ) -> Ticket:
        ticket = self._worker.begin(device.number, run.number, unit, action, after)
        self._unfinished_actions[ticket] = device, run, unit, action
        return ticket

    def _end(self, ticket: Ticket) -> None:
        """Handle the end of an action."""
        device, run, unit, action = self._unfinished_actions.pop(ticket)
        size = max(action.takes, action.frees)
        name = (run.plan.name, action.shard, unit.step, device.name)
        visit, computes = device.current, action.act.lane == "compute"
        if not (computes and visit is not None and visit.empty):
            self._spans.append(Span(action.act, *name, ticket.started, ticket.ended, size))
        device.allocated -= action.frees
        if computes:
            assert visit is not None
            run.taken -= action.frees
            del visit.tickets[ticket]
            if not visit.tickets:
                self._leave_visit(device, visit)
        self._advance(device)
        if run.device is not None and run.device is not device:
            # The task has moved: its loads there may wait for this eviction.
            self._advance(run.device)

    def _leave_visit(self, device: _DeviceState, visit: _Visit) -> None:
        """Handle the end of a unit's computing: its task waits, unless it continues on this device."""
        if self._over(visit.run.number):
            self._stop(device, visit.run)
        if self._dispatcher.next(visit.run.number) is None:
            # A task that was stopped will not free what it has taken for the rest of its minibatch.
            device.allocated, visit.run.taken = device.allocated - visit.run.taken, 0
        if not visit.goes_on:
            if visit.run.plan.resident and self._dispatcher.next(visit.run.number) is not None:
                device.parked[visit.run] = None
                self._make_room(device)
            self._dispatcher.add_waiting(visit.run.number)
        device.current = None
        self._promote(device)
        if device.current is None:
            heappush(self._idle, device.number)
        self._wake()

    def _stop(self, device: _DeviceState, run: _Run) -> None:
        """End a stopped task after its unit: by an empty unit if one is queued, else immediately."""
        queued = device.queued is not None and device.queued.run is run
        self._dispatcher.end(run.number, int(queued))
        if device.queued is not None and queued:
            device.queued.empty = True
        elif run.held:
            self._leave(device, run)

    def _promote(self, device: _DeviceState) -> None:
        """Start the queued unit."""
        device.current, device.queued = device.queued, None
        if device.current is not None and device.current.submitted:
            device.take_unit(device.current)

    def _wake(self) -> None:
        """Let idle devices, in order, begin waiting tasks that fit."""
        still = []
        while self._idle and self._dispatcher.has_waiting():
            device = self._devices[heappop(self._idle)]
            chosen = self._dispatcher.choose(device.budget, None)
            if chosen is None:
                still.append(device.number)
            else:
                self._queue(device, self._runs[chosen])
                self._advance(device)
        for number in still:
            heappush(self._idle, number)

    def _advance(self, device: _DeviceState) -> None:
        """Begin the actions of a device that are ready."""
        while True:
            self._load(device)
            if device.current is None:
                self._promote(device)
            visit = device.current
            if visit is None:
                return
            # It can begin once its shard is loading, and the bytes it takes are free.
            if not visit.submitted and visit.load is not None and device.fits(visit.actions.takes):
                device.take_unit(visit)
                self._compute(device, visit)
            if visit.started or not visit.submitted or visit.load is None or not visit.load.done:
                break
            self._start(device, visit)
        queued = device.queued
        if queued is None or queued.submitted or queued.load is None or not visit.started:
            return
        if device.fits(max(0, queued.actions.takes - visit.frees)):
            self._compute(device, queued)
            device.note()

    def _compute(self, device: _DeviceState, visit: _Visit) -> None:
        visit.submitted = True
        after = [] if visit.load is None else [visit.load]
        for action in visit.actions.computes:
            visit.tickets[self._submit_action(device, visit.run, visit.unit, action, after)] = action

    def _start(self, device: _DeviceState, visit: _Visit) -> None:
        """Start a unit; choose the unit after it and the shards that stay loaded."""
        visit.started, run = True, visit.run
        run.unit = self._dispatcher.begin_unit(run.number)
        after = self._dispatcher.next(run.number)
        chosen = self._dispatcher.choose(device.budget, run.number)
        visit.goes_on = chosen == run.number and after is not None
        held = run.held[visit.unit.shard]
        held.owed.add(visit.actions.evict)
        if after is None or not (visit.goes_on or run.plan.resident):
            self._leave(device, run)
        elif visit.actions.evicts_shard and not self._reuses(device, run, visit.unit, after, held):
            self._evict(device, run, visit.unit.shard)
        if chosen is not None:
            self._queue(device, self._runs[chosen])
            self._load(device)

    def _reuses(self, device: _DeviceState, run: _Run, before: Unit, after: Unit, held: _HeldShard) -> bool:
        """Return whether the next unit needs only shards that are loaded for this one and can stay until then."""
        actions = run.plan.actions_of(after)
        if before.shard != after.shard or actions.load is None:
            return before.shard == after.shard
        return actions.load.sections <= held.load.sections and held.load.takes + actions.other_peak <= device.budget

    def _queue(self, device: _DeviceState, run: _Run) -> None:
        """Queue a task's next unit on a device, and load its shards as early as possible."""
        unit = self._dispatcher.next(run.number)
        assert unit is not None
        device.queued = visit = _Visit(run, unit, run.plan.actions_of(unit))
        moved = run.device is not device
        if moved and run.device is not None:
            self._leave(run.device, run)
        run.device = device
        device.parked.pop(run, None)
        waits = run.evictions.keys() if moved else visit.actions.waits
        loads = [visit.actions.load, *run.plan.pins.values()]
        for load in sorted(filter(None, loads), key=lambda load: load.shard != unit.shard):
            if load.shard not in run.held:
                evictions = [run.evictions[shard] for shard in waits if shard in run.evictions]
                run.held[load.shard] = held = _HeldShard(load, unit, evictions)
                device.loads.append((run, held))
        self._make_room(device)

    def _load(self, device: _DeviceState) -> None:
        """Begin loads in order, up to the first that must wait for memory or for an eviction."""
        while device.loads:
            run, held = device.loads[0]
            if not all(ticket.done for ticket in held.waits) or not device.fits(held.load.takes):
                return
            device.loads.popleft()
            device.take(held.load.takes)
            held.ticket = self._submit_action(device, run, held.unit, held.load, ())

    def _make_room(self, device: _DeviceState) -> None:
        """Evict parked tasks, the oldest first, until the next unit's task fits."""
        if device.queued is None:
            return
        size = device.queued.run.size + device.queued.actions.extra
        while device.parked and sum(run.size for run in device.parked) + size > device.budget:
            self._leave(device, next(iter(device.parked)))

    def _leave(self, device: _DeviceState, run: _Run) -> None:
        """Evict all shards of a task from a device."""
        device.parked.pop(run, None)
        for shard in [*run.held]:
            self._evict(device, run, shard, leaves=True)
        run.device = None

    def _evict(self, device: _DeviceState, run: _Run, shard: int, *, leaves: bool = False) -> None:
        """Evict a shard when it is no longer used; ``leaves``: also the other memory of its task on the device."""
        held = run.held.pop(shard)
        if held.ticket is None:
            device.loads.remove((run, held))
            return
        running = device.current.tickets if device.current is not None and device.current.run is run else ()
        sections = held.load.sections | ({Section.SAVED} if leaves else set())
        size = held.load.takes
        moves = min(size, sum(action.moves for action in held.owed))
        action = Action(Act.EVICT, shard, sections, frees=size, moves=moves)
        run.evictions[shard] = self._submit_action(device, run, run.unit, action, (held.ticket, *running))


# The protocol between the engine and its workers: requests and reports.


class Ticket(Protocol):
    """An action that began. Once ``done``, it has its ``started`` and ``ended`` times.

    It starts when all actions that it waits for have ended, so the worker's overhead to begin it counts as its time.
    """

    @property
    def done(self) -> bool: ...

    @property
    def started(self) -> float: ...

    @property
    def ended(self) -> float: ...


class Worker(Protocol):
    """Executes the actions of the engine. Each lane of a device runs one action at a time, in the order they began."""

    def begin(self, device: int, task: int, unit: Unit, action: Action, after: Sequence[Ticket]) -> Ticket:
        """Begin an action for a unit, as soon as the actions of the tickets ``after`` have ended."""

    def wait(self) -> Sequence[Ticket]:
        """Wait until at least one action has ended, and return those that have. Raises TaskFailed."""


class TaskFailed(Exception):
    """An action of the task numbered ``task`` raised ``__cause__``."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task


# Slices of several minibatches of a resident task, which are scheduled together to share the cost of a decision.

# Estimated seconds of a slice. A decision takes some 0.2 ms of it, and other tasks wait at most this long.
_SECONDS = 0.05


@dataclass(frozen=True)
class Slices:
    """Groups the minibatches of a resident plan into slices of ``size``; the last slice of an epoch may be smaller."""

    plan: TaskPlan
    size: int

    @classmethod
    def of(cls, plan: TaskPlan, alone: bool) -> Slices:
        """Return slices of a short estimated duration; of a whole epoch for a task ``alone`` on its device."""
        epoch = plan.steps // plan.epochs
        if alone or not plan.step_seconds:
            return cls(plan, epoch)
        return cls(plan, max(1, min(int(_SECONDS / plan.step_seconds), epoch)))

    @property
    def _epoch(self) -> int:
        return self.plan.steps // self.plan.epochs

    @property
    def _count(self) -> int:
        """Number of slices per epoch."""
        return ceil(self._epoch / self.size)

    @cached_property
    def scheduled(self) -> TaskPlan:
        """The plan for the engine: each slice counts as one minibatch, all computed in its backward."""
        (shard,) = self.plan.shards
        updates = ceil(self._epoch / self.plan.accumulate)
        seconds = self._epoch * (shard.forward + shard.backward) + updates * shard.step
        # Subtract the forward seconds, which stay in ``forward`` because evaluations use them, too.
        whole = replace(shard, backward=max(0.0, seconds / self._count - shard.forward), step=0.0)
        steps = self.plan.epochs * self._count
        return replace(
            self.plan,
            shards=(whole,),
            steps=steps,
            epoch=self._count,
            # So that the engine reserves memory for gradients that outlive a minibatch.
            accumulate=2 if self.plan.carried else 1,
            clipped=False,
            # A save may be due within a slice, so the training itself makes it.
            save_every=None,
        )

    def first(self, index: int) -> int:
        """Return the first minibatch of a slice."""
        epoch, position = divmod(index, self._count)
        return epoch * self._epoch + position * self.size

    def end(self, index: int) -> int:
        """Return the number of minibatches that have ended after a slice."""
        return min(self.first(index) + self.size, (index // self._count + 1) * self._epoch)

    def unit_index_after(self, steps: int) -> int:
        """Return the index of the scheduled unit that follows ``steps`` minibatches, which may end within a slice."""
        epoch, rest = divmod(steps, self._epoch)
        return epoch * (2 * self._count + self.plan.evaluated) + 2 * (rest // self.size)

    def unit(self, step: int, phase: Phase) -> Unit:
        """Return the unit of a single minibatch in the original plan."""
        updates = self.plan.closes(step) and (
            phase is Phase.UPDATE or (phase is Phase.BACKWARD and not self.plan.clipped)
        )
        return Unit(self.plan.name, step, phase, 0, updates)

    def spans(self, spans: Iterable[Span], start: int, done: int) -> Iterator[Span]:
        """Yield ``spans`` with those of slices divided among the actions of their minibatches, by estimated seconds.

        ``start``, ``done``: how many minibatches had ended before the run, and at its end.
        """
        for span in spans:
            # Nothing is computed in the forward of a slice, and its backward may have waited for memory.
            if span.act is Act.BACKWARD:
                # The task may have begun, or ended, within the slice.
                steps = range(max(start, self.first(span.step)), min(self.end(span.step), done))
                actions = [(step, action) for step in steps for action in self._computes(step)]
                total, moment = fsum(action.seconds for _, action in actions), span.start
                for step, action in actions:
                    share = action.seconds / total if total else 1 / len(actions)
                    begins, moment = moment, min(span.end, moment + share * (span.end - span.start))
                    size = max(action.takes, action.frees)
                    yield replace(span, act=action.act, step=step, start=begins, end=moment, bytes=size)
            elif span.act in (Act.LOAD, Act.EVICT):
                yield replace(span, step=self.first(span.step))
            elif span.act is Act.EVALUATE:
                yield span
                if self.plan.saves(Unit(self.plan.name, span.step, Phase.EVALUATE, 0, False)):
                    yield replace(span, act=Act.SAVE, start=span.end, bytes=0)

    def _computes(self, step: int) -> Iterator[Action]:
        clipped = self.plan.clipped and self.plan.closes(step)
        for phase in (Phase.FORWARD, Phase.BACKWARD, *([Phase.UPDATE] if clipped else ())):
            yield from self.plan.actions_of(self.unit(step, phase)).computes


# Simulate a plan: the timeline of a run in which every action takes its estimated seconds.

Seconds: TypeAlias = Callable[[int, Unit, Action], float]


def simulate(plan: Plan, policy: str | Policy = DEFAULT, measured: Timeline | None = None) -> Timeline:
    """Simulate ``plan`` under a policy, or the name of one.

    ``measured``: the timeline of a run, whose seconds replace the estimates of actions of the same kind. Raises
    PlanError for a wrong plan, policy or timeline.

    Example:
        >>> import torch, hfusion as hf
        >>> task = hf.Task(
        ...     [torch.nn.Linear(2, 1) for _ in range(2)],
        ...     torch.nn.functional.mse_loss,
        ...     lambda params: hf.optim.SGD(params, lr=0.1),
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ... )
        >>> made = hf.plan([task], hf.Machine([hf.Device("cpu", memory="1GiB")]))
        >>> hf.simulate(made).makespan > 0
        True
    """
    if not isinstance(plan, Plan):
        raise PlanError(
            f"hf.simulate expects a plan, got {type(plan).__name__}. Give what hf.plan(tasks, machine) returned."
        )
    if measured is not None and not isinstance(measured, Timeline):
        raise PlanError(f"measured must be a timeline, such as report.timeline, got {type(measured).__name__}")

    def estimated(task: int, unit: Unit, action: Action) -> float:
        overhead = plan.action_seconds if action.act.lane == "compute" else 0.0
        return estimate(action, plan.load_rate, plan.evict_rate) + overhead

    seconds = estimated if measured is None else _measured_seconds(plan, measured, estimated)
    engine = Engine(plan, named(policy), VirtualWorker(seconds))
    engine.run()
    return engine.timeline


@dataclass(eq=False)
class _SimulatedAction:
    """A simulated action. Its end is known when it begins."""

    started: float
    ended: float
    done: bool = False


class VirtualWorker:
    """A worker that only advances a clock. ``seconds(task, unit, action)`` returns how long an action takes."""

    def __init__(self, seconds: Seconds) -> None:
        self._seconds = seconds
        self._clock = 0.0
        self._free: dict[tuple[int, str], float] = defaultdict(float)
        self._running: list[tuple[float, int, _SimulatedAction]] = []
        self._count = count()

    def begin(self, device: int, task: int, unit: Unit, action: Action, after: Sequence[Ticket]) -> Ticket:
        lane = device, action.act.lane
        started = max(self._clock, self._free[lane], *(ticket.ended for ticket in after))
        ticket = _SimulatedAction(started, started + self._seconds(task, unit, action))
        self._free[lane] = ticket.ended
        heappush(self._running, (ticket.ended, next(self._count), ticket))
        return ticket

    def wait(self) -> Sequence[Ticket]:
        self._clock, _, ticket = heappop(self._running)
        ticket.done = True
        return (ticket,)


def _measured_seconds(plan: Plan, run: Timeline, otherwise: Seconds) -> Seconds:
    """Return seconds measured in the same minibatch; without one, the median of all minibatches; else the estimate."""
    took: dict[tuple[str, Act, int, int], deque[float]] = defaultdict(deque)
    every: dict[tuple[str, Act, int], list[float]] = defaultdict(list)
    for span in run.actions:
        took[span.task, span.act, span.shard, span.step].append(span.end - span.start)
        every[span.task, span.act, span.shard].append(span.end - span.start)
    middle = {key: median(durations) for key, durations in every.items()}

    def seconds(task: int, unit: Unit, action: Action) -> float:
        key = plan.tasks[task].name, action.act, action.shard
        if measured := took.get((*key, unit.step)):
            return measured.popleft()
        return middle[key] if key in middle else otherwise(task, unit, action)

    return seconds
