"""hf.sweep: the trials of an Optuna study, trained as arrays."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from hfusion.cluster.messages import DeviceInfo, Executor
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import EventLog, resume_folder
from hfusion.core.step_arguments import Compile, check_compile, check_loss_function
from hfusion.device.machine import Device, Machine
from hfusion.device.native import cores
from hfusion.optim import AdamW
from hfusion.tune.population_based_training import PBT
from hfusion.tune.space import MakeModel, MakeOptimizer, Maker, MakeScheduler, Space, sample_optimizer
from hfusion.tune.study import (
    Callback,
    SweepFolder,
    SweepResult,
    Trials,
    check,
    check_objectives,
    concurrent_trials,
    import_optuna,
    is_count,
    is_positive,
    listening,
    open_study,
)
from hfusion.tune.sweep_runner import SweepRunner
from hfusion.tune.sweep_workers import LocalExecutor, SweepWorkers
from hfusion.tune.trial_placement import Extent
from hfusion.tune.trial_rows import Loaders, SweepRecipe

if TYPE_CHECKING:
    from hfusion.cluster.cluster import Cluster


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
        trials: the number of trials of the sweep. Those of earlier calls with the same ``directory`` count, and those
            that a ``study`` of yours has do not.
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
        storage: as in optuna.create_study; by default memory.
        machine: where trials are trained; by default on this machine, within its memory. With several devices, each
            gets a process if there are two trials for each. With a Cluster, all its devices
            are used. Values and decisions are the same as on one machine with the same ``rows``. With several
            processes, functions are sent to them.
        directory: a folder in which the sweep is saved after every round, and from which the same call resumes. The
            study is in a journal there, so ``storage`` and an optuna.Study are excluded.
        rows: the number of trials at a time, if they fit into memory. By default as many as the search learns from: all
            with samplers that draw without regard to earlier values
            (random, grid, quasi-random, brute force) and no pruner that compares trials, one generation of CMA-ES and
            NSGA, and otherwise ``max(4, trials // 5)``. With ``pbt`` all.
        seed: in round r every array trains one epoch, and reads its loaders after ``torch.manual_seed(seed + r)``. A
            loader's own ``generator`` begins at its ``initial_seed() + seed + r``.
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
            core, but at most one for every two trials. They are forks of this process. ``loss`` and ``metric`` then run
            in them, without side effects here. With ``processes=0`` all functions run in this
            process, also on a machine with several devices.
        rounds: with ``"together"`` arrays wait for each other after every epoch, and trials are reported in the order
            of their numbers, so that decisions do not depend on time. With ``"asynchronous"`` each array reports when
            it is ready: no device waits, and the pruner decides on what has been reported by then.

    Raises:
        ImportError: Optuna is not installed.
        ValueError: arguments exclude each other, such as several objectives with a pruner, or a directory with a
            storage.
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
    given = locals()
    _check_arguments(given)
    asked = {name: _described(given[name]) for name in (*_FUNCTIONS, *_NUMBERS)}
    if pbt is not None and scheduler is not None:
        raise ValueError("pbt changes the learning rates that a scheduler would write over: leave one of them out")
    if direction is not None and directions is not None:
        raise ValueError(f"direction={direction!r} and directions={directions!r}: give one of them")
    check_objectives(len(directions or [direction]), metric, pruner, pbt)
    if pbt is not None and pruner is None and study is None:
        pruner = import_optuna().pruners.NopPruner()
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    machine = _machine(machine)
    directory = resume_folder("sweep") if directory is None else directory
    # On a machine with several devices, each has a process if there are two trials for it. With population based
    # training the trials of a shape are on one. Otherwise this process trains, on the largest.
    own: Device | None = None
    if isinstance(machine, Machine):
        count = len(machine.devices)
        if count == 1 or processes in (0, 1) or pbt is not None or trials < 2 * count:
            own = max(machine.devices, key=lambda device: device.memory)
    # Models for other processes are compared on the CPU.
    device = torch.device("cpu") if own is None else own.physical
    loaders, every_step = Loaders(loader, seed), scheduler_interval == "step"
    defaults = {"optimizer": optimizer, "epochs": epochs, "clip_norm": clip_norm, "accumulate": accumulate}
    with ExitStack() as stack:
        folder = None
        if directory is not None:
            folder = SweepFolder(Path(directory))
            stack.callback(folder.close)
        root = None if folder is None else folder.root
        saved = None if folder is None else folder.read()
        body = {} if saved is None else saved[0]
        _check_same(body.get("arguments", asked), asked)
        if folder is not None and not body.get("ended", True):
            folder.rewind(body["journal"])
        opened_study = open_study(study, storage, direction, directions, sampler, pruner, root)
        objectives = len(opened_study.directions)
        check_objectives(objectives, metric, pruner, pbt)
        # Population based training compares all trials, so all train at the same time.
        concurrent = partial(concurrent_trials, opened_study, trials)
        if rows is not None or pbt is not None:
            concurrent = partial(int, rows or max(1, trials))
        catch = catch if isinstance(catch, tuple) else (catch,)
        extent = Extent(trials, epochs, seed, catch, pbt, deadline, concurrent, rounds == "asynchronous", asked)
        recipe = SweepRecipe(
            make_model, loss, loaders, eval_loader, metric, device, compile, scheduler, every_step, objectives
        )
        maker = Maker(space, recipe, defaults)
        stack.enter_context(listening(opened_study))
        sweep_trials = Trials(opened_study, body.get("asked", ()), body.get("base"), callbacks)
        forks = min(cores(), trials // 2) if processes is None else processes
        executor = _executor(machine, own, recipe, forks)
        stack.callback(executor.close)
        failures = 3 if isinstance(machine, Machine) else machine._max_failures
        workers = SweepWorkers(executor, recipe, failures)
        bar = None
        if progress:
            # A dependency of Optuna.
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            bar = stack.enter_context(tqdm(total=trials))
        log = stack.enter_context(EventLog(root, "sweep", trials=trials, epochs=epochs))
        runner = SweepRunner(sweep_trials, maker, extent, workers, folder, bar, log)
        workers.lost = runner.lost
        if saved is not None:
            runner.resume(*saved)
        runner.save()
        try:
            runner.run()
        except BaseException:
            # Without a folder the sweep cannot be resumed. As in study.optimize, callbacks are not called after an
            # error, which may be theirs.
            for number in sweep_trials.live if folder is None else ():
                opened_study.tell(number, state=sweep_trials.states.FAIL, skip_if_finished=True)
            raise
        return SweepResult(opened_study, tuple(sweep_trials.asked_numbers), runner.best_models, len(workers.devices))


def _machine(machine: Any) -> Machine | Cluster:
    """Return the machine or cluster, by default this machine. Raises ValueError for anything else."""
    if machine is None or isinstance(machine, Machine):
        return machine or Machine.detect()
    # Imported late: whoever passes a Cluster has imported it already.
    from hfusion.cluster.cluster import Cluster

    if not isinstance(machine, Cluster):
        raise ValueError(f"machine={machine!r}: give an hf.Machine, an hf.Cluster, or None for this machine")
    return machine


def _check_arguments(given: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of `sweep` that are not valid, before there is a study."""
    if isinstance(given["make_model"], nn.Module):
        raise ValueError("make_model is a module: give a function that makes one, as each trial needs its own")
    for name in ("make_model", "space", "loss", "optimizer"):
        check(name, given[name], callable(given[name]), "give a function")
    for name, of in (("metric", "outputs and targets"), ("scheduler", "an optimizer")):
        check(name, given[name], given[name] is None or callable(given[name]), f"give a function of {of}, or None")
    for name, least in (("trials", 0), ("epochs", 1), ("accumulate", 1)):
        check(name, given[name], is_count(given[name], least), f"give a whole number of at least {least}")
    for name, least in (("rows", 1), ("processes", 0)):
        is_valid = given[name] is None or is_count(given[name], least)
        check(name, given[name], is_valid, f"give a whole number of at least {least}, or None")
    for name, what in (("clip_norm", "a norm"), ("timeout", "seconds")):
        check(name, given[name], given[name] is None or is_positive(given[name]), f"give {what} above 0, or None")
    for name, one, other in (("scheduler_interval", "epoch", "step"), ("rounds", "together", "asynchronous")):
        check(name, given[name], given[name] in (one, other), f'it is "{one}" or "{other}"')
    for name, method in (("sampler", "sample_independent"), ("pruner", "prune")):
        is_one = hasattr(given[name], method) and not isinstance(given[name], type)
        check(name, given[name], given[name] is None or is_one, f"give a {name} of Optuna")
    for name, is_other, other in (
        ("loader", callable(given["loader"]), "a function that makes them"),
        ("eval_loader", given["eval_loader"] is None, "None"),
    ):
        is_list = hasattr(given[name], "__iter__") or hasattr(given[name], "__getitem__")
        can_be_read = (is_list or is_other) and not isinstance(given[name], Iterator)
        check(name, given[name], can_be_read, f"give minibatches that can be read every epoch, or {other}")
    check("seed", given["seed"], isinstance(given["seed"], int), "give a whole number")
    callbacks, catch, directory = given["callbacks"], given["catch"], given["directory"]
    # To read an iterator would empty it.
    listed = () if isinstance(callbacks, Iterator) else callbacks
    are_functions = isinstance(callbacks, Iterable) and all(map(callable, listed))
    check("callbacks", callbacks, are_functions, "give a list of functions")
    check("directory", directory, isinstance(directory, str | os.PathLike | None), "give the path of a folder, or None")
    kinds = catch if isinstance(catch, tuple) else (catch,)
    are_errors = all(isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds)
    check("catch", catch, are_errors, "give a class of exceptions, or a tuple of them")
    check("pbt", given["pbt"], isinstance(given["pbt"], PBT | None), "give an hf.PBT, such as hf.PBT(), or None")
    check_loss_function(given["loss"])
    check_compile(given["compile"])
    sample_optimizer(given["optimizer"])


# What decides on the values of trials, and is no suggestion of the study.
_FUNCTIONS = ("make_model", "loss", "loader", "eval_loader", "metric", "optimizer", "scheduler")
_NUMBERS = ("epochs", "seed", "clip_norm", "accumulate", "scheduler_interval", "rounds", "pbt")


def _described(value: Any) -> str:
    """Return what an argument is, the same in every process; of your function its name, and names and numbers in it."""
    if (code := getattr(value, "__code__", None)) is not None and not str(value.__module__).startswith("torch."):
        inside = [*code.co_names, *(number for number in code.co_consts if isinstance(number, int | float))]
        return f"{value.__qualname__} ({', '.join(map(str, inside))})"
    if value is None or isinstance(value, int | float | str | PBT):
        return str(value)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _check_same(saved: Mapping[str, str], given: Mapping[str, str]) -> None:
    """Raise CheckpointError if the saved sweep had other arguments, so that values would differ."""
    for name, value in given.items():
        if saved[name] != value:
            raise CheckpointError(
                f"{name} was {saved[name]} when the sweep was saved, and is {value}: give what it was, or a new folder"
            )


def _executor(
    machine: Machine | Cluster, own: Device | None, recipe: SweepRecipe, forks: int
) -> Executor | LocalExecutor:
    """Return what trains: this process on the device ``own`` and its ``forks``, or a process for each device."""
    if not isinstance(machine, Machine):
        return machine._open()
    if own is not None:
        info = DeviceInfo(own.name, own.physical, own.memory, machine.calibrate()[own.name])
        return LocalExecutor(info, recipe, forks)
    # Imported late: a sweep in one process does not need clusters.
    from hfusion.cluster.node import ProcessExecutor

    return ProcessExecutor(machine)
