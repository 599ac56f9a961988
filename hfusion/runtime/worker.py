"""Execution of the engine's actions, by a thread for each lane of a device.

A lane runs one action at a time, and reports each to the engine when the device has done it. The compute lane queues an
action while the device still computes the previous one, so that the device does not wait for Python. Copies are queued
one by one. An eviction is prepared in the compute lane, between two units; only its copies overlap with computing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import Empty, SimpleQueue
from threading import Event, Thread
from time import perf_counter

import torch

from hfusion.device.backend import Queue, backend
from hfusion.device.team import as_caller, release_team
from hfusion.runtime.task_state import Move, copy_now
from hfusion.runtime.training import Gate, Training
from hfusion.schedule.actions import Act, Action, Section
from hfusion.schedule.engine import TaskFailed, Ticket
from hfusion.schedule.plan import Phase, Unit

_GLANCE_SECONDS = 0.1
# Actions that may be queued on a device and not done: the one that it computes, and the next one.
_IN_FLIGHT = 2


@dataclass(eq=False)
class _Job:
    """An action for a lane.

    Attributes:
        work: queues the action on the device. It is called once all jobs in ``dependencies`` have ended.
        ready: when the last job ended that it had to wait for, other than earlier jobs of its lane.
        then: called when the device has done it.
        reported: whether its end is reported to the engine.
        always: run it also after an error elsewhere, so that the state of finished tasks is back in host memory.
        done: whether the engine has received its end, without an error.
        failed: whether it raised an error, or did not run because of one.
    """

    task: int
    work: Callable[[], None]
    dependencies: Sequence[_Job]
    ready: float
    then: Callable[[], None] = field(default=lambda: None)
    reported: bool = True
    always: bool = False
    done: bool = False
    started: float = 0.0
    ended: float = 0.0
    error: BaseException | None = None
    failed: bool = False
    lane: _Lane | None = None
    over: Event = field(default_factory=Event)


class _Lane(Thread):
    """The thread of a lane, with its own queue on the device."""

    def __init__(self, name: str, device: torch.device, worker: DeviceWorker, copies: bool) -> None:
        super().__init__(name=name, target=as_caller(self._work))
        self.jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self.task: int | None = None
        self.ended = Event()
        self._free = 0.0
        self._worker = worker
        # Lanes that copy mostly wait, so they release their team of threads to those that compute.
        self._copies = copies
        self._queue = backend(device).queue(copies)
        self._in_flight: deque[_Job] = deque()
        # The thread that waits for the accelerator, since this one may be waiting for other jobs.
        self._reporter = None if copies or type(self._queue) is Queue else _Reporter(self)
        # The last event that was waited for, and when the device had reached it.
        self._last: tuple[torch.Event, float] | None = None

    def _work(self) -> None:
        try:
            if self._reporter is not None:
                self._reporter.start()
            while (job := self.jobs.get()) is not None:
                self._do(job)
                if self._copies and self.jobs.empty():
                    release_team()
        finally:
            if self._reporter is not None:
                self._reporter.queued_jobs.put(None)
                self._reporter.join()
            self._queue.close()
            self.ended.set()

    def _do(self, job: _Job) -> None:
        """Queue a job on the device as soon as the jobs that it depends on have ended."""
        while len(self._in_flight) >= _IN_FLIGHT:
            self._in_flight.popleft().over.wait()
        for dependency in job.dependencies:
            # Jobs of this lane run in order on the device's queue, so no wait is needed.
            if self._reporter is None or dependency.lane is not self:
                dependency.over.wait()
        job.failed = any(dependency.failed for dependency in job.dependencies) or (
            self._worker.stopping and not job.always
        )
        mark = None
        try:
            if not job.failed:
                self._queue.run(job.work)
                mark = None if self._reporter is None else self._queue.mark()
        except BaseException as error:
            self._fail(job, error)
        if self._reporter is None:
            self.finish(job, None)
        else:
            self._in_flight.append(job)
            self._reporter.queued_jobs.put((job, mark))

    def _fail(self, job: _Job, error: BaseException) -> None:
        job.error, job.failed = error, True
        # Later jobs do not begin.
        self._worker.stopping = True

    def finish(self, job: _Job, mark: torch.Event | None) -> None:
        """Wait until the device has done a job, and report it."""
        try:
            # Wait also after an error: then no copy is in progress any more, and other lanes can go on.
            ended = self._wait(mark)
        except BaseException as error:
            ended = self._worker.elapsed_seconds()
            if job.error is None:
                self._fail(job, error)
        job.then()
        for dependency in job.dependencies:
            job.ready = max(job.ready, dependency.ended if dependency.reported else dependency.ready)
        # The time until a thread wakes up, and preparations that are not reported, count as time of this job.
        job.started = max(job.ready, self._free)
        job.ended = max(job.started, ended)
        self._free = job.ended if job.reported else self._free
        # The engine keeps jobs, so they must not keep references to what they copied.
        job.dependencies, job.work, job.then = (), lambda: None, lambda: None
        # Report before `over` is set, so that the engine receives it before jobs that depend on it.
        if job.reported or job.error is not None:
            self._worker.ended.put(job)
        job.over.set()

    def _wait(self, mark: torch.Event | None) -> float:
        """Wait for ``mark``, or without one for the whole queue. Return the time at which the device was done."""
        before, self._last = self._last, None
        late = mark is not None and mark.query()
        if mark is None:
            self._queue.wait()
        elif not late:
            mark.synchronize()
        ended = self._worker.elapsed_seconds()
        # The device was done earlier than Python asked: compute the time from the device's clock.
        if mark is not None and late and before is not None:
            ended = min(ended, before[1] + before[0].elapsed_time(mark) / 1e3)
        if mark is not None:
            self._last = mark, ended
        return ended


class _Reporter(Thread):
    """Waits for the jobs that a lane has queued, in order, and reports them."""

    def __init__(self, lane: _Lane) -> None:
        super().__init__(name=f"{lane.name} ends")
        self.queued_jobs: SimpleQueue[tuple[_Job, torch.Event | None] | None] = SimpleQueue()
        self._lane = lane

    def run(self) -> None:
        while (entry := self.queued_jobs.get()) is not None:
            self._lane.finish(*entry)
            del entry


class DeviceWorker:
    """The worker of `hfusion.train`. ``began``: its start, by `time.perf_counter`."""

    def __init__(self, devices: Sequence[tuple[str, torch.device]], trainings: Sequence[Training]) -> None:
        self.ended: SimpleQueue[_Job] = SimpleQueue()
        self.stopping = False
        # For each task, the name of the device that computes it or did so last.
        self.computing: dict[int, str] = {}
        self._devices, self._names = [device for _, device in devices], [name for name, _ in devices]
        self._trainings = trainings
        self._gate = Gate()
        self.began = perf_counter()
        self._heard = 0.0
        self._lanes = [
            {lane: _Lane(f"{name} {lane}", device, self, lane != "compute") for lane in ("in", "compute", "out")}
            for name, device in devices
        ]

    def elapsed_seconds(self) -> float:
        """Seconds since the run began."""
        return perf_counter() - self.began

    def __enter__(self) -> DeviceWorker:
        self.began = perf_counter()
        release_team()
        for lane in self._threads:
            lane.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    @property
    def _threads(self) -> list[_Lane]:
        return [lane for lanes in self._lanes for lane in lanes.values()]

    def begin(self, device: int, task: int, unit: Unit, action: Action, after: Sequence[Ticket]) -> Ticket:
        torch_device, training, lanes = self._devices[device], self._trainings[task], self._lanes[device]
        dependencies = [job for job in after if isinstance(job, _Job)]
        if action.act is Act.EVICT:
            return self._evict(lanes, task, action, dependencies)
        if action.act is Act.LOAD:
            work = partial(self._load, training, unit, action, torch_device)
            mark_loaded = partial(training.state.loaded, action.shard)
            return self._submit(lanes["in"], _Job(task, work, dependencies, self._heard, mark_loaded))
        lanes["compute"].task, self.computing[task] = task, self._names[device]
        work = partial(self._compute, task, unit, action.act, torch_device)
        return self._submit(lanes["compute"], _Job(task, work, dependencies, self._heard))

    def wait(self) -> Sequence[Ticket]:
        # A signal just before the wait begins does not end it.
        while True:
            try:
                job = self.ended.get(timeout=_GLANCE_SECONDS)
            except Empty:
                continue
            self._hear(job)
            if job.error is not None:
                raise TaskFailed(job.task) from job.error
            return (job,)

    def _hear(self, job: _Job) -> None:
        job.done = not job.failed
        # Lanes may report in another order than their jobs ended in, so keep the latest end.
        self._heard = max(self._heard, job.ended)

    def close(self) -> None:
        """End all threads, so that none uses the user's tensors. A Ctrl-C meanwhile is raised afterwards."""
        pressed: KeyboardInterrupt | None = None
        over = False
        while not over:
            try:
                self.stopping = True
                for training in self._trainings:
                    training.stop()
                # The lanes that copy may wait for those that compute.
                for lane in sorted(self._threads, key=lambda lane: lane.name.endswith("out")):
                    if lane.ident is not None:
                        lane.jobs.put(None)
                        while not lane.ended.wait(_GLANCE_SECONDS):
                            pass
                        lane.join()
                while not self.ended.empty():
                    self._hear(self.ended.get())
                over = True
            except KeyboardInterrupt as interrupt:
                pressed = interrupt
        if pressed is not None:
            raise pressed

    def _submit(self, lane: _Lane, job: _Job) -> _Job:
        job.lane = lane
        lane.jobs.put(job)
        return job

    def _load(self, training: Training, unit: Unit, action: Action, device: torch.device) -> None:
        copy_now(training.load(unit, action.shard, action.sections, device))

    def _evict(self, lanes: dict[str, _Lane], task: int, action: Action, after: Sequence[_Job]) -> _Job:
        training, moves = self._trainings[task], list[Move]()

        def settle() -> None:
            moves.extend(training.put_away(action.shard, leave=Section.SAVED in action.sections))

        # If this device's compute lane is not at this task, no unit of it runs now, so any lane will do.
        lane = lanes["compute" if lanes["compute"].task == task else "out"]
        settled = self._submit(lane, _Job(task, settle, after, self._heard, reported=False, always=True))
        mark_evicted, copies = partial(training.state.mark_evicted, action.shard), partial(copy_now, moves)
        return self._submit(lanes["out"], _Job(task, copies, (settled,), self._heard, mark_evicted, always=True))

    def _compute(self, task: int, unit: Unit, act: Act, device: torch.device) -> None:
        training = self._trainings[task]
        if training.over:
            return
        if act is Act.SAVE:
            training.save()
        elif act is Act.RECOMPUTE:
            training.recompute(unit, device, self._gate)
        elif act is Act.STEP:
            training.update(unit, self._gate)
        else:
            training.run(unit, device, self._gate)
        computed = act not in (Act.SAVE, Act.RECOMPUTE) and not (unit.updates and unit.phase is Phase.BACKWARD)
        if act is Act.STEP or computed:
            training.ran(unit)
