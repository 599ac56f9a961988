"""One run of hf.train on simulated devices, drawn by a seed: tasks, plan, devices, and the order of what they do.

The serial run is the plain loop on one such device, with every operator done immediately.
"""

from __future__ import annotations

import gc
import random
import sys
import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.checkpoint import files
from hfusion.schedule.plan import Plan
from hfusion.tasks.task import Evaluation, Step
from hfusion.tasks.training_report import Report, TrainError
from tests.schedule.compared import COMPARED
from tests.simulated.queues import DEVICES, QUEUES, Fault
from tests.trained import SEED, Knotted, Way, adamw, batches, cross_entropy, fused, momentum, plain, planned, task

FULL = batches(torch.float64, 2)
# The last batch has a size of its own: its program is captured while shards are on devices.
LOADER = [*FULL, (FULL[0][0][:2], FULL[0][1][:2])]
EVALUATED = batches(torch.float64, 2)
# Seconds that threads have to let go of memory when a run has ended.
_PATIENCE = 5.0


Progress = Step | Evaluation


class Convolved(nn.Module):
    """Convolutions, BatchNorm and dropout, one layer used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, 2, 3, padding=1)
        self.norm = nn.BatchNorm1d(2)
        self.again = nn.Conv1d(2, 2, 3, padding=1)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.first(x.unsqueeze(1)))
        return self.out(self.drop(self.again(torch.relu(self.again(h)))).flatten(1))


KINDS = (
    (Knotted, Way(adamw, 0.5, 2)),
    (Knotted, Way(momentum)),
    (Convolved, Way(momentum, 0.5)),
    (Convolved, Way(adamw, None, 2)),
)


@dataclass(frozen=True)
class Trained:
    """An array, its initial state, and the results of the serial run."""

    array: hf.FusedModule
    before: Mapping[str, Tensor]
    losses: Tensor
    evaluated: Tensor
    after: Mapping[str, Tensor]


@cache
def trained(kind: int) -> Trained:
    make, recipe = KINDS[kind]
    torch.manual_seed(kind)
    array, evaluated = fused(make), []

    def evaluate(_: object) -> None:
        array.eval()
        with torch.no_grad():
            rows = [hf.per_model(cross_entropy)(array(x), y).cpu() for x, y in _there(EVALUATED)]
        evaluated.append(torch.stack(rows))
        array.train()

    with QUEUES.at_once():
        array.to("sim:0")
        losses, after = plain(array, recipe, _there(LOADER), after_epoch=evaluate)
        array.cpu()
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    return Trained(array, before, losses.cpu(), torch.stack(evaluated), {n: t.cpu() for n, t in after.items()})


def _there(loader: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    return [(x.to("sim:0"), y.to("sim:0")) for x, y in loader]


@dataclass(frozen=True)
class Order:
    """The configuration of a run, drawn by a seed."""

    kinds: tuple[int, ...]
    shards: tuple[int, ...]
    resident: tuple[bool, ...]
    keeps_last: tuple[bool, ...]
    devices: tuple[str, ...]
    spare: int
    policy: str
    host: str

    @staticmethod
    def of(seed: int) -> Order:
        draw = random.Random(seed)
        count = draw.choice([1, 1, 2, 3])
        return Order(
            kinds=tuple(draw.sample(range(len(KINDS)), count)),
            shards=tuple(draw.randint(1, 5) for _ in range(count)),
            resident=tuple(draw.random() < 0.3 for _ in range(count)),
            keeps_last=tuple(draw.random() < 0.3 for _ in range(count)),
            devices=draw.choice([("sim:0",), ("sim:0", "sim:1"), ("sim:0", "sim:0"), ("sim:1", "sim:0", "sim:0")]),
            spare=draw.choice([0, draw.randint(1, 600), 5_000, 50_000]),
            policy=draw.choice(sorted(COMPARED)),
            host=draw.choice(["1GiB", "1GiB", "2KiB"]),
        )

    def machine(self, disk: str) -> hf.Machine:
        devices = [hf.Device(name, f"{name}.{index}", memory="1GiB") for index, name in enumerate(self.devices)]
        return hf.Machine(devices, self.host, disk)

    def tasks(self, callback: Callable[[Progress], None] = lambda progress: None) -> list[hf.Task]:
        return [
            task(trained(kind).array, KINDS[kind][1], LOADER, f"t{kind}", eval_loader=EVALUATED, callbacks=[callback])
            for kind in self.kinds
        ]


@lru_cache(4)
def _plan(order: Order) -> Plan:
    return planned(order.tasks(), order.machine("unused"), order.shards, order.resident, order.keeps_last)


def run(seed: int, disk: str, fault: Fault | None = None, *, order: Order | None = None) -> list[str]:
    """Return the errors in the run of a seed: none without a ``fault``."""
    order = Order.of(seed) if order is None else order
    zero_spare = _plan(replace(order, spare=0, policy="", host="1GiB"))
    plan = replace(zero_spare, devices={name: size + order.spare for name, size in zero_spare.devices.items()})
    for kind in order.kinds:
        trained(kind).array.load_state_dict(trained(kind).before)
    early: list[str] = []

    def hear(progress: Progress) -> None:
        if isinstance(progress, Step):
            expected = trained(int(progress.task[1:])).losses[progress.epoch * len(LOADER) + progress.step]
            if not torch.equal(progress.losses, expected):
                early.append(f"wrong losses of {progress.task} told in step {progress.step}")

    threads, taken_before = set(threading.enumerate()), list(QUEUES.taken)
    QUEUES.start(seed, fault, None if fault is None else 1.0)
    switch = sys.getswitchinterval()
    sys.setswitchinterval(random.Random(seed).choice([1e-6, 1e-4, 5e-3]))
    try:
        report = hf.train(order.tasks(hear), order.machine(disk), COMPARED[order.policy], plan=plan)
    except Exception as error:
        return [f"{type(error).__name__}: {error}", *races(QUEUES.end())]
    finally:
        sys.setswitchinterval(switch)
    return [
        *early,
        *_wrong(order, report),
        *_uneven(report, plan),
        *_unfinished_work(threads),
        *_leaked_memory(taken_before),
        *races(QUEUES.end()),
    ]


class Broken(Exception):
    """Raised by a callback, in the midst of a run."""


@cache
def _reached() -> tuple[dict[str, Tensor], ...]:
    """The state after each step of the serial run of `KINDS`[1], which neither clips nor accumulates."""
    expected, (_, recipe), loss_fn = trained(1), KINDS[1], hf.per_model(cross_entropy)
    array = expected.array
    array.load_state_dict(expected.before)
    states = [dict(expected.before)]
    with QUEUES.at_once():
        array.to("sim:0")
        optimizer = recipe.optimizer(list(array.parameters()))
        torch.manual_seed(SEED)
        for x, y in _there(LOADER):
            loss_fn(array(x), y).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            states.append({name: tensor.cpu() for name, tensor in array.state_dict().items()})
        array.cpu()
    array.load_state_dict(expected.before)
    return tuple(states)


def broken(seed: int, disk: str, fault: Fault | None = None) -> list[str]:
    """Return the errors in the state after a callback has ended a run: no tensor may mix two steps.

    Every other run saves after each step; a save must equal the state of the serial run after that step.
    """
    draw = random.Random(seed)
    order = Order((1,), (draw.randint(1, 5),), (draw.random() < 0.3,), (False,), ("sim:0",), 5_000, "fifo", "1GiB")
    plan, states = _plan(replace(order, spare=0, policy="", host="1GiB")), _reached()
    array, last = trained(1).array, draw.randrange(len(LOADER))
    array.load_state_dict(trained(1).before)

    def stop(progress: Progress) -> None:
        if isinstance(progress, Step) and progress.step == last:
            raise Broken

    threads = set(threading.enumerate())
    QUEUES.start(seed, fault, None if fault is None else 1.0)
    root = Path(disk) / f"saves-{seed}" if draw.random() < 0.5 else None
    try:
        hf.train(order.tasks(stop), order.machine(disk), plan=plan, checkpoint=root, every=1 if root else None)
    except TrainError as error:
        errors = [] if isinstance(error.__cause__, Broken) else [str(error)]
    else:
        errors = ["it goes on"]
    after = array.state_dict()
    errors += [f"{name} is torn" for name in after if not any(torch.equal(after[name], s[name]) for s in states)]
    if root is not None and last:
        errors += _saved(root / "t1", last, states)
    return [*errors, *_unfinished_work(threads), *races(QUEUES.end())]


def _saved(folder: Path, last: int, states: Sequence[dict[str, Tensor]]) -> list[str]:
    """Return the errors in the saves of a run that was ended in the step ``last``."""
    saves = [files.read(path) for path in files.saves(folder)]
    steps = [save.step for save in saves]
    errors = [] if steps[-1:] == [last] else [f"saved after the steps {steps}, and {last} were done"]
    for save in saves:
        for name, tensor in states[save.step].items():
            saved = save.tensors.get(f"module/{name}")
            if saved is None or not torch.equal(saved, tensor):
                errors.append(f"{name} is wrong in what was saved after step {save.step}")
    return errors


def _unfinished_work(threads: set[threading.Thread]) -> list[str]:
    """Return messages about unfinished queues and threads, and errors that C++ has swallowed."""
    return [
        *(f"work is left in queue {stream}" for stream in QUEUES.left),
        *(f"the thread {thread.name} is left" for thread in set(threading.enumerate()) - threads),
        *(f"{type(error).__name__}: {error}" for error in QUEUES.errors),
    ]


def _leaked_memory(taken_before: list[int]) -> list[str]:
    """Return messages about device memory that a run has not freed."""
    # A thread of autograd may hold the gradients that it has handed over until it goes on: on a busy machine, a while.
    latest = time.monotonic() + _PATIENCE
    while more := [
        current - earlier for current, earlier in zip(QUEUES.taken, taken_before, strict=True) if current > earlier
    ]:
        if time.monotonic() > latest:
            break
        gc.collect()
        time.sleep(0.01)
    return [f"{size} bytes are not given back" for size in more]


def _wrong(order: Order, report: Report) -> list[str]:
    """Return the results that differ from the serial run in any bit."""
    errors = []
    for kind in order.kinds:
        expected, task_report = trained(kind), report[f"t{kind}"]
        pairs = {
            "losses": (task_report.losses, expected.losses),
            "evaluations": (task_report.eval_losses, expected.evaluated),
        }
        pairs |= {name: (tensor, expected.after[name]) for name, tensor in expected.array.state_dict().items()}
        errors += [
            f"wrong {name} of t{kind}"
            for name, (actual, reference) in pairs.items()
            if not torch.equal(actual, reference)
        ]
    return errors


def _uneven(report: Report, plan: Plan) -> list[str]:
    """Return violations of the rules of timelines, and of memory budgets."""
    try:
        report.timeline.validate(plan)
    except hf.HFusionError as error:
        return [str(error)]
    return [f"{peak} bytes on {name}" for name, peak in report.peak.items() if peak > plan.devices[name]]


# Races in what simulated devices were asked for: found by torch's own sanitizer, whatever order it was done in.

Trace = Sequence[tuple[Any, ...]]
Range = tuple[int, int, int]


def races(trace: Trace) -> list[str]:
    """Return the races that the sanitizer finds in a trace, each pair of operators once."""
    errors: list[str] = []
    # It notes the stack at every operator: that of a thread is short.
    thread = Thread(target=lambda: errors.extend(_races(trace)))
    thread.start()
    thread.join()
    return errors


def _races(trace: Trace) -> list[str]:
    from torch.cuda._sanitizer import EventHandler

    handler, pieces = EventHandler(), _Pieces(trace)
    for stream in range(-DEVICES, 1):
        handler._handle_stream_creation(stream)
    events: set[int] = set()
    messages: dict[tuple[str, str], str] = {}
    for kind, *values in trace:
        if kind == "launch":
            stream, name, reads, writes = values
            write = {piece for byte_range in writes for piece in pieces.of(byte_range)}
            read = {piece for byte_range in reads for piece in pieces.of(byte_range)} - write
            names: dict[Any, list[str]] = {piece: [] for piece in read | write}
            for error in handler._handle_kernel_launch(stream, read, write, set(), name, names):
                current, previous = error.current_access, error.previous_access
                pair = str(current.operator), str(previous.operator)
                messages.setdefault(
                    pair, f"{pair[0]} in queue {current.stream} and {pair[1]} in queue {previous.stream}"
                )
        elif kind == "stream":
            handler._handle_stream_creation(values[0])
        elif kind == "record":
            if values[0] not in events:
                handler._handle_event_creation(values[0])
                events.add(values[0])
            handler._handle_event_record(*values)
        elif kind == "stream waits":
            handler._handle_event_wait(*values)
        elif kind == "wait":
            handler._handle_event_synchronization(values[0])
        elif kind == "wait stream":
            handler._handle_stream_synchronization(values[0])
    return [*messages.values()]


class _Pieces:
    """The parts of each block between the offsets at which used ranges begin or end."""

    def __init__(self, trace: Trace) -> None:
        boundaries: dict[int, set[int]] = defaultdict(set)
        for kind, *values in trace:
            if kind == "launch":
                for block, start, end in (*values[2], *values[3]):
                    boundaries[block].update((start, end))
        self._places = {block: sorted(offsets) for block, offsets in boundaries.items()}

    def of(self, byte_range: Range) -> Iterable[tuple[int, int]]:
        """The parts that these bytes consist of."""
        block, start, end = byte_range
        boundaries = self._places[block]
        return [(block, boundaries[k]) for k in range(bisect_left(boundaries, start), bisect_left(boundaries, end))]
