"""`hf.plan` and `hf.train`: plan and train many tasks on many devices."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.cluster import Cluster
from hfusion.cluster.driver import Drive
from hfusion.cluster.jobs import RunOptions, check_schedulers, planned, sent_task
from hfusion.cluster.process_choice import MAX_FAILURES, ArraySeconds, choose_processes, devices_at_once
from hfusion.cluster.process_executor import ProcessExecutor, begin_seconds
from hfusion.cluster.reachable import copy_obstacle
from hfusion.core.errors import PlanError
from hfusion.core.event_log import EventLog
from hfusion.core.resuming import resume_folder
from hfusion.device.machine import Device, Machine
from hfusion.schedule.plan import Plan, Processes
from hfusion.schedule.policy import DEFAULT, Policy, named
from hfusion.tasks.arrange import Arrangement, arrange, checked_plan
from hfusion.tasks.array_log import ArrayEvent, ArrayLogs
from hfusion.tasks.bars import TaskBars
from hfusion.tasks.checkpoints import check_every, check_folder
from hfusion.tasks.sharing import listed, reserve_tensors
from hfusion.tasks.stopping import OnResult
from hfusion.tasks.task import Task
from hfusion.tasks.train import TrainError, train_arranged
from hfusion.tasks.training_report import Report

_MACHINE = "Give hf.Machine.detect(), or hf.Machine([hf.Device(...), ...])"


def plan(tasks: Task | Iterable[Task], machine: Machine | None = None) -> Plan:
    """Plan the training of one or several tasks: which members run together, where, and in how many shards.

    The plan also chooses one process, or one per device (``plan.processes``). To change that, use
    ``dataclasses.replace``: ``replace(plan, processes=None)`` decides again, and ``replace(plan.processes, count=1)``
    uses one process.

    Args:
        tasks: one task or several.
        machine: by default this one, see `Machine.detect`.

    Returns:
        A plan that ``print`` shows, `hfusion.simulate` simulates, and `hfusion.train` takes. The models are captured,
        and nothing is trained.

    Raises:
        PlanError: the tasks cannot fit the machine.
        FusionError: a model cannot be captured.

    Example:
        >>> import torch, hfusion as hf
        >>> task = hf.Task(
        ...     [torch.nn.Linear(2, 1) for _ in range(2)],
        ...     torch.nn.functional.mse_loss,
        ...     lambda params: hf.optim.SGD(params, lr=0.1),
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ... )
        >>> hf.plan([task], hf.Machine([hf.Device("cpu", memory="1GiB")])).tasks[0].resident
        True
    """
    machine = Machine.detect() if machine is None else machine
    if not isinstance(machine, Machine):
        raise PlanError(f"machine must be an hf.Machine, got {type(machine).__name__}. {_MACHINE}.")
    return _arranged(listed(tasks), machine, keep=True)[1]


def train(
    tasks: Task | Iterable[Task],
    machine: Machine | Cluster | None = None,
    policy: str | Policy = DEFAULT,
    *,
    plan: Plan | None = None,
    progress: bool = False,
    checkpoint: str | os.PathLike[str] | None = None,
    every: int | None = None,
    resume: bool = True,
    on_result: OnResult | None = None,
) -> Report:
    """Train all tasks, each exactly as if alone, within the memory of every device.

    Args:
        tasks: one task, or several with different names that train no memory in common.
        machine: devices with budgets, host memory and a folder; by default this machine, see `Machine.detect`. Or an
            `hfusion.Cluster`. If one process would keep several devices waiting for Python, each device gets a process
            of its own, with the same results, see `hfusion.plan`. Callbacks and ``on_result`` run in this process.
        policy: which unit a device runs next: one of `hfusion.schedule.policy.POLICIES` or its name. With more tasks
            than devices, only a patient policy keeps a shard on its device.
        plan: a plan from `hfusion.plan` for these tasks and this machine, possibly changed. Default: plan now.
        progress: show a bar per task, or ten lines if the output is not a terminal or a notebook.
        checkpoint: a folder in which each task is saved during training, and from which it resumes. Finished tasks are
            not trained again. Default: no saves.
        every: the most minibatches of a task that a crash can cost; by default those of an epoch. Saves are made twice
            as often, since one half trains while the save of the other is written, and at the end. With ``accumulate``
            they follow the next step of the optimizer.
        resume: with False, a folder that holds saves is an error.
        on_result: called after every minibatch with a `Step`, and after every evaluation with an `Evaluation`, by one
            device at a time. It decides which members stop: None or False for none, True for all ``result.members``, a
            sequence of members, or a bool tensor with a value for each of ``result.members``. A stopped member keeps
            its weights, and its later losses are NaN. An array whose members have all stopped takes no more time. When
            a run resumes, earlier results are passed again, and the answers are ignored.

    Raises:
        PlanError: the tasks cannot fit the machine, cannot be trained together, or have an invalid loss.
        FusionError: a model cannot be captured.
        CheckpointError: a save is damaged, or belongs to other tasks, members or shapes, or the folder cannot be made.
        TrainError: a task failed, or could not be saved. ``error.report`` has the finished tasks, ``error.__cause__``
            the reason.

    Example:
        >>> import torch, hfusion as hf
        >>> task = hf.Task(
        ...     [torch.nn.Linear(2, 1) for _ in range(2)],
        ...     torch.nn.functional.mse_loss,
        ...     lambda params: hf.optim.SGD(params, lr=[0.1, 0.2]),
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     name="lines",
        ... )
        >>> report = hf.train([task], hf.Machine([hf.Device("cpu", memory="1GiB")]))
        >>> report["lines"].losses.shape  # minibatches, members
        torch.Size([1, 2])
    """
    checkpoint = resume_folder("train") if checkpoint is None else checkpoint
    machine = Machine.detect() if machine is None else machine
    if isinstance(machine, Cluster):
        options: dict[str, Any] = {"plan": plan, "progress": progress, "checkpoint": checkpoint, "every": every}
        return machine.train(tasks, policy, **options, resume=resume, on_result=on_result)
    if not isinstance(machine, Machine):
        raise PlanError(f"machine must be an hf.Machine, got {type(machine).__name__}. {_MACHINE}, or an hf.Cluster.")
    chosen, tasks, root = named(policy), listed(tasks), None if checkpoint is None else Path(checkpoint)
    with ExitStack() as stack:
        stack.enter_context(reserve_tensors(tasks))
        # If tasks alternate on a device, a kept shard would be loaded and evicted at every switch.
        keep = chosen.patient or len(tasks) <= len(machine.devices)
        arrangements, run_plan = _arranged(tasks, machine, keep=keep, on_result=on_result)
        if plan is not None:
            run_plan = _with_processes(checked_plan(plan, run_plan), run_plan, arrangements, machine, on_result)
        check_every(every)
        if root is not None:
            check_folder(root, [arrangement.plan.name for arrangement in arrangements], resume=resume)
        log = stack.enter_context(EventLog(root, "train", arrays=len(arrangements)))
        if run_plan.processes is not None and run_plan.processes.count > 1:
            shared = RunOptions(root and root.absolute(), every, DEFAULT, on_result is not None)
            run = _ProcessRun(arrangements, run_plan, machine, shared, log)
            report = run.train(on_result, progress=progress)
            if report is not None:
                return report
            run_plan = replace(run_plan, processes=Processes(1, f"processes could not begin: {run.trouble}"))
        logs = ArrayLogs(
            log, [(arrangement.plan.name, arrangement.task, arrangement.members) for arrangement in arrangements]
        )

        def listen(index: int, event: ArrayEvent, device: str | None) -> None:
            logs.hear(index, event, {"device": device})

        trained = arrangements, run_plan, machine, chosen, progress, root, every, on_result
        return train_arranged(*trained, listen=None if root is None else listen)


class _ProcessRun:
    """A run with one process per device. ``trouble``: why the processes could not start; empty before."""

    def __init__(
        self, arrangements: Sequence[Arrangement], plan: Plan, machine: Machine, options: RunOptions, log: EventLog
    ) -> None:
        self._arrangements, self._plan, self._options, self.trouble = arrangements, plan, options, ""
        self._log = log
        devices = [Device(device.device, device.name, memory=plan.devices[device.name]) for device in machine.devices]
        self._machine = Machine(devices, machine.host, machine.disk)

    def train(self, on_result: OnResult | None, *, progress: bool) -> Report | None:
        """Return the report; None, with a warning, if processes do not start or an array fails before any result.

        The caller then trains in this process, since the cause may be code that only this process has. An error with
        another cause occurs again there.
        """
        states, drive = torch.get_rng_state(), None
        try:
            with ExitStack() as stack:
                executor = ProcessExecutor(self._machine, with_main=False)
                stack.callback(executor.close)
                arrays = planned(self._arrangements, self._plan, executor.devices, self._options)
                drive = Drive(arrays, executor, MAX_FAILURES, self._log, on_result, ends_at_failure=True)
                if progress:
                    bars = TaskBars([(task.name, task.steps) for task in self._plan.tasks], [0] * len(arrays.arrays))
                    drive.show = stack.enter_context(bars).reach
                return drive.run()
        except Exception as error:
            if drive is not None and (drive.heard or not isinstance(error, TrainError) or not drive.unstarted):
                raise
            self.trouble = f"{type(error).__name__}: {error}"
        torch.set_rng_state(states)
        warnings.warn(f"hf.train goes on in one process, as processes could not begin: {self.trouble}", stacklevel=3)
        return None


def _arranged(
    tasks: Sequence[Task], machine: Machine, *, keep: bool, on_result: OnResult | None = None
) -> tuple[list[Arrangement], Plan]:
    """Return the arrays of tasks and their plan; with several devices, the plan includes the choice of processes."""
    began = time.monotonic()
    arrangements, plan = arrange(tasks, machine, keep=keep)
    if len(machine.devices) == 1:
        return arrangements, plan
    seconds = time.monotonic() - began
    return arrangements, replace(plan, processes=_processes(arrangements, plan, machine, seconds, on_result))


def _with_processes(
    plan: Plan, default_plan: Plan, arrangements: Sequence[Arrangement], machine: Machine, on_result: OnResult | None
) -> Plan:
    """Return ``plan`` with the processes of ``default_plan`` if it has none; one process if more are impossible."""
    processes = plan.processes or default_plan.processes
    if processes is not None and processes.count > 1 and (obstacle := _obstacle(arrangements, machine, on_result)):
        processes = Processes(1, f"{processes.reason}; but {obstacle}")
    return replace(plan, processes=processes)


def _processes(
    arrangements: Sequence[Arrangement],
    plan: Plan,
    machine: Machine,
    seconds: float,
    on_result: OnResult | None,
) -> Processes:
    """Choose the number of processes. ``seconds``: how long arranging took, which every process repeats."""
    largest = max(machine.devices, key=lambda device: device.memory)
    rates, count = machine.calibrate()[largest.name], len(machine.devices)
    arrays = [
        ArraySeconds.of(arrangement, task_plan, rates)
        for arrangement, task_plan in zip(arrangements, plan.tasks, strict=True)
    ]
    startup = begin_seconds(machine) + seconds * -(-len(arrays) // count) / len(arrays)
    at_once = devices_at_once(count, rates, torch.get_num_threads())
    processes = choose_processes(arrays, count, at_once, startup)
    if processes.count > 1 and (obstacle := _obstacle(arrangements, machine, on_result)):
        return Processes(1, f"{processes.reason}; but {obstacle}")
    return processes


def _obstacle(arrangements: Sequence[Arrangement], machine: Machine, on_result: OnResult | None) -> str:
    """Return why arrays cannot be trained in other processes with the same results; empty if they can."""
    tasks = list({id(arrangement.task): arrangement.task for arrangement in arrangements}.values())
    for task in tasks:
        for model in [task.models] if isinstance(task.models, FusedModule) else ():
            device = next((tensor.device for _, tensor in tensors(model) if tensor.device.type != "cpu"), None)
            if device is not None:
                return f"the array of the task {task.name!r} is on {device}, where another process would need it twice"
    listeners = [*([] if on_result is None else [on_result]), *(value for task in tasks for value in task.callbacks)]
    sent = [value for task in tasks for value in _read_while_training(task)]
    try:
        check_schedulers(tasks)
    except PlanError as error:
        return str(error)
    parcels = (
        (f"the task {arrangement.task.name!r}", sent_task(arrangement.task, arrangement.members))
        for arrangement in arrangements
    )
    return copy_obstacle(listeners, sent, parcels, machine)


def _read_while_training(task: Task) -> list[object]:
    """Return the user's objects that training reads. Listed models are left out, since they are copied first."""
    objects: list[object] = [task.loader, task.eval_loader, task.loss, task.optimizer, task.scheduler]
    return [*objects, task.models] if isinstance(task.models, FusedModule) else objects
