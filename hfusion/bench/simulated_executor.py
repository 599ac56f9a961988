"""Measure the driver of a cluster: the one of real runs, over devices that are simulated."""

from __future__ import annotations

import contextlib
import random
import time
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from hfusion.bench.placement_simulation import VirtualClock
from hfusion.cluster.driver import Drive
from hfusion.cluster.jobs import ClusterArrays, PlacedArray, RunOptions
from hfusion.cluster.longest_first import Load
from hfusion.cluster.messages import DeviceInfo, Raised
from hfusion.cluster.node import ArrayJob, CallJob, Message, ResultMessage
from hfusion.core.event_log import EventLog
from hfusion.device.calibrate import Rates, standard_rates
from hfusion.optim.sgd import SGD
from hfusion.tasks.task import Step, Task
from hfusion.tasks.train import TrainError

# Of an array: its minibatches, the messages that tell of them, and its seconds.
_STEPS, _MESSAGES, _SECONDS = 1000, 8, 1000.0


class DriverCost(NamedTuple):
    """Messages of a run; CPU microseconds of the driver for each, and for those of its tail, in which few arrays run.

    In the tail less than a tenth of the devices train.
    """

    messages: int
    us_per_message: float
    us_per_tail_message: float


@dataclass(eq=False)
class _SimulatedVisit:
    """An array on a device: how many messages it has sent, and the virtual seconds from one to the next."""

    number: int
    pause: float
    sent: int = 0


class SimulatedExecutor:
    """Devices that only send messages, in virtual time. An array ends with an error, as it was not trained."""

    timeout, starting = 0.0, False

    def __init__(self, count: int, clock: VirtualClock, task: Task) -> None:
        base_rates = standard_rates(torch.device("cpu"))
        rates = Rates(base_rates.flops, base_rates.memory, base_rates.calls, load=1e9, evict=1e9, read=1e9, write=1e9)
        self.devices = [DeviceInfo(f"node{n}/0", torch.device("cpu"), 1 << 30, rates, 0.0) for n in range(count)]
        self.offsets = [0.0] * count
        self._clock, self._task, self._draw = clock, task, random.Random(0)
        self._events: list[tuple[float, int]] = []
        self._visits: dict[int, _SimulatedVisit] = {}
        self._since = 0.0
        # Of the messages of the run, and of its tail: how many, and CPU seconds until the driver waits again.
        self.messages = {"run": 0, "tail": 0}
        self.seconds = {"run": 0.0, "tail": 0.0}
        self._part = "begin"

    def put(self, value: Any) -> Any:
        return None

    def start_job(self, device: int, job: ArrayJob | CallJob) -> None:
        assert isinstance(job, ArrayJob)
        pause = _SECONDS * self._draw.uniform(0.25, 2.0) / _MESSAGES
        self._visits[device] = _SimulatedVisit(int(job.name), pause)
        heappush(self._events, (self._clock.now + pause, device))

    def leave(self, device: int, name: str) -> None:
        raise AssertionError("arrays without checkpoints do not move")

    def answer(self, device: int, members: list[int]) -> None:
        raise AssertionError("no array asks which of its members stop")

    def wait(self, seconds: float) -> list[tuple[int, Message]]:
        now = time.process_time()
        if self._part in self.messages:
            self.messages[self._part] += 1
            self.seconds[self._part] += now - self._since
        self._part = "tail" if len(self._visits) * 10 < len(self.devices) else "run"
        self._clock.now, device = heappop(self._events)
        visit = self._visits[device]
        visit.sent += 1
        message: Message
        if visit.sent == _MESSAGES:
            del self._visits[device]
            message = Raised(RuntimeError("simulated"))
        else:
            heappush(self._events, (self._clock.now + visit.pause, device))
            step = visit.sent * _STEPS // _MESSAGES
            message = ResultMessage((Step(self._task.name, 0, step, (0,), torch.zeros(1)),), self._clock.now)
        self._since = time.process_time()
        return [(device, message)]

    def revive(self, device: int) -> bool:
        raise AssertionError("no device is lost")

    def close(self) -> None:
        pass


def driver_cost(nodes: int, arrays: int) -> DriverCost:
    """Return the cost of the driver of ``arrays`` arrays on ``nodes`` nodes, each with one device."""
    clock = VirtualClock()
    model, loader = nn.Linear(2, 1), [(torch.zeros(1, 2), torch.zeros(1, 1))]
    task = Task(model, F.mse_loss, lambda params: SGD(params, lr=0.1), loader, epochs=_STEPS)
    executor = SimulatedExecutor(nodes, clock, task)
    options = RunOptions(None, None, "fifo")
    placed = tuple(
        PlacedArray(task, (0,), Load(str(n), (_SECONDS,), task.name, _STEPS), task, options) for n in range(arrays)
    )
    drive = Drive(ClusterArrays((task,), placed, (0,) * nodes), executor, 0, EventLog(None, "train"), clock=clock)
    with contextlib.suppress(TrainError):
        drive.run()
    messages, seconds = executor.messages, executor.seconds
    count = sum(messages.values())
    return DriverCost(count, sum(seconds.values()) / count * 1e6, seconds["tail"] / max(1, messages["tail"]) * 1e6)
