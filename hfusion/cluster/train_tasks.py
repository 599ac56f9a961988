"""`hf.plan` and `hf.train`: plan and train many tasks on many devices."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from hfusion.cluster.cluster import Cluster
from hfusion.core.errors import PlanError
from hfusion.core.event_log import EventLog, resume_folder
from hfusion.device.machine import Machine
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import DEFAULT, Policy, named
from hfusion.tasks.arrange import arrange, checked_plan
from hfusion.tasks.array_log import ArrayEvent, ArrayLogs
from hfusion.tasks.checkpoints import check_every, check_folder
from hfusion.tasks.sharing import listed, reserve_tensors
from hfusion.tasks.stopping import OnResult
from hfusion.tasks.task import Task
from hfusion.tasks.train import train_arranged
from hfusion.tasks.training_report import Report

_MACHINE = "Give hf.Machine.detect(), or hf.Machine([hf.Device(...), ...])"


def plan(tasks: Task | Iterable[Task], machine: Machine | None = None) -> Plan:
    """Plan the training of one or several tasks: which members run together, where, and in how many shards.

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
    return arrange(listed(tasks), machine)[1]


def train(
    tasks: Task | Iterable[Task],
    machine: Machine | Cluster | None = None,
    policy: str | Policy = DEFAULT,
    *,
    plan: Plan | None = None,
    processes: int | None = None,
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
            `hfusion.Cluster`.
        policy: which unit a device runs next: one of `hfusion.schedule.policy.POLICIES` or its name. With more tasks
            than devices, only a patient policy keeps a shard on its device.
        plan: a plan from `hfusion.plan` for these tasks and this machine, possibly changed. Default: plan now.
        processes: 1, the default: this process trains on all devices. As many as the machine has devices: each gets
            a process of its own, as by ``hf.Cluster(machine)``, with the same results. That is faster where Python
            keeps the devices waiting. The processes train with copies of the loaders, losses and optimizers. Callbacks
            and ``on_result`` run in this process.
        progress: show a bar per task, or ten lines if the output is not a terminal.
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
    if isinstance(machine, Machine) and processes not in (None, 1):
        if processes != len(machine.devices):
            raise PlanError(f"processes={processes!r} for {len(machine.devices)} devices: give 1, or one per device")
        machine = Cluster(machine)
    elif isinstance(machine, Cluster) and processes is not None:
        raise PlanError("processes is for an hf.Machine: a cluster has a process for each of its devices")
    if isinstance(machine, Cluster):
        return machine.train(
            tasks,
            policy,
            plan=plan,
            progress=progress,
            checkpoint=checkpoint,
            every=every,
            resume=resume,
            on_result=on_result,
        )
    if not isinstance(machine, Machine):
        raise PlanError(f"machine must be an hf.Machine, got {type(machine).__name__}. {_MACHINE}, or an hf.Cluster.")
    chosen, tasks, root = named(policy), listed(tasks), None if checkpoint is None else Path(checkpoint)
    with ExitStack() as stack:
        stack.enter_context(reserve_tensors(tasks))
        # If tasks alternate on a device, a kept shard would be loaded and evicted at every switch.
        keep = chosen.patient or len(tasks) <= len(machine.devices)
        arrangements, run_plan = arrange(tasks, machine, keep=keep)
        if plan is not None:
            run_plan = checked_plan(plan, run_plan)
        check_every(every)
        if root is not None:
            check_folder(root, [arrangement.plan.name for arrangement in arrangements], resume=resume)
        log = stack.enter_context(EventLog(root, "train", arrays=len(arrangements)))
        logs = ArrayLogs(log)

        def listen(index: int, event: ArrayEvent, device: str | None) -> None:
            array = arrangements[index]
            logs.hear(array.plan.name, array.task, array.members, event, {"device": device})

        trained = arrangements, run_plan, machine, chosen, progress, root, every, on_result
        return train_arranged(*trained, listen=None if root is None else listen)
