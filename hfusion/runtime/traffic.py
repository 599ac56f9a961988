"""What is on which device, and what is on its way there or back.

One condition guards what is shared; nobody who holds it computes, or waits for a copy that has been asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import pairwise
from time import perf_counter

from hfusion.runtime.copying import Ticket
from hfusion.runtime.ending import Ending, Stopped
from hfusion.runtime.lanes import Lanes
from hfusion.runtime.training import Piece, Training
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Plan, TaskPlan, Unit
from hfusion.schedule.timeline import Span


@dataclass(eq=False)
class Load:
    """A shard on its way to a device. ``later``: a thread waits for room, or for ``waits``, before it can be copied."""

    unit: Unit
    shard: int
    size: int
    waits: list[Leaving]
    ticket: Ticket | None = None
    later: Future[None] | None = None

    @property
    def done(self) -> bool:
        """Whether it is there."""
        return self.ticket is not None and self.ticket.done()

    def wait(self) -> tuple[float, float]:
        """Until it is there; when its copying began and ended."""
        if self.later is not None:
            self.later.result()
        assert self.ticket is not None
        return self.ticket.wait()


@dataclass(eq=False)
class Leaving:
    """A shard on its way back. ``pieces``: those whose room is not free yet; ``unused``: its load, if no unit waited
    for that; ``last``: when what came before the next piece ended.
    """

    task: int
    unit: Unit
    shard: int
    worker: Worker
    ticket: Ticket
    pieces: tuple[Piece, ...]
    unused: Load | None
    last: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether all its room is free."""
        return not self.pieces

    @property
    def done(self) -> bool:
        """Whether all has left."""
        return self.ticket.done() and (self.unused is None or self.unused.done)


@dataclass
class Run:
    """Where a task stands; ``unit``: the one that began last.

    ``loaded``: bytes held per shard; ``coming``: the loads among these that no unit has waited for; ``gone``: the last
    eviction of each shard.
    """

    plan: TaskPlan
    training: Training
    unit: Unit
    worker: Worker | None = None
    loaded: dict[int, int] = field(default_factory=dict)
    coming: dict[int, Load] = field(default_factory=dict)
    gone: dict[int, Leaving] = field(default_factory=dict)

    @property
    def held(self) -> int:
        """Bytes of all that is loaded."""
        return sum(self.loaded.values())

    def extra(self, unit: Unit) -> int:
        """Bytes that a unit takes while it runs."""
        return self.plan.extra_bytes(unit.phase, unit.shard)

    def fresh(self, unit: Unit) -> tuple[int, int]:
        """What of these it takes when it begins, and what later."""
        size = self.plan.fresh_bytes(unit.phase, unit.shard)
        now = self.plan.again_bytes(unit.shard) if self.recomputes(unit) else size
        return now, size - now

    def recomputes(self, unit: Unit) -> bool:
        """Whether it begins with the forward of its shard again."""
        return self.plan.recomputes(unit.phase, unit.shard)

    def freed(self, unit: Unit) -> int:
        """What of these it gives back when it ends."""
        return self.plan.freed_bytes(unit.phase, unit.shard)

    def left(self, shards: Iterable[int]) -> list[Leaving]:
        """The last evictions of ``shards``."""
        return [self.gone[shard] for shard in shards if shard in self.gone]


@dataclass
class Worker:
    """A device. ``queued``: the task whose unit it runs next. ``leaving``: evictions that have begun. ``parked``:
    resident tasks that are loaded there but do not run, oldest first.
    """

    lanes: Lanes
    queued: int | None = None
    leaving: list[Leaving] = field(default_factory=list)
    parked: dict[int, None] = field(default_factory=dict)


class Traffic:
    """The loads and evictions of the runs of a plan."""

    def __init__(self, plan: Plan, trainings: Sequence[Training], ending: Ending) -> None:
        self.runs = [Run(task, training, task.unit(0)) for task, training in zip(plan.tasks, trainings, strict=True)]
        self._noted: list[tuple[Act, str, int, int, str, float, float, int]] = []
        self._ending = ending
        self._changed = ending.changed
        self._start = perf_counter()

    def fetch(self, worker: Worker, task: int, unit: Unit, staying: int | None) -> None:
        """Queue a task's next unit, and begin to load what it needs, as early as that can be.

        ``staying``: a shard that is there already.
        """
        run = self.runs[task]
        if run.worker is not worker:
            if run.worker is not None:
                self.leave(run.worker, task)
            waits = list(run.gone.values())
        else:
            waits = run.left(run.training.needs(unit))
        run.worker = worker
        worker.parked.pop(task, None)
        shards = [unit.shard, *range(len(run.plan.shards))] if run.plan.resident else [unit.shard]
        missing = [shard for shard in dict.fromkeys(shards) if shard not in run.loaded and shard != staying]
        loads = [Load(unit, shard, run.plan.held_bytes(unit.phase, shard), waits) for shard in missing]
        self._expect(run, loads)
        self.make_room(worker, task, unit)
        worker.queued = task
        self._begin(worker, task, loads)

    def fetch_ahead(self, worker: Worker, task: int, units: Iterable[Unit]) -> None:
        """Load for the units after the queued one, the first of ``units``, too, as far as there is room now that nobody
        before them will need.
        """
        run, parked = self.runs[task], self._parked(worker)
        extra = run.extra(run.unit)
        for before, after in pairwise(units):
            extra = max(extra, run.extra(before), run.extra(after))
            if after.shard in run.loaded:
                coming = run.coming.get(after.shard)
                expected = coming is not None and coming.unit == after
                if expected or run.plan.stays(before, after) or run.plan.keeps(after.shard):
                    continue
                return
            size = run.plan.held_bytes(after.phase, after.shard)
            if run.held + parked + size + extra > worker.lanes.ledger.budget:
                return
            needs = run.training.needs(after)
            load = Load(after, after.shard, size, run.left(needs))
            if not (needs.isdisjoint(run.loaded) and self._load_now(worker, task, load)):
                return
            self._expect(run, [load])

    def _expect(self, run: Run, loads: Sequence[Load]) -> None:
        for load in loads:
            run.loaded[load.shard] = load.size
            run.coming[load.shard] = load

    def _begin(self, worker: Worker, task: int, loads: Sequence[Load]) -> None:
        """Copy what there is room for; a thread waits for the room of the others."""
        for number, load in enumerate(loads):
            if not self._load_now(worker, task, load):
                for each in loads[number:]:
                    each.later = worker.lanes.later.submit(self._load_later, worker, task, each)
                return

    def _load_now(self, worker: Worker, task: int, load: Load) -> bool:
        """Begin to copy a shard if nothing is to be waited for; whether it was so."""
        self._reap(worker)
        free = all(each.ended for each in load.waits) and worker.lanes.ledger.take(load.size)
        if free:
            self._load(worker, task, load)
        return free

    def _load_later(self, worker: Worker, task: int, load: Load) -> None:
        for leaving in load.waits:
            self._settle(leaving)
        self.take(worker, load.size)
        self._load(worker, task, load)

    def _load(self, worker: Worker, task: int, load: Load) -> None:
        """Begin to copy a shard for which there is room."""
        lanes = worker.lanes
        try:
            load.ticket = self.runs[task].training.load(load.unit, load.shard, lanes.device, lanes.into)
        except Exception as error:
            raise self._ending.failed(task, error) from error

    def await_loads(self, worker: Worker, task: int, unit: Unit) -> None:
        """Until all that a unit needs is there."""
        run = self.runs[task]
        for shard in [*run.coming] if run.plan.resident else [unit.shard]:
            load = run.coming.pop(shard, None)
            if load is not None:
                self.note(Act.LOAD, load.unit, shard, worker, *load.wait(), load.size)

    def take(self, worker: Worker, size: int, later: int = 0) -> None:
        """Wait until ``size`` more bytes fit, take them, and promise ``later`` more, which `redeem` takes.

        Raises Stopped when the run ends before.
        """
        self._until(worker, lambda: worker.lanes.ledger.take(size, later))

    def redeem(self, worker: Worker, size: int) -> None:
        """Wait until ``size`` bytes that were promised fit, and take them. Raises Stopped when the run ends before."""
        self._until(worker, lambda: worker.lanes.ledger.redeem(size))

    def _until(self, worker: Worker, taken: Callable[[], bool]) -> None:
        while True:
            with self._changed:
                if self._ending.stopping:
                    raise Stopped
                self._reap(worker)
                if taken():
                    return
                first = next(iter(worker.leaving), None)
                if first is None:
                    self._changed.wait()
                    continue
                pieces = first.pieces[:1]
            self._free(first, pieces)

    def _reap(self, worker: Worker) -> None:
        """Give back what has left."""
        for leaving in [*worker.leaving]:
            if leaving.done:
                self._settle(leaving)

    def settle(self, worker: Worker) -> None:
        """Wait for all evictions from a device."""
        for leaving in [*worker.leaving]:
            self._settle(leaving)

    def _settle(self, leaving: Leaving) -> None:
        """Wait for the end of an eviction, and give back what it held."""
        while pieces := leaving.pieces:
            self._free(leaving, pieces)

    def _free(self, leaving: Leaving, pieces: tuple[Piece, ...]) -> None:
        """Wait until the next ``pieces`` of an eviction have left, and give back what they held."""
        try:
            loaded = None if leaving.unused is None else leaving.unused.wait()
            began, ended = leaving.ticket.wait(pieces[-1].moves)
        except Exception as error:
            raise self._ending.failed(leaving.task, error) from error
        with self._changed:
            # Another thread may have done it.
            if leaving.pieces[: len(pieces)] != pieces:
                return
            leaving.pieces = leaving.pieces[len(pieces) :]
            if leaving.ended:
                leaving.worker.leaving.remove(leaving)
            size = sum(piece.size for piece in pieces)
            leaving.worker.lanes.ledger.give(size)
            self.runs[leaving.task].training.left(leaving.shard, pieces)
            load, leaving.unused = leaving.unused, None
            if load is not None and loaded is not None:
                self.note(Act.LOAD, load.unit, leaving.shard, leaving.worker, *loaded, load.size)
                leaving.last = loaded[1]
            began, ended = max(began, leaving.last), max(ended, leaving.last)
            self.note(Act.EVICT, leaving.unit, leaving.shard, leaving.worker, began, ended, size)
            leaving.last = ended
            self._changed.notify_all()

    def _parked(self, worker: Worker) -> int:
        return sum(self.runs[task].held for task in worker.parked)

    def make_room(self, worker: Worker, task: int, unit: Unit) -> None:
        """Let parked tasks leave, the oldest first, until what the next unit of a task holds and takes will fit."""
        size = self.runs[task].held + self.runs[task].extra(unit)
        while worker.parked and self._parked(worker) + size > worker.lanes.ledger.budget:
            self.leave(worker, next(iter(worker.parked)))

    def leave(self, worker: Worker, task: int) -> None:
        """Evict all that a task has on a device."""
        worker.parked.pop(task, None)
        for shard in list(self.runs[task].loaded):
            self.evict(worker, task, shard, leave=True)
        self.runs[task].worker = None

    def evict(self, worker: Worker, task: int, shard: int, *, leave: bool) -> None:
        """Begin to write back a shard; ``leave``: and all else that its task has there."""
        run = self.runs[task]
        unused = run.coming.pop(shard, None)
        try:
            ticket, pieces = run.training.put_away(shard, run.loaded.pop(shard), worker.lanes.out, leave=leave)
        except Exception as error:
            raise self._ending.failed(task, error) from error
        run.gone[shard] = leaving = Leaving(task, run.unit, shard, worker, ticket, pieces, unused)
        worker.leaving.append(leaving)
        self._changed.notify_all()

    def note(self, act: Act, unit: Unit, shard: int, worker: Worker, start: float, end: float, size: int) -> None:
        """Something was done."""
        times = (start - self._start, end - self._start)
        self._noted.append((act, unit.task, shard, unit.step, worker.lanes.name, *times, size))

    @property
    def actions(self) -> list[Span]:
        """What has been done."""
        return [Span(*each) for each in self._noted]
