"""Train arrays on the devices of a machine, in this process."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from hfusion.array.per_model import FunctionPrograms, PerModel
from hfusion.capture.registered_tensors import device_of, tensors
from hfusion.compiler.arguments import Arguments
from hfusion.core.errors import PlanError
from hfusion.core.event_log import first_line
from hfusion.core.exclusive import compiling_within
from hfusion.device.backend import backend, memory_of
from hfusion.device.machine import Machine
from hfusion.optim.clip import clip_stacks
from hfusion.optim.hyper import member_vector, plain
from hfusion.optim.lr_scheduler import PerMember
from hfusion.runtime.task_state import Move, SpillFolder, TaskTensors, holdings
from hfusion.runtime.training import Gate, Training
from hfusion.runtime.worker import DeviceWorker
from hfusion.schedule.engine import Engine, Slices, TaskFailed
from hfusion.schedule.plan import Phase, Plan, TaskPlan, Unit
from hfusion.schedule.policy import Policy
from hfusion.schedule.timeline import Span
from hfusion.step.step_graph import StepCall
from hfusion.step.train_step import train_step
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.minibatch_border import ArraySaves, Border, KeptMembers, OnResult, shared_parameter
from hfusion.tasks.source import CutPrograms, Minibatch, Stream, evaluation_parts, training_programs
from hfusion.tasks.task import Task, check_shardable, seed_of
from hfusion.tasks.training_report import (
    ArrayEvent,
    ArrayListener,
    ArrayNote,
    ArrayReport,
    Report,
    TaskBars,
    TaskReport,
    TrainError,
    joined,
)


def train_arranged(
    arrangements: Sequence[Arrangement],
    plan: Plan,
    machine: Machine,
    policy: Policy,
    progress: bool,
    checkpoint: Path | None,
    every: int | None,
    on_result: OnResult | None,
    listen: ArrayListener | None = None,
) -> Report:
    """Train arrays by a plan in this process, see `hfusion.train`. `check_folder` must have checked ``checkpoint``.

    ``listen`` is called with every event of an array, in the thread in which it occurs.
    """
    with ExitStack() as stack:
        for one in arrangements:
            # Training leaves tensors in host memory.
            stack.callback(one.array.to, device_of(one.array))
        run = _TrainRun(stack, arrangements, plan, machine, checkpoint, every, on_result, listen)
        run.prepare()
        bars = None
        if progress:
            names = [(one.name, one.steps) for one in plan.tasks]
            bars = stack.enter_context(TaskBars(names, [len(one.losses) for one in run.trainings]))
        return run.run(policy, bars)


@dataclass(eq=False)
class _TrainRun:
    """The arrays of one run, with what belongs to all of them. ``stack`` releases their tensors and files."""

    stack: ExitStack
    arrangements: Sequence[Arrangement]
    plan: Plan
    machine: Machine
    checkpoint: Path | None
    every: int | None
    on_result: OnResult | None
    listen: ArrayListener | None

    def __post_init__(self) -> None:
        # The device of each array that has begun.
        self._computing: Mapping[int, str] = {}
        self._asking = Lock()
        # All arrays of a task have one.
        self._seeds = {task: seed_of(task) for task in dict.fromkeys(setup.task for setup in self.arrangements)}
        self._devices = {device.name: device.physical for device in self.machine.devices}
        self._folder = SpillFolder(self.machine.disk)
        self.stack.callback(self._folder.close)
        self._threads = self.stack.enter_context(ThreadPoolExecutor(len(self.plan.devices), "hfusion checkpoint"))
        # Held while a minibatch is read: loaders of several tasks may read from one data set or file.
        self._turn = Lock()
        # Bytes of host memory that are left for shards at rest.
        spilled = [task for task in self.plan.tasks if not task.resident]
        self._room = self.machine.host - sum(shard.boundary for task in spilled for shard in task.shards)
        self.borders: list[Border] = []

    def prepare(self) -> None:
        """Capture the arrays and allocate their tensors, or load their saves."""
        for index in range(len(self.arrangements)):
            try:
                self.borders.append(self._border(index))
            except Exception as error:
                error.add_note(f"in the task {self.plan.tasks[index].name!r}")
                self.note(index, ArrayNote("failed", None, error=first_line(error)))
                raise
        self.trainings = [border.training for border in self.borders]
        self.plan = replace(self.plan, tasks=tuple(border.plan for border in self.borders))

    def note(self, index: int, event: ArrayEvent) -> None:
        """Pass an event of an array to ``listen``."""
        if self.listen is not None:
            self.listen(index, event, self._computing.get(index))

    def _border(self, index: int) -> Border:
        setup, plan, stack = self.arrangements[index], self.plan.tasks[index], self.stack
        task, listen, saves = setup.task, partial(self.note, index), None
        if self.checkpoint is not None:
            most = self.every or plan.epoch or plan.steps
            # Saved twice per interval, as half of it is trained while a save is written.
            plan = replace(plan, save_every=math.ceil(most / 2))
            saves = ArraySaves(self.checkpoint, setup, most, self._threads, listen)
        if not plan.resident:
            check_shardable(task.name, setup.array, setup.optimizer)
        # As the user gave them: a scheduler may change them when it is made.
        rates = member_vector("lr", setup.optimizer.param_groups[0].get("lr", torch.nan), len(setup.members))
        named_tensors = dict(setup.array.named_parameters()) | dict(setup.array.named_buffers())
        first = {id(tensor): name for name, tensor in reversed(named_tensors.items())}
        names = {name: first[id(tensor)] for name, tensor in tensors(setup.array)}
        optimized = {id(param) for group in setup.optimizer.param_groups for param in group["params"]}
        trained = frozenset(n for n, t in named_tensors.items() if t.requires_grad and id(t) in optimized)
        limits = clip_limits(setup)
        loss, devices = PerModel(task.loss, FunctionPrograms()), list(dict.fromkeys(self._devices.values()))
        programs: CutPrograms = training_programs(task.name, setup.array, plan.shards)
        opened = loss, devices, self._turn
        stream = Stream(task, task.loader, setup.members, programs, setup.first.shapes[0], *opened)
        stack.callback(stream.close)
        recipe = stream.prepare(setup.minibatch())
        sharing = sum(one.task.loss is task.loss for one in self.arrangements)
        if stream.keeps_state and (saves is not None or sharing > 1):
            lost = "no save has" if saves is not None else f"{sharing} arrays change in turns that depend on timing"
            raise PlanError(
                f"task {task.name!r}: every call of the loss changes what it keeps, which {lost}: keep it in a buffer "
                "of the models, let forward compute it, or use hf.Population"
            )
        streams, parts = [stream], [part.keys for part in recipe.parts]
        held = holdings(parts, names, trained)
        if task.eval_loader is not None:
            alike = [holding.all for holding in held]
            programs = partial(evaluation_parts, setup.array, names, alike)
            evaluation = Stream(task, task.eval_loader, setup.members, programs, setup.first.shapes[1], *opened)
            stack.callback(evaluation.close)
            also = evaluation.prepare(Minibatch.of(task, setup.first.evaluated, setup.members))
            streams.append(evaluation)
            held = holdings([(*a, *b.keys) for a, b in zip(parts, also.parts, strict=True)], names, trained)
        # Who owns borrowed tensors is known from the captured programs only.
        shards = [
            replace(shard, borrows=tuple(sorted({*part.borrowed.values()})))
            for shard, part in zip(plan.shards, held, strict=True)
        ]
        if shards != list(plan.shards):
            plan = replace(plan, shards=tuple(shards))
        setup.optimizer.initialise()
        scheduler: Any = task.scheduler
        if scheduler is not None and not isinstance(scheduler, LRScheduler):
            makes = scheduler if callable(scheduler) else [scheduler[member] for member in setup.members]
            scheduler = PerMember(setup.optimizer, makes)
        kept = KeptMembers(setup)
        saved = None if saves is None else saves.load(plan, scheduler, kept)
        # Gradients from before the run do not belong to it.
        setup.optimizer.zero_grad()
        pinned = any(backend(device).pins for device in devices)
        files: list[Path | None] = []
        for shard in plan.shards:
            size = memory_of(plan.host_bytes(shard.index), pinned=pinned)
            fits = self._room >= size
            self._room -= size if fits else 0
            files.append(None if fits else self._folder.file(f"{index}-{shard.index}"))
        state = TaskTensors(named_tensors, held, setup.optimizer, files, pinned=pinned, carried=plan.carried)
        # Called after `state.close`, when the tensors have their own memory again.
        stack.callback(kept.put_back)
        stack.callback(state.close)
        seed = self._seeds[task] if saved is None else saved["seed"]
        eager = eager_reason(setup, plan, draws=recipe.random)
        if task.compile is None and saved is not None and plan.resident:
            eager = "" if saved["compiled"] else "it was eager before its checkpoint, and goes on so"
        if eager and task.compile:
            warnings.warn(eagerly(plan.name, eager), stacklevel=5)
        arguments = plan, state, names, stream, streams[1] if streams[1:] else None, limits, seed
        training: Training
        if plan.resident:
            slices = Slices.of(plan, alone=len(self.arrangements) == 1)
            training = ResidentTraining(*arguments, arrangement=setup, slices=slices, eager=eager)
            stack.callback(training.step.close)
        else:
            training = Training(*arguments)
        asks = saves, self.on_result, self._asking
        border = Border(setup, plan, training, streams, scheduler, kept, *asks, listen, plain(rates), eager)
        if saved is not None:
            border.resume(saved)
        for one in streams:
            one.restart()
        listen(ArrayNote("started" if saved is None else "resumed", training.minibatches, tuple(kept.steps)))
        border.note_end()
        return border

    def run(self, policy: Policy, bars: TaskBars | None) -> Report:
        devices = [(name, self._devices[name]) for name in self.plan.devices]
        worker = DeviceWorker(devices, self.trainings)
        self._computing = worker.computing
        for index, border in enumerate(self.borders):
            border.aborted = lambda: worker.stopping
            if bars is not None:
                border.reach = partial(bars.reach, index)
            border.training.ended, border.training.save = border.ended, border.save
        first = [border.units for border in self.borders]
        scheduled = replace(self.plan, tasks=tuple(training.scheduled for training in self.trainings))
        engine = Engine(scheduled, policy, worker, lambda index: self.borders[index].training.over, first)
        try:
            with worker:
                engine.run()
        except BaseException as failed:
            # Callbacks get the losses of all minibatches that have ended.
            for border in self.borders:
                with suppress(Exception):
                    border.arrive()
            cause = failed.__cause__
            if not isinstance(failed, TaskFailed):
                raise
            if cause is not None and not isinstance(cause, Exception):
                # For example KeyboardInterrupt: the process ends, and no task has failed.
                raise cause from None
            name = self.plan.tasks[failed.task].name
            self.note(failed.task, ArrayNote("failed", None, error=first_line(cause or failed)))
            # A callback may have failed after the last unit.
            done = [index for index in range(len(self.trainings)) if index != failed.task and engine.done(index)]
            report = self._report(engine, done)
            raise TrainError.of([name], cause or failed, report) from cause
        return self._report(engine, list(range(len(self.trainings))))

    def _report(self, engine: Engine, done: Sequence[int]) -> Report:
        arrays, finished = defaultdict[Task, list[int]](list), set(done)
        for index, arrangement in enumerate(self.arrangements):
            arrays[arrangement.task].append(index)
        tasks = {
            task.name: joined(list(map(self._part, group)))
            for task, group in arrays.items()
            if finished.issuperset(group)
        }
        # The slices of resident tasks are split into minibatches.
        sliced = {training.plan.name: training for training in self.trainings if isinstance(training, ResidentTraining)}
        whole, actions, slices = engine.timeline, list[Span](), defaultdict[str, list[Span]](list)
        for span in whole.actions:
            (slices[span.task] if span.task in sliced else actions).append(span)
        for name, resident in sliced.items():
            actions += resident.slices.spans(slices[name], resident.first, resident.minibatches)
        timeline = replace(whole, actions=tuple(sorted(actions, key=lambda span: span.start)))
        return Report(tasks, self.plan, timeline, engine.peak)

    def _part(self, index: int) -> TaskReport:
        """Return the results of an array."""
        setup, border = self.arrangements[index], self.borders[index]
        task, plan, training = setup.task, border.plan, border.training
        calls = training.step.report().rows if isinstance(training, ResidentTraining) and training.compiled else ()
        array = ArrayReport(plan.name, setup.members, plan.resident, len(plan.shards), calls, border.eager)
        losses, evaluated = torch.stack(training.losses), None
        if task.eval_loader is not None:
            rows = torch.stack([losses[0], *training.evaluations])[1:].to(losses.dtype)
            evaluated = rows.unflatten(0, (len(rows) // task.evaluated, task.evaluated))
        return TaskReport(
            losses,
            evaluated,
            border.kept.steps,
            border.rates,
            ((setup.members, setup.array),),
            (array,),
            torch.tensor(border.kept.best_epochs, device="cpu") if task.restores_best else None,
        )


# Limits on the gradients of an array, separate for each member.


def clip_limits(arrangement: Arrangement) -> Tensor | None:
    """The largest norms ``[width]`` of the members of an array, None where it is not clipped.

    Raises:
        PlanError: limits out of range, or too few or many of them, or a trained tensor that is no member's own.
    """
    if arrangement.task.clip_norm is None:
        return None
    if (name := shared_parameter(arrangement.array)) is not None:
        raise PlanError(
            f"task {arrangement.task.name!r} is clipped per member, but {name!r} is one trained tensor for all "
            "members, whose gradient is no member's own: freeze it, or give each member its own"
        )
    try:
        limits = member_vector("clip_norm", arrangement.task.clip_norm, arrangement.task.members).as_subclass(Tensor)
    except ValueError as error:
        raise PlanError(f"task {arrangement.task.name!r}: {error}") from None
    if not bool((limits >= 0).all()):
        raise PlanError(
            f"task {arrangement.task.name!r}: clip_norm is {limits.tolist()}: every value must be at least 0"
        )
    return limits[list(arrangement.members)]


# Resident tasks: minibatches are steps of the whole array, by `hfusion.train_step`. A scheduled unit is a slice of
# several minibatches, as each decision costs time.

# Minibatches that a device may be behind Python. Python needs well under a millisecond for each, so more would not keep
# a device busier, but would delay callbacks.
_BEHIND = 16


class LossQueue:
    """Losses of minibatches that are being copied to the host. Methods return those that have arrived, in order."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Tensor, torch.Event | None]] = deque()

    def __len__(self) -> int:
        return len(self._pending)

    def put(self, losses: Tensor) -> list[Tensor]:
        """Begin to copy the losses ``[B]`` of a minibatch. Wait for the oldest if too many have not arrived."""
        if not backend(losses.device).pins:
            return [losses.cpu()]
        self._pending.append((losses.detach().to("cpu", non_blocking=True), backend(losses.device).mark()))
        arrived = []
        while self._pending and (len(self) > _BEHIND or ((mark := self._pending[0][1]) is not None and mark.query())):
            arrived.append(self._oldest())
        return arrived

    def drain(self) -> list[Tensor]:
        """Wait for all."""
        return [self._oldest() for _ in range(len(self))]

    def _oldest(self) -> Tensor:
        losses, mark = self._pending.popleft()
        if mark is not None:
            mark.synchronize()
        # A copy, as page-locked memory is scarce.
        return losses.clone()


class ResidentTraining(Training):
    """`Training` of a resident task. A scheduled unit is a slice, all computed in the slice's backward unit.

    Args:
        eager: why the steps are not compiled; empty if they are.
    """

    def __init__(self, *args: Any, arrangement: Arrangement, slices: Slices, eager: str) -> None:
        super().__init__(*args)
        self.slices, self.scheduled = slices, slices.scheduled
        # Minibatches that earlier runs have trained.
        self.first = 0
        self._queue = LossQueue()
        self._trained = {name: self.state.parameter(name) for name in self.state.shards[0].trained}
        self._params = [self.state.parameter(name) for name in self.state.shards[0].all]
        task, self.compiled = arrangement.task, not eager
        # Whether compiling pays was decided before, see `eager_reason`.
        compile = False if eager else True if task.compile is None else task.compile
        self.step = train_step(arrangement.array, task.loss, arrangement.optimizer, compile=compile, parts=task.parts)
        # A task that leaves the choice open needs no warning: the report gives the reason.
        self.step.tell = partial(_warn, self.plan.name) if task.compile is not None else lambda call, why: None

    def units_after(self, steps: int) -> int:
        self.first = steps
        return self.slices.unit_index_after(steps)

    def ran(self, unit: Unit) -> None:
        if unit.phase is Phase.EVALUATE:
            self._finish(unit)

    @property
    def known_calls(self) -> list[str]:
        return sorted({*map(any_samples, self.step.known_calls), *self.resumed_calls})

    @property
    def minibatches(self) -> int:
        return len(self.losses) + len(self._queue)

    def arrive(self) -> None:
        self.losses += self._queue.drain()

    def put_away(self, shard: int, *, leave: bool) -> list[Move]:
        self.step.release()
        return super().put_away(shard, leave=leave)

    def run(self, unit: Unit, device: torch.device, gate: Gate) -> None:
        if unit.phase is Phase.EVALUATE:
            super().run(unit, device, gate)
        elif unit.phase is Phase.BACKWARD:
            self.state.bind(0)
            end = self.slices.end(unit.step)
            # A step may trace or compile before it computes; no other thread may compute meanwhile.
            with compiling_within(gate.exclusive):
                while self.minibatches < end and not self.over:
                    self._minibatch(device, gate)

    def update(self, unit: Unit, gate: Gate) -> None:
        """Do nothing: the backward unit of the slice includes the optimizer steps."""

    def _minibatch(self, device: torch.device, gate: Gate) -> None:
        unit = self.slices.unit(self.minibatches, Phase.BACKWARD)
        recipe = self._read(self._source, device, gate)
        minibatch = self._batch.on(device)
        args, kwargs = minibatch.arguments.args_and_kwargs()
        if self.resumed_calls:
            # The program of a kind serves minibatches with another number of samples, too.
            text = StepCall(minibatch.arguments, Arguments.of((minibatch.target,), {})).text
            if any_samples(text) in self.resumed_calls:
                self.step.expected_calls.add(text)
        prepared = self.step.prepare(kwargs or args, minibatch.target)

        def update(losses: Tensor) -> None:
            grads = {name: param.grad for name, param in self._trained.items() if param.grad is not None}
            for grad in grads.values() if self.plan.accumulate > 1 else ():
                grad /= self.plan.accumulate
            for param in self._params:
                param.grad = None
            if self._carried:
                self._collect(0, {f"param {name}": grad for name, grad in grads.items()})
            if not self._carried:
                self.state.update(0, grads)
            elif self.plan.closes(unit.step):
                Training.update(self, unit, gate)

        with gate.computing():
            # Run it through the step, which may use threads of its own.
            self.step.update, self.step.idle = update, self.idle
            with self._drawing(self.generators, device):
                losses = self.step.run(prepared)
            self.losses += self._queue.put(losses)
            self.state.wrote(0, [self._names[name] for name in recipe.parts[0].writes])
        if self.plan.clipped and self.plan.closes(unit.step):
            self.ended(unit)
            unit = self.slices.unit(unit.step, Phase.UPDATE)
        self._finish(unit)

    def _clip_by_norm(self, grads: Mapping[str, Tensor], limits: Tensor) -> None:
        """Clip all gradients by their norms, in a few kernel launches on their device."""
        nonempty = [grads[name] for name in self.state.order if name in grads and grads[name].numel()]
        if nonempty:
            clip_stacks(nonempty, limits)

    def _finish(self, unit: Unit) -> None:
        """Handle the end of a unit: callbacks and scheduler steps, and the save if one is due."""
        self.ended(unit)
        if self.plan.saves(unit) and not self.over:
            self.save()


def _warn(name: str, call: str, why: str) -> None:
    warnings.warn(eagerly(name, f"with ({call}), {why}"), stacklevel=2)


def eagerly(name: str, why: str) -> str:
    """Return the warning text for a task that was to be compiled, but runs eagerly."""
    return f"task {name!r} runs eagerly, exact but slower: {why}. hf.Task(compile=False) does so without this warning"


def any_samples(call: str) -> str:
    """Describe a kind of call for any number of samples; a single sample may have another program.

    >>> any_samples("f32[32,64], stacked i64[3,32]"), any_samples("f32[1,64], f32[]")
    ('f32[*,64], stacked i64[3,*]', 'f32[1,64], f32[]')
    """
    return re.sub(r"(stacked \w+\[\d+,|(?<!stacked )\b\w+\[)(?!1\b)\d+", r"\1*", call)


# Decide from estimates whether to compile an array, before its first minibatch, if its task leaves that open.

# Estimated seconds of eager minibatches from which a compilation pays, which takes 5 to 20 s.
LEAST_SECONDS = 20.0


def eager_reason(arrangement: Arrangement, plan: TaskPlan, *, draws: bool = False) -> str:
    """Return why an array runs eagerly; empty if its minibatches are compiled.

    With ``compile=None`` the estimated seconds of all its minibatches decide, once: a switch between minibatches would
    depend on time, and with it the last bits of the results.

    Args:
        draws: forward or the loss draws random numbers, or runs code that may.
    """
    if arrangement.task.compile is False:
        return "compile=False"
    if not plan.resident:
        return f"it is spilled, in {len(plan.shards)} shards, which run one by one"
    if arrangement.task.compile is not None:
        return ""
    array = arrangement.array
    for part in array.compiled(arrangement.minibatch().arguments_for(array)).opaque:
        return f"{part.path or 'forward'} runs in a loop over members: {part.why}"
    if draws:
        # A program draws other numbers than the plain loop.
        return "it may draw random numbers; pass compile=True"
    seconds = plan.steps * plan.step_seconds
    if seconds < LEAST_SECONDS:
        return f"its {plan.steps} steps take about {seconds:.2g} s, too little for a compilation to pay"
    return ""
