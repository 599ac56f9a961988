"""hf.sweep: the trials of an Optuna study, trained as arrays."""

from __future__ import annotations

import math
import os
import time
import uuid
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import EventLog, resume_folder
from hfusion.core.loss_checks import check_loss_function
from hfusion.device.machine import Machine
from hfusion.device.native import cores
from hfusion.optim import AdamW
from hfusion.step.compile_mode import Compile, check_compile
from hfusion.tune.asynchronous_runner import AsynchronousSweepRunner
from hfusion.tune.chosen_optimizer import MakeOptimizer
from hfusion.tune.heartbeat import Heartbeat, dead_runs
from hfusion.tune.loaders import Loaders
from hfusion.tune.objectives import check_objectives
from hfusion.tune.population_based_training import PBT
from hfusion.tune.space import MakeModel, Maker, MakeScheduler, Space, SweepDefaults
from hfusion.tune.study import Draws, check_outlives, concurrent_trials, import_optuna, listening, open_study
from hfusion.tune.sweep_folder import SweepFolder
from hfusion.tune.sweep_result import Processes, SweepResult
from hfusion.tune.sweep_runner import Extent, SweepProgress, SweepRunner
from hfusion.tune.sweep_workers import LocalWorkers, largest
from hfusion.tune.training_setup import SweepRecipe
from hfusion.tune.trials import Callback, Trials

if TYPE_CHECKING:
    from hfusion.cluster.cluster import Cluster
    from hfusion.tune.cluster_workers import ClusterWorkers

_RUNNERS = {kind.rounds: kind for kind in (SweepRunner, AsynchronousSweepRunner)}


def sweep(
    make_model: MakeModel,
    space: Space,
    loss: Callable[..., Any],
    loader: Iterable[Any] | Callable[..., Iterable[Any]],
    *,
    trials: int,
    epochs: int,
    optimizer: MakeOptimizer = AdamW,
    scheduler: MakeScheduler | None = None,
    scheduler_interval: Literal["epoch", "step"] = "epoch",
    eval_loader: Iterable[Any] | None = None,
    metric: Callable[..., Any] | None = None,
    study: Any = None,
    direction: str | None = None,
    directions: Sequence[str] | None = None,
    sampler: Any = None,
    pruner: Any = None,
    storage: Any = None,
    machine: Machine | Cluster | None = None,
    directory: str | os.PathLike[str] | None = None,
    rows: int | None = None,
    seed: int = 0,
    clip_norm: float | None = None,
    accumulate: int = 1,
    timeout: float | None = None,
    catch: type[BaseException] | tuple[type[BaseException], ...] = (),
    callbacks: Iterable[Callback] = (),
    pbt: PBT | None = None,
    compile: Compile = None,
    progress: bool = False,
    processes: int | None = None,
    rounds: Literal["together", "asynchronous"] = "together",
) -> SweepResult:
    """Search hyper-parameters with Optuna, training many trials at a time in one array, each as if alone.

    Args:
        make_model: ``make_model(...)`` returns a trial's model. It is called after ``torch.manual_seed(trial.number)``.
        space: ``space(trial)`` makes suggestions as in any Optuna objective, and returns them as a dict. Each value is
            passed by its name: to the optimizer (lr, betas, nesterov, ...), to ``make_model``, ``loader``, ``loss`` or
            ``scheduler``, or to the sweep itself: ``"optimizer"`` (a name such as ``"adam"``, or a class),
            ``"epochs"``, ``"clip_norm"`` and ``"accumulate"``. If several take the name, write ``"optimizer.eps"``,
            ``"make_model.eps"`` or ``"sweep.epochs"``. Trials whose models, optimizers, loss options, loaders or
            ``accumulate`` differ are in different arrays.
        loss: a functional loss of one member's output and target.
        loader: an iterable of minibatches ``(inputs, target)`` that can be read every epoch, or a function that makes
            one from values of the space, such as ``loader(batch_size)``, called after ``torch.manual_seed(seed)``.
        trials: the number of trials in the study. Trials of earlier calls with the same ``directory`` count.
        epochs: epochs of each trial. After epoch k, counted from 0, a value is reported as step k, and the pruner
            decides.
        optimizer: a class of hf.optim, or a function that makes an optimizer from parameters.
        scheduler: ``scheduler(optimizer, ...)`` makes a scheduler of torch.optim.lr_scheduler from the optimizer of one
            trial and values of the space.
        scheduler_interval: step the scheduler after every ``"epoch"`` and its evaluation, or after every ``"step"`` of
            the optimizer. A ReduceLROnPlateau gets the trial's value, or the loss of its last minibatch.
        eval_loader, metric: the value of a trial is ``metric(outputs, target)`` over all minibatches of ``eval_loader``
            (by default ``loader``) in eval mode, see `hfusion.Population.evaluate`. Without a metric it is the loss;
            without both, the mean training loss of the epoch.
        study: an optuna.Study, or the name of one. By default a study is created with ``direction`` ("minimize"),
            ``sampler``, ``pruner`` and ``storage``, whose defaults are Optuna's.
        directions: the directions of several objectives, in place of ``direction``; ``metric`` returns a value for
            each. Trials are then evaluated after their last epoch only, and none is pruned, as in Optuna.
        storage: as in optuna.create_study. By default a journal in ``directory``, or memory. With a directory it must
            be persistent.
        machine: where trials are trained; by default on this machine, within its memory. With several devices, each
            gets a process if there are two trials for each, see ``result.processes``. With a Cluster, all its devices
            are used. Values and decisions are the same as on one machine with the same ``rows``. With several
            processes, functions are sent to them.
        directory: a folder in which the sweep is saved after every round, and from which the same call resumes.
        rows: the number of trials at a time, if they fit into memory. By default as many as lower the time per trial,
            but no more than the search learns from: all with samplers that draw without regard to earlier values
            (random, grid, quasi-random, brute force) and no pruner that compares trials, one generation of CMA-ES and
            NSGA, and otherwise ``max(4, trials // 5)``. With ``pbt`` all.
        seed: in round r every array trains one epoch, and reads its loaders after ``torch.manual_seed(seed + r)``.
        clip_norm: the maximum gradient norm of each trial, as in torch.nn.utils.clip_grad_norm_.
        accumulate: minibatches per update, as in `hfusion.Task`: losses are divided by it, and the last update of an
            epoch may have fewer.
        timeout: seconds after which no new trials start, as in study.optimize. Running trials are finished. A resumed
            sweep starts counting again.
        catch: exceptions of ``space`` and ``make_model`` that fail their trial only, as in study.optimize.
        callbacks: called with the study and each finished trial, as in study.optimize. ``trial.params`` are those it
            was trained with last. Callbacks, ``space`` and ``metric`` may call study.stop(), after which no new trials
            start.
        pbt: population based training within each array; the default is then no pruner. The params of the result are
            those that trials were trained with last.
        compile: as in `hfusion.train_step`. Each shape needs up to three programs. None compiles them once the steps of
            an array have taken as long as that would; ``True`` compiles immediately, for long sweeps of few shapes.
        progress: show a bar of finished trials, as study.optimize(show_progress_bar=True) does. The logger ``hfusion``
            gets a line per round at level INFO.
        processes: the number of processes for trials whose shape occurs too rarely for an array; by default one per
            core, but at most one for every two trials. They are forked in sweeps of more than a moment. ``loss`` and
            ``metric`` then run in them, without side effects here. With ``processes=0`` all functions run in this
            process, also on a machine with several devices.
        rounds: with ``"together"`` arrays wait for each other after every epoch, and trials are reported in the order
            of their numbers, so that decisions do not depend on time. With ``"asynchronous"`` each array reports when
            it is ready: no device waits, and the pruner decides on what has been reported by then. The order is
            recorded in ``directory``, and a resumed sweep keeps to it.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: arguments exclude each other, such as several objectives with a pruner, or a directory with a study
            in memory.
        CheckpointError: the directory is in use, damaged, or of another sweep.
        PlanError: a trial does not fit on the device, a loader cannot be used, or a function cannot be sent to another
            process.
        DeviceLost: the processes of an array were lost more often than the cluster allows.

    Example:
        >>> import optuna, torch, hfusion as hf
        >>> result = hf.sweep(
        ...     lambda: torch.nn.Linear(2, 1),
        ...     lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)},
        ...     torch.nn.functional.mse_loss,
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     trials=2,
        ...     epochs=1,
        ...     sampler=optuna.samplers.RandomSampler(seed=0),
        ...     processes=0,
        ... )
        >>> sorted(result.best_params)
        ['lr']
    """
    _check_kinds(make_model, space, loss, metric, optimizer, scheduler, machine)
    extent = _extent(trials, epochs, rows, seed, timeout, catch, pbt)
    _check_numbers(clip_norm, accumulate, processes)
    _check_choice("scheduler_interval", scheduler_interval, ("epoch", "step"))
    _check_choice("rounds", rounds, _RUNNERS)
    if pbt is not None and scheduler is not None:
        raise ValueError("pbt changes the learning rates that a scheduler would write over: leave one of them out")
    if direction is not None and directions is not None:
        raise ValueError(f"direction={direction!r} and directions={directions!r}: give one of them")
    check_objectives(len(directions or [direction]), metric, pruner, pbt)
    if pbt is not None and pruner is None and study is None:
        pruner = import_optuna().pruners.NopPruner()
    check_compile(compile)
    machine = machine or Machine.detect()
    directory = resume_folder("sweep") if directory is None else directory
    if directory is not None:
        check_outlives(study, storage, Path(directory))
    # Models are made on the CPU until it is known which processes train.
    device = torch.device("cpu")
    loaders, callbacks = Loaders(loader, seed), list(callbacks)
    every_step = scheduler_interval == "step"
    defaults = SweepDefaults(optimizer, epochs, clip_norm, accumulate)
    maker = Maker(make_model, space, loss, loaders.function, scheduler, defaults, device)
    with ExitStack() as stack:
        folder = None
        if directory is not None:
            folder = SweepFolder(Path(directory))
            stack.callback(folder.close)
        root = None if folder is None else folder.root
        opened_study, is_private = open_study(study, storage, direction, directions, sampler, pruner, root)
        objectives = len(opened_study.directions)
        check_objectives(objectives, metric, pruner, pbt)
        if extent.rows is None:
            extent = replace(extent, concurrent=partial(concurrent_trials, opened_study, trials))
        recipe = SweepRecipe(loss, loaders, eval_loader, metric, device, compile, scheduler, every_step, objectives)
        saved = None if folder is None else folder.read()
        body = {} if saved is None else saved[0]
        _check_same(body, extent, rounds)
        stack.enter_context(listening(opened_study))
        sweep_trials = _trials(opened_study, body, callbacks, alone=is_private)
        heartbeat = Heartbeat(opened_study, sweep_trials.run, root)
        saved_count = body.get("processes")
        workers, recipe, chosen = _workers(machine, recipe, maker, extent, saved_count, processes, stack)
        extent = replace(extent, processes=1 if chosen is None else chosen.count)
        bar = SweepProgress(opened_study, trials, shown=progress)
        stack.callback(bar.close)
        log = stack.enter_context(EventLog(root, "sweep", trials=trials, epochs=epochs))
        runner = _RUNNERS[rounds](sweep_trials, maker, recipe, extent, workers, folder, heartbeat, bar, log)
        if not isinstance(workers, LocalWorkers):
            workers.choose_device, workers.lost = runner.take_over, runner.lost
        if saved is None:
            runner.save()
        else:
            runner.resume(*saved)
        try:
            runner.run()
        except BaseException:
            if folder is None:
                runner.fail_unfinished()
            raise
        heartbeat.end()
        return SweepResult(opened_study, tuple(sweep_trials.asked_numbers), runner.best.models, chosen)


def _check_numbers(clip_norm: float | None, accumulate: int, processes: int | None) -> None:
    if clip_norm is not None and not clip_norm > 0:
        raise ValueError(f"clip_norm={clip_norm!r}: give a norm above 0, or None")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise ValueError(f"accumulate={accumulate!r}: give a whole number of at least 1")
    if processes is not None and (not isinstance(processes, int) or processes < 0):
        raise ValueError(f"processes={processes!r}: give a whole number of at least 0, or None")


def _check_choice(name: str, value: str, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r}: it is " + " or ".join(f'"{choice}"' for choice in choices))


def _check_kinds(
    make_model: Any, space: Any, loss: Any, metric: Any, optimizer: Any, scheduler: Any, machine: Any
) -> None:
    """Raise ValueError for arguments of a wrong type, before any trial is started."""
    if isinstance(make_model, nn.Module):
        raise ValueError("make_model is a module: give a function that makes one, as each trial needs its own")
    for name, value in (("make_model", make_model), ("space", space), ("loss", loss), ("optimizer", optimizer)):
        if not callable(value):
            raise ValueError(f"{name}={value!r}: give a function")
    check_loss_function(loss)
    if metric is not None and not callable(metric):
        raise ValueError(f"metric={metric!r}: give a function of outputs and targets, or None")
    if scheduler is not None and not callable(scheduler):
        raise ValueError(f"scheduler={scheduler!r}: give a function of an optimizer that makes a scheduler, or None")
    if machine is None or isinstance(machine, Machine):
        return
    # Imported late: whoever passes a Cluster has imported it already.
    from hfusion.cluster.cluster import Cluster

    if not isinstance(machine, Cluster):
        raise ValueError(f"machine={machine!r}: give an hf.Machine, an hf.Cluster, or None for this machine")


def _extent(
    trials: int,
    epochs: int,
    rows: int | None,
    seed: int,
    timeout: float | None,
    catch: type[BaseException] | tuple[type[BaseException], ...],
    pbt: PBT | None,
) -> Extent:
    """Return the size and limits of the sweep. Raises ValueError for invalid numbers."""
    for name, value, least in (("trials", trials, 0), ("epochs", epochs, 1), ("rows", 1 if rows is None else rows, 1)):
        if not isinstance(value, int) or value < least:
            raise ValueError(f"{name}={value!r}: give a whole number of at least {least}")
    if not isinstance(pbt, PBT | None):
        raise ValueError(f"pbt={pbt!r}: give an hf.PBT, such as hf.PBT(), or None")
    if pbt is not None and rows is None:
        # Population based training compares all trials, so all train at the same time.
        rows = max(1, trials)
    if timeout is not None and not timeout > 0:
        raise ValueError(f"timeout={timeout!r}: give seconds above 0, or None")
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    catch = catch if isinstance(catch, tuple) else (catch,)
    return Extent(trials, epochs, rows, seed, catch, pbt, deadline, lambda: rows or trials)


def _trials(study: Any, body: Mapping[str, Any], callbacks: Iterable[Callback], *, alone: bool) -> Trials:
    """Return the trials of the saved sweep, or of a new one; mark trials abandoned by crashed sweeps as failed."""
    trials = Trials(
        study,
        body.get("run") or uuid.uuid4().hex,
        Draws(study, body.get("base")),
        asked_numbers=body.get("asked", ()),
        attributes={number: names for array in body.get("arrays", ()) for number, _, _, names, *_ in array["seats"]},
        alone=alone,
        callbacks=callbacks,
    )
    trials.fail_stale_trials(dead_runs(study))
    return trials


def _workers(
    machine: Machine | Cluster,
    recipe: SweepRecipe,
    maker: Maker,
    extent: Extent,
    saved_count: int | None,
    processes: int | None,
    stack: ExitStack,
) -> tuple[LocalWorkers | ClusterWorkers, SweepRecipe, Processes | None]:
    """Return the workers, closed by ``stack``, their recipe, and the `Processes` of a machine with several devices.

    If this process trains, ``maker`` makes models on its device from now on.

    Args:
        saved_count: the number of processes of the sweep that is resumed, if there is one.
        processes: see `hfusion.sweep`.
    """
    chosen = None
    if not isinstance(machine, Machine):
        # Imported late: a sweep in one process does not need clusters.
        from hfusion.tune.cluster_workers import ClusterWorkers

        executor = machine._open()
        stack.callback(executor.close)
        return ClusterWorkers(executor, recipe, maker.models, machine._max_failures), recipe, None
    if len(machine.devices) > 1:
        chosen = _processes_of_devices(len(machine.devices), extent, saved_count, processes)
        if chosen.count > 1:
            from hfusion.cluster.process_executor import ProcessExecutor
            from hfusion.tune.cluster_workers import ClusterWorkers

            try:
                several = ProcessExecutor(machine)
                stack.callback(several.close)
                return ClusterWorkers(several, recipe, maker.models), recipe, chosen
            except Exception as error:
                trouble = f"processes could not begin: {type(error).__name__}: {error}"
                warnings.warn(f"hf.sweep goes on in one process, as {trouble}", stacklevel=3)
                chosen = Processes(1, trouble)
    device = largest(machine).physical
    recipe, maker.models = replace(recipe, device=device), replace(maker.models, device=device)
    local = LocalWorkers(machine, recipe, min(cores(), extent.trials // 2) if processes is None else processes)
    stack.callback(local.close)
    return local, recipe, chosen


def _processes_of_devices(count: int, extent: Extent, saved_count: int | None, processes: int | None) -> Processes:
    """Return how many processes train a sweep on a machine with ``count`` devices, and why: one, or one for each."""
    if extent.pbt is not None:
        return Processes(1, "pbt compares the trials of a shape, which are on one device")
    if saved_count in (1, count):
        return Processes(saved_count, "as the sweep that goes on began")
    if processes is not None and processes < 2:
        return Processes(1, f"processes={processes}")
    if extent.trials < 2 * count:
        return Processes(1, f"{extent.trials} trials are fewer than two for each of {count} devices")
    return Processes(count, f"{extent.trials} trials are at least two for each device")


def _check_same(body: Any, extent: Extent, rounds: str) -> None:
    """Raise CheckpointError if the saved sweep has other ``epochs``, ``seed`` or ``rounds``, so values would differ."""
    for name, value in (("epochs", extent.epochs), ("seed", extent.seed), ("rounds", rounds)):
        saved = body.get(name, "together" if body and name == "rounds" else value)
        if saved != value:
            raise CheckpointError(
                f"{name} was {saved} when the sweep was saved, and is {value}: give what it was, or a new directory"
            )
