"""Simulate a plan: the timeline of a run in which every action takes its estimated seconds."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from statistics import median
from typing import TypeAlias

from hfusion.core.errors import PlanError
from hfusion.schedule.actions import Act, Action, estimate
from hfusion.schedule.engine import Engine, Ticket
from hfusion.schedule.plan import Plan, Unit
from hfusion.schedule.policy import DEFAULT, Policy, named
from hfusion.schedule.timeline import Timeline

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

    seconds = estimated if measured is None else _MeasuredSeconds(plan, measured, estimated)
    engine = Engine(plan, named(policy), VirtualWorker(seconds))
    engine.run()
    return engine.timeline


@dataclass(eq=False)
class _SimulatedAction:
    """A simulated action. Its end is known when it begins."""

    started: float
    ended: float
    seconds: float
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
        seconds = self._seconds(task, unit, action)
        ticket = _SimulatedAction(started, started + seconds, seconds)
        self._free[lane] = ticket.ended
        heappush(self._running, (ticket.ended, next(self._count), ticket))
        return ticket

    def wait(self) -> Sequence[Ticket]:
        self._clock, _, ticket = heappop(self._running)
        ticket.done = True
        return (ticket,)


class _MeasuredSeconds:
    """Seconds measured in the same minibatch; without one, the median of all minibatches; otherwise the estimate."""

    def __init__(self, plan: Plan, run: Timeline, otherwise: Seconds) -> None:
        self._names = [task.name for task in plan.tasks]
        self._otherwise = otherwise
        self._took: dict[tuple[str, Act, int, int], deque[float]] = defaultdict(deque)
        every: dict[tuple[str, Act, int], list[float]] = defaultdict(list)
        for span in run.actions:
            self._took[span.task, span.act, span.shard, span.step].append(span.end - span.start)
            every[span.task, span.act, span.shard].append(span.end - span.start)
        self._middle = {key: median(durations) for key, durations in every.items()}

    def __call__(self, task: int, unit: Unit, action: Action) -> float:
        key = self._names[task], action.act, action.shard
        took = self._took.get((*key, unit.step))
        if took:
            return took.popleft()
        median_seconds = self._middle.get(key)
        return self._otherwise(task, unit, action) if median_seconds is None else median_seconds
