"""Run a plan: the policy decides, each device computes one unit while others are loaded and the last put away.

The same dispatcher that the simulator asks is asked here; its decisions meet real clocks. The simulator loads for the
next unit only, here those after it are loaded, too, where there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from time import perf_counter

import torch

from hfusion.runtime.ending import Ending, Stopped, WorkerThread, finish
from hfusion.runtime.lanes import Lanes
from hfusion.runtime.memory import Ledger
from hfusion.runtime.process import Gate
from hfusion.runtime.traffic import Run, Traffic, Worker
from hfusion.runtime.training import Training
from hfusion.schedule.actions import Act
from hfusion.schedule.dispatch import Dispatcher
from hfusion.schedule.plan import Phase, Plan, Unit
from hfusion.schedule.policy import Policy
from hfusion.schedule.timeline import PASSES, Timeline


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
        self._trainings = trainings
        self._ending = Ending(self._release)
        self._changed = self._ending.changed
        self._dispatcher = Dispatcher(plan, policy)
        self._gate = Gate()
        threads = torch.get_num_threads()
        self._workers = [
            Worker(Lanes(Ledger(name, budget), devices[name], threads)) for name, budget in plan.devices.items()
        ]
        self._traffic = Traffic(plan, trainings, self._ending)

    def run(self) -> None:
        """Train everything. Raises TaskFailed for the first unit that fails; in the end no thread is left."""
        threads = [WorkerThread(partial(self._work, worker), worker.lanes.name) for worker in self._workers]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.wait()
            # The last evictions go on after the workers have ended.
            for worker in self._workers:
                with suppress(Stopped):
                    self._traffic.settle(worker)
        finally:
            try:
                finish(self._ending, threads)
            finally:
                for worker in self._workers:
                    worker.lanes.close()
        if self._ending.error is not None:
            raise self._ending.error

    @property
    def timeline(self) -> Timeline:
        """What has run so far."""
        actions = sorted(self._traffic.actions, key=lambda action: action.start)
        return Timeline(tuple(actions), tuple(self._plan.devices), self._plan.lower_bound)

    @property
    def peak(self) -> dict[str, int]:
        """The most bytes that were accounted for at one time, per device."""
        return {worker.lanes.name: worker.lanes.ledger.peak for worker in self._workers}

    def done(self, task: int) -> bool:
        """Whether all units of a task have run and its state is at home."""
        run = self._traffic.runs[task]
        ended = all(leaving.ended for leaving in run.gone.values())
        return self._dispatcher.next(task) is None and not run.loaded and ended

    def _release(self) -> None:
        """Nobody waits for a loader any longer."""
        for training in self._trainings:
            training.stop()

    def _work(self, worker: Worker) -> None:
        """The thread of one device."""
        while True:
            task = self._next_task(worker)
            if task is None:
                return
            try:
                self._run_unit(worker, task)
            except (Stopped, CancelledError):
                return
            except BaseException as error:
                self._ending.failed(task, error)
                return

    def _next_task(self, worker: Worker) -> int | None:
        """The task that is queued, or what the policy finds; None if nothing is left to do."""
        with self._changed:
            while not self._ending.stopping:
                if worker.queued is not None:
                    task, worker.queued = worker.queued, None
                    return task
                chosen = self._dispatcher.choose(worker.lanes.ledger.budget, None)
                if chosen is not None:
                    self._queue(worker, chosen)
                elif self._dispatcher.left():
                    self._changed.wait()
                else:
                    return None
        return None

    def _run_unit(self, worker: Worker, task: int) -> None:
        run, traffic = self._traffic.runs[task], self._traffic
        unit = self._next(task)
        traffic.await_loads(worker, task, unit)
        now, later = run.fresh(unit)
        traffic.take(worker, now, later)
        with self._changed:
            run.unit = self._dispatcher.begin(task)
            after = self._dispatcher.next(task)
            chosen = self._dispatcher.choose(worker.lanes.ledger.budget, task)
            goes_on = chosen == task and after is not None
            stays = goes_on and after is not None and self._stays(worker, run, after)
            # A shard that must be loaded anew is put away first.
            late = goes_on and after is not None and not stays and after.shard == unit.shard
            if chosen is not None and not late:
                self._queue(worker, chosen, staying=unit.shard if stays else None)
                if goes_on and not run.plan.resident:
                    traffic.fetch_ahead(worker, task, self._dispatcher.rest(task))
        if run.recomputes(unit):
            self._recompute(worker, task, unit, now)
            traffic.redeem(worker, later)
        self._compute(worker, task, unit)
        with self._changed:
            worker.lanes.ledger.give(run.freed(unit))
            self._put_away(worker, task, unit, goes_on=goes_on, stays=stays, more=after is not None)
            if late and chosen is not None:
                self._queue(worker, chosen)
            if not goes_on:
                self._dispatcher.wait(task)
            self._changed.notify_all()
        self._after(task, unit)

    def _next(self, task: int) -> Unit:
        unit = self._dispatcher.next(task)
        assert unit is not None
        return unit

    def _queue(self, worker: Worker, task: int, staying: int | None = None) -> None:
        self._traffic.fetch(worker, task, self._next(task), staying)

    def _stays(self, worker: Worker, run: Run, after: Unit) -> bool:
        """Whether what is loaded for the unit that begins can stay for the one after it."""
        if run.plan.resident:
            return True
        size = run.loaded[run.unit.shard] + run.extra(after) + run.plan.beside_bytes(after.shard)
        return run.plan.stays(run.unit, after) and size <= worker.lanes.ledger.budget

    def _put_away(self, worker: Worker, task: int, unit: Unit, *, goes_on: bool, stays: bool, more: bool) -> None:
        """Decide what becomes of the loaded shards of a unit that has ended."""
        traffic = self._traffic
        if not traffic.runs[task].plan.resident:
            if not goes_on:
                traffic.leave(worker, task)
            elif not stays and not traffic.runs[task].plan.keeps(unit.shard):
                traffic.evict(worker, task, unit.shard, leave=False)
        elif not more:
            traffic.leave(worker, task)
        elif not goes_on:
            worker.parked[task] = None
            if worker.queued is not None:
                traffic.make_room(worker, worker.queued, self._next(worker.queued))

    def _recompute(self, worker: Worker, task: int, unit: Unit, size: int) -> None:
        """What a backward begins with, while some of the room for the rest of it may not be free yet."""
        training, lanes = self._traffic.runs[task].training, worker.lanes
        start = perf_counter()
        lanes.compute(lambda: training.recompute(unit, lanes.device, self._gate))
        self._act(Act.RECOMPUTE, unit, worker, start, size)

    def _compute(self, worker: Worker, task: int, unit: Unit) -> None:
        run, lanes = self._traffic.runs[task], worker.lanes
        start = perf_counter()
        if unit.phase is not Phase.UPDATE:
            lanes.compute(lambda: run.training.run(unit, lanes.device, self._gate))
            start = self._act(PASSES[unit.phase], unit, worker, start, run.extra(unit))
        if unit.updates:
            lanes.compute(lambda: run.training.update(unit, self._gate))
            self._act(Act.STEP, unit, worker, start, 0)

    def _act(self, act: Act, unit: Unit, worker: Worker, start: float, size: int) -> float:
        """Note what ended now; returns the time."""
        end = perf_counter()
        self._traffic.note(act, unit, unit.shard, worker, start, end, size)
        return end
