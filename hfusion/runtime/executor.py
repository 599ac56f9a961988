"""Run a plan: the policy decides, each device computes one unit while the next is loaded and the last put away.

The same dispatcher that the simulator asks is asked here; its decisions meet real clocks. One condition guards what is
shared; nobody computes, copies or waits for a copy while holding it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from time import perf_counter

import torch

from hfusion.dispatch import Dispatcher
from hfusion.plan import Direction, Plan, TaskPlan, Unit
from hfusion.policy import Policy
from hfusion.runtime.copying import Ticket
from hfusion.runtime.lanes import Lanes
from hfusion.runtime.memory import Ledger, Stopped
from hfusion.runtime.process import Gate
from hfusion.runtime.training import Training
from hfusion.schedule import PASSES, Action, Kind, Timeline

_JOIN_SECONDS = 0.1


class TaskFailed(Exception):
    """A unit of the task numbered ``task`` raised ``__cause__``."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task


@dataclass(eq=False)
class _Load:
    """A shard on its way to a device. ``later``: a thread waits for room, or for ``waits``, before it can be copied."""

    unit: Unit
    shard: int
    size: int
    waits: list[_Leaving]
    ticket: Ticket | None = None
    later: Future[None] | None = None


@dataclass(eq=False)
class _Leaving:
    """A shard on its way back; ``ended``: its bytes have been given back."""

    task: int
    unit: Unit
    shard: int
    size: int
    worker: _Worker
    ticket: Ticket
    ended: bool = False


@dataclass
class _Run:
    """Where a task stands. ``loaded``: bytes held per shard; ``gone``: the last eviction of each shard."""

    plan: TaskPlan
    training: Training
    unit: Unit
    worker: _Worker | None = None
    loaded: dict[int, int] = field(default_factory=dict)
    gone: dict[int, _Leaving] = field(default_factory=dict)


@dataclass
class _Job:
    """The unit a device runs next, and the loads it waits for."""

    task: int
    loads: list[_Load]


@dataclass
class _Worker:
    """A device. ``leaving``: evictions that have begun. ``parked``: resident tasks that are loaded there but do not
    run, oldest first.
    """

    lanes: Lanes
    queued: _Job | None = None
    leaving: list[_Leaving] = field(default_factory=list)
    parked: dict[int, None] = field(default_factory=dict)


class Executor:
    """One run of a plan. ``after(task, unit)`` is called in a worker's thread when a unit has ended."""

    def __init__(
        self,
        plan: Plan,
        policy: Policy,
        devices: Mapping[str, torch.device],
        trainings: Sequence[Training],
        after: Callable[[int, Unit], None],
    ) -> None:
        self._plan = plan
        self._after = after
        self._changed = Condition()
        self._dispatcher = Dispatcher(plan, policy)
        self._gate = Gate()
        self._runs = [_Run(task, training, task.unit(0)) for task, training in zip(plan.tasks, trainings, strict=True)]
        threads = torch.get_num_threads()
        self._workers = [
            _Worker(Lanes(Ledger(name, budget), devices[name], threads)) for name, budget in plan.devices.items()
        ]
        self._actions: list[Action] = []
        self._error: BaseException | None = None
        self._stopping = False
        self._start = 0.0

    def run(self) -> None:
        """Train everything. Raises TaskFailed for the first unit that fails; in the end no thread is left."""
        threads = [Thread(target=self._work, args=(worker,), name=worker.lanes.name) for worker in self._workers]
        self._start = perf_counter()
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                for thread in threads:
                    # With a time limit, so that Ctrl-C comes through.
                    thread.join(_JOIN_SECONDS)
            self._await_evictions()
        finally:
            self._stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.join()
            for worker in self._workers:
                worker.lanes.close()
        if self._error is not None:
            raise self._error

    @property
    def timeline(self) -> Timeline:
        """What has run so far."""
        actions = sorted(self._actions, key=lambda action: action.start)
        return Timeline(tuple(actions), tuple(self._plan.devices), self._plan.lower_bound)

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes that were accounted for at one time, per device."""
        return {worker.lanes.name: worker.lanes.ledger.peak for worker in self._workers}

    def done(self, task: int) -> bool:
        """Whether all units of a task have run and its state is at home."""
        run = self._runs[task]
        ended = all(leaving.ended for leaving in run.gone.values())
        return self._dispatcher.next(task) is None and not run.loaded and ended

    def _stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def _await_evictions(self) -> None:
        """The last evictions go on after the workers have ended."""
        for worker in self._workers:
            for leaving in [*worker.leaving]:
                with suppress(Stopped):
                    self._settle(leaving)

    def _fail(self, task: int, error: BaseException) -> None:
        with self._changed:
            if self._error is None:
                self._error = TaskFailed(task)
                self._error.__cause__ = error
        self._stop()

    def _work(self, worker: _Worker) -> None:
        """The thread of one device."""
        while True:
            job = self._next_job(worker)
            if job is None:
                return
            try:
                self._run_job(worker, job)
            except (Stopped, CancelledError):
                return
            except BaseException as error:
                self._fail(job.task, error)
                return

    def _next_job(self, worker: _Worker) -> _Job | None:
        """The job that is queued, or what the policy finds; None if nothing is left to do."""
        with self._changed:
            while not self._stopping:
                if worker.queued is not None:
                    job, worker.queued = worker.queued, None
                    return job
                chosen = self._dispatcher.choose(worker.lanes.ledger.budget, None)
                if chosen is not None:
                    self._commit(worker, chosen)
                elif self._dispatcher.left():
                    self._changed.wait()
                else:
                    return None
        return None

    def _run_job(self, worker: _Worker, job: _Job) -> None:
        run = self._runs[job.task]
        self._await_loads(worker, job)
        unit = self._dispatcher.next(job.task)
        assert unit is not None
        extra = run.plan.extra_bytes(unit.direction, unit.shard)
        self._take(worker, extra)
        with self._changed:
            run.unit = self._dispatcher.begin(job.task)
            after = self._dispatcher.next(job.task)
            chosen = self._dispatcher.choose(worker.lanes.ledger.budget, job.task)
            goes_on = chosen == job.task and after is not None
            stays = goes_on and after is not None and self._stays(worker, run, after)
            # A shard that must be loaded anew is put away first.
            late = goes_on and after is not None and not stays and after.shard == unit.shard
            if chosen is not None and not late:
                self._commit(worker, chosen, staying=unit.shard if stays else None)
        self._compute(worker, job.task, unit, extra)
        with self._changed:
            worker.lanes.ledger.give(extra)
            self._put_away(worker, job.task, unit, goes_on=goes_on, stays=stays, more=after is not None)
            if late and chosen is not None:
                self._commit(worker, chosen)
            if not goes_on:
                self._dispatcher.wait(job.task)
            self._changed.notify_all()
        self._after(job.task, unit)

    def _stays(self, worker: _Worker, run: _Run, after: Unit) -> bool:
        """Whether what is loaded for the unit that begins can stay for the one after it."""
        if run.plan.resident:
            return True
        size = run.loaded[run.unit.shard] + run.plan.extra_bytes(after.direction, after.shard)
        return run.plan.stays(run.unit, after) and size <= worker.lanes.ledger.budget

    def _commit(self, worker: _Worker, task: int, staying: int | None = None) -> None:
        """Queue a task's next unit, and begin to load what it needs, as early as that can be."""
        run, unit = self._runs[task], self._dispatcher.next(task)
        assert unit is not None
        if run.worker is not worker:
            if run.worker is not None:
                self._leave(run.worker, task)
            waits = list(run.gone.values())
        else:
            waits = [run.gone[shard] for shard in run.training.needs(unit) if shard in run.gone]
        run.worker = worker
        worker.parked.pop(task, None)
        shards = [unit.shard, *range(len(run.plan.shards))] if run.plan.resident else [unit.shard]
        missing = [shard for shard in dict.fromkeys(shards) if shard not in run.loaded and shard != staying]
        held = {shard: run.plan.held_bytes(unit.direction, shard) for shard in missing}
        run.loaded |= held
        self._make_room(worker, self._need(task))
        worker.queued = job = _Job(task, [_Load(unit, shard, size, waits) for shard, size in held.items()])
        self._begin_loads(worker, job)

    def _begin_loads(self, worker: _Worker, job: _Job) -> None:
        """Copy what there is room for; a thread waits for the room of the others."""
        for number, load in enumerate(job.loads):
            self._reap(worker)
            if any(not each.ended for each in load.waits) or not worker.lanes.ledger.take(load.size):
                for each in job.loads[number:]:
                    each.later = worker.lanes.later.submit(self._load_later, worker, job.task, each)
                return
            self._load(worker, job.task, load)

    def _load_later(self, worker: _Worker, task: int, load: _Load) -> None:
        for leaving in load.waits:
            self._settle(leaving)
        self._take(worker, load.size)
        self._load(worker, task, load)

    def _load(self, worker: _Worker, task: int, load: _Load) -> None:
        """Begin to copy a shard for which there is room."""
        lanes = worker.lanes
        try:
            load.ticket = self._runs[task].training.load(load.unit, load.shard, lanes.device, lanes.into)
        except Exception as error:
            self._fail(task, error)
            raise Stopped from error

    def _await_loads(self, worker: _Worker, job: _Job) -> None:
        for load in job.loads:
            if load.later is not None:
                load.later.result()
            assert load.ticket is not None
            began, ended = load.ticket.wait()
            self._note(Kind.LOAD, load.unit, load.shard, worker, began, ended, load.size)

    def _take(self, worker: _Worker, size: int) -> None:
        """Wait until ``size`` more bytes fit, and take them. Raises Stopped when the run ends before."""
        while True:
            with self._changed:
                if self._stopping:
                    raise Stopped
                self._reap(worker)
                if worker.lanes.ledger.take(size):
                    return
                first = next(iter(worker.leaving), None)
                if first is None:
                    self._changed.wait()
                    continue
            self._settle(first)

    def _reap(self, worker: _Worker) -> None:
        """Give back what evictions that have come to their end held."""
        for leaving in [*worker.leaving]:
            if leaving.ticket.done:
                self._settle(leaving)

    def _settle(self, leaving: _Leaving) -> None:
        """Wait for the end of an eviction, and give back what it held."""
        try:
            began, ended = leaving.ticket.wait()
        except Exception as error:
            self._fail(leaving.task, error)
            raise Stopped from error
        with self._changed:
            if leaving.ended:
                return
            leaving.ended = True
            leaving.worker.leaving.remove(leaving)
            leaving.worker.lanes.ledger.give(leaving.size)
            self._note(Kind.EVICT, leaving.unit, leaving.shard, leaving.worker, began, ended, leaving.size)
            self._changed.notify_all()

    def _make_room(self, worker: _Worker, size: int) -> None:
        """Let parked tasks leave, the oldest first, until ``size`` bytes will fit beside those that stay."""

        def parked() -> int:
            return sum(sum(self._runs[task].loaded.values()) for task in worker.parked)

        while worker.parked and parked() + size > worker.lanes.ledger.budget:
            self._leave(worker, next(iter(worker.parked)))

    def _put_away(self, worker: _Worker, task: int, unit: Unit, *, goes_on: bool, stays: bool, more: bool) -> None:
        """Decide what becomes of the loaded shards of a unit that has ended."""
        run = self._runs[task]
        if not run.plan.resident:
            if not goes_on:
                self._leave(worker, task)
            elif not stays:
                self._evict(worker, task, unit.shard, leave=False)
        elif not more:
            self._leave(worker, task)
        elif not goes_on:
            worker.parked[task] = None
            if worker.queued is not None:
                self._make_room(worker, self._need(worker.queued.task))

    def _need(self, task: int) -> int:
        """Bytes that a task's next unit will hold and take."""
        run, unit = self._runs[task], self._dispatcher.next(task)
        assert unit is not None
        return sum(run.loaded.values()) + run.plan.extra_bytes(unit.direction, unit.shard)

    def _leave(self, worker: _Worker, task: int) -> None:
        """Evict all that a task has on a device."""
        worker.parked.pop(task, None)
        for shard in list(self._runs[task].loaded):
            self._evict(worker, task, shard, leave=True)
        self._runs[task].worker = None

    def _evict(self, worker: _Worker, task: int, shard: int, *, leave: bool) -> None:
        run = self._runs[task]
        size, unit = run.loaded.pop(shard), run.unit
        try:
            ticket = run.training.put_away(shard, worker.lanes.out, leave=leave)
        except Exception as error:
            self._fail(task, error)
            raise Stopped from error
        run.gone[shard] = leaving = _Leaving(task, unit, shard, size, worker, ticket)
        worker.leaving.append(leaving)
        self._changed.notify_all()

    def _compute(self, worker: _Worker, task: int, unit: Unit, extra: int) -> None:
        training, lanes = self._runs[task].training, worker.lanes
        start = perf_counter()
        if unit.direction is not Direction.UPDATE:
            lanes.compute(lambda: training.run(unit, lanes.device, self._gate))
            start = self._act(PASSES[unit.direction], unit, worker, start, extra)
        if unit.updates:
            lanes.compute(lambda: training.update(unit, self._gate))
            self._act(Kind.STEP, unit, worker, start, 0)

    def _act(self, kind: Kind, unit: Unit, worker: _Worker, start: float, size: int) -> float:
        """Note what ended now; returns the time."""
        end = perf_counter()
        self._note(kind, unit, unit.shard, worker, start, end, size)
        return end

    def _note(self, kind: Kind, unit: Unit, shard: int, worker: _Worker, start: float, end: float, size: int) -> None:
        times = (start - self._start, end - self._start)
        self._actions.append(Action(kind, unit.task, shard, unit.step, worker.lanes.name, *times, size))
