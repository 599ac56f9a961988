"""`hf.plan`, `hf.train` and `hf.Cluster`: plan and train many tasks on the devices of processes and machines."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hfusion.checkpoint.files import wrap_load_errors
from hfusion.cluster.driver import Drive, check_sendable, placed_tasks
from hfusion.cluster.messages import Executor
from hfusion.cluster.node import ArrayJob, ProcessExecutor
from hfusion.core.claimed_folder import lock_folder
from hfusion.core.errors import CheckpointError, PlanError
from hfusion.core.event_log import EventLog, resume_folder
from hfusion.device.machine import Machine, parse_bytes
from hfusion.schedule.plan import Plan
from hfusion.schedule.policy import DEFAULT, Policy, named
from hfusion.tasks.arrange import arrange, checked_plan
from hfusion.tasks.minibatch_border import OnResult, check_folder
from hfusion.tasks.task import Task, listed, reserve_tensors
from hfusion.tasks.train import train_arranged
from hfusion.tasks.training_report import ArrayEvent, ArrayLogs, Report, TaskBars


class Cluster:
    """Many devices, each with a process that trains one array after the other: ``hf.train(tasks, cluster)``.

    The driver, which calls `hfusion.train`, places tasks and their arrays, the largest first; workers plan the tasks.
    Models and data are sent to each node once. An array whose process or node is lost starts again on another device:
    from its last checkpoint, if ``hf.train(checkpoint=...)`` names a folder that all nodes reach.

    Args:
        where: the address of a Ray cluster, as in ``ray.init``, such as ``"auto"``. None: the cluster that this process
            is connected to, or a new one on this machine. A Machine: one process of this machine per device, without
            Ray.
        num_cpus, num_gpus, resources: Ray's resources for the process of a device, as in ``ray.remote``. By default
            each GPU has a process, and a node without GPUs has one that takes all its CPUs.
        runtime_env: as in ``ray.init``; if this process is already connected, for the actors only.
        memory: the budget of each device, see `hfusion.Device`; by default what `hfusion.Machine.detect` finds there.
        host: bytes of host memory of each process for spilled state; likewise.
        disk: a folder on each node for what exceeds ``host``.
        max_failures: how often the process of an array may be lost before the array is given up.
        timeout: for how many seconds to wait for a device of Ray while there is none, at the start and if all are lost.
        devices: how many processes to start, each with ``num_cpus``, ``num_gpus`` and ``resources``. Ray places them,
            and its autoscaler starts nodes for them. The run begins with the first ones; the others join it.

    Raises:
        PlanError: a value is out of range, or an option of Ray is given with a machine.

    Example:
        >>> import hfusion as hf
        >>> two_processes = hf.Machine([hf.Device("cpu", f"cpu:{n}", memory="1GiB") for n in range(2)])
        >>> cluster = hf.Cluster(two_processes, max_failures=3)
    """

    def __init__(
        self,
        where: str | Machine | None = None,
        *,
        num_cpus: float | None = None,
        num_gpus: float | None = None,
        resources: Mapping[str, float] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        memory: str | int | None = None,
        host: str | int | None = None,
        disk: str | Path = "spill/",
        max_failures: int = 3,
        timeout: float = 0.0,
        devices: int | None = None,
    ) -> None:
        if not isinstance(max_failures, int) or max_failures < 0:
            raise PlanError(f"max_failures={max_failures!r}: give a whole number of at least 0")
        if not isinstance(timeout, int | float) or not timeout >= 0:
            raise PlanError(f"timeout={timeout!r}: give seconds of at least 0")
        if devices is not None and (not isinstance(devices, int) or devices < 1):
            raise PlanError(f"devices={devices!r}: give a whole number of at least 1")
        if devices is not None and not (num_cpus or num_gpus or resources):
            raise PlanError(f"devices={devices}: also give what each device needs, such as num_gpus=1")
        self._where, self._max_failures, self._timeout, self._devices = where, max_failures, timeout, devices
        self._resources = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": resources}
        self._runtime_env = runtime_env
        self._memory = None if memory is None else parse_bytes(memory)
        self._host = None if host is None else parse_bytes(host)
        self._disk = Path(disk)
        ray_options = {**self._resources, "runtime_env": runtime_env, "memory": memory, "host": host}
        ray_options |= {"timeout": timeout or None, "devices": devices}
        given = [name for name, value in ray_options.items() if value is not None]
        if isinstance(where, Machine) and given:
            raise PlanError(f"{given[0]} is of Ray's nodes: the machine that is given says what it has; leave it out")

    def __repr__(self) -> str:
        where = f"{len(self._where.devices)} processes" if isinstance(self._where, Machine) else repr(self._where)
        return f"Cluster({where}, max_failures={self._max_failures})"

    def _open(self) -> Executor:
        if isinstance(self._where, Machine):
            return ProcessExecutor(self._where)
        from hfusion.cluster.ray_executor import RayExecutor

        resources = {name: value for name, value in self._resources.items() if value is not None}
        machine = (self._memory, self._host, self._disk)
        return RayExecutor(self._where, resources, self._runtime_env, machine, self._timeout, self._devices)


# `hf.plan` and `hf.train`: plan and train many tasks on many devices.

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
        TrainError: a loader has failed.

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
        every: the most minibatches of a task that a crash can cost, for ``checkpoint``; by default those of an epoch.
            Saves are made twice as often, since one half trains while the save of the other is written, and at the end.
            With ``accumulate`` they follow the next step of the optimizer.
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
    if every is not None and (not isinstance(every, int) or every < 1):
        raise CheckpointError(f"every={every!r}: give how many minibatches may be lost, at least 1")
    if every is not None and checkpoint is None:
        raise CheckpointError(f"every={every} is for saves, and there are none: give checkpoint=, a folder for them")
    chosen, tasks, root = named(policy), listed(tasks), None if checkpoint is None else Path(checkpoint)
    if not isinstance(machine, Machine | Cluster):
        raise PlanError(f"machine must be an hf.Machine, got {type(machine).__name__}. {_MACHINE}, or an hf.Cluster.")
    with ExitStack() as stack:
        if root is not None:
            with wrap_load_errors(root):
                root.mkdir(parents=True, exist_ok=True)
                stack.callback(lock_folder(root, "run"))
        if isinstance(machine, Cluster):
            if plan is not None:
                raise PlanError("plan is for one process on an hf.Machine: other processes plan by themselves")
            check_sendable(tasks)
            executor = machine._open()
            stack.callback(executor.close)
            root = None if root is None else root.absolute()
            job = ArrayJob("", (), b"", {}, None, chosen.name, root, every, on_result is not None)
            placed = placed_tasks(tasks, executor.devices, job, resume=resume)
            log = stack.enter_context(EventLog(root, "train", arrays=len(placed)))
            drive = Drive(placed, executor, machine._max_failures, log, on_result)
            if progress:
                bars = TaskBars([(task.name, task.steps) for task in tasks], [0] * len(tasks))
                drive.show = stack.enter_context(bars).reach
            return drive.run()
        stack.enter_context(reserve_tensors(tasks))
        # If tasks alternate on a device, a kept shard would be loaded and evicted at every switch.
        keep = chosen.patient or len(tasks) <= len(machine.devices)
        arrangements, run_plan = arrange(tasks, machine, keep=keep)
        if plan is not None:
            run_plan = checked_plan(plan, run_plan)
        if root is not None:
            check_folder(root, [arrangement.plan.name for arrangement in arrangements], resume=resume)
        log = stack.enter_context(EventLog(root, "train", arrays=len(arrangements)))
        logs = ArrayLogs(log)

        def listen(index: int, event: ArrayEvent, device: str | None) -> None:
            array = arrangements[index]
            logs.hear(array.plan.name, array.task, array.members, event, {"device": device})

        trained = arrangements, run_plan, machine, chosen, progress, root, every, on_result
        return train_arranged(*trained, listen=None if root is None else listen)
