"""Choice of processes for a sweep on several devices: one, on the largest device, or one per device."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from hfusion.cluster.driver import GLANCE
from hfusion.cluster.executor import Executor
from hfusion.cluster.messages import Answered, DeviceInfo, Lost, Raised
from hfusion.cluster.node import ArrayTrainer
from hfusion.cluster.process_choice import MAX_FAILURES, devices_at_once
from hfusion.cluster.process_executor import ProcessExecutor, begin_seconds
from hfusion.cluster.rates import DIFFERS
from hfusion.cluster.reachable import copy_obstacle
from hfusion.cluster.serialization import pack, unpack
from hfusion.core.calls import call_arguments
from hfusion.core.errors import HFusionError
from hfusion.device.generators import draws_kept
from hfusion.device.machine import Machine
from hfusion.schedule.plan import Processes
from hfusion.tune.cluster_workers import SWEEP_PARCEL, ClusterWorkers
from hfusion.tune.epoch_batches import first_inputs
from hfusion.tune.shape_groups import Shapes
from hfusion.tune.space import Maker, TrialModel
from hfusion.tune.study import import_optuna
from hfusion.tune.sweep_runner import Extent
from hfusion.tune.sweep_workers import largest
from hfusion.tune.training_setup import SweepRecipe

_log = logging.getLogger(__name__)


def choose_sweep_processes(
    machine: Machine, maker: Maker, recipe: SweepRecipe, extent: Extent, local_objects: Sequence[object]
) -> tuple[Processes, TrialModel | None]:
    """Return how many processes train a sweep, by estimates for a sampled trial, and that trial or None.

    Args:
        maker: makes models on the CPU.
        local_objects: objects that are not sent to other processes, such as callbacks.
    """
    if extent.pbt is not None:
        return Processes(1, "pbt compares the trials of a shape, which are on one device"), None
    device, count = largest(machine), len(machine.devices)
    rates = machine.calibrate()[device.name]
    try:
        sample = _sampled(maker)
        shapes = Shapes(maker.models, recipe, 1.0, saved=False, may_be_plain=True)
        info = DeviceInfo(device.name, device.physical, device.memory, rates, 0.0)
        seconds = _trial_seconds(sample, shapes, info, extent)
    except Exception as error:
        # The sweep raises the error itself, if it occurs there again.
        return Processes(1, f"a trial of the space could not be estimated: {type(error).__name__}: {error}"), None
    single, startup = extent.trials * seconds, begin_seconds(machine)
    several = startup + single / devices_at_once(count, rates, torch.get_num_threads())
    reason = (
        f"{extent.trials} trials of {extent.epochs} epochs take an estimated {single:.3g} s on the largest device, and "
        f"{several:.3g} s on {count}, of which {startup:.2g} s to begin"
    )
    if several * (1 + DIFFERS) >= single:
        return Processes(1, reason), sample
    sent = [recipe.loss, recipe.loaders, recipe.eval_loader, recipe.metric, recipe.scheduler, maker.models]
    parcel = SWEEP_PARCEL, (recipe, maker.models)
    if why := copy_obstacle(local_objects, [*sent, sample.suggestion], [parcel], machine):
        return Processes(1, f"{reason}; but {why}"), sample
    return Processes(count, reason), sample


def _sampled(maker: Maker) -> TrialModel:
    optuna = import_optuna()
    with _quiet(optuna):
        trial = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0)).ask()
    return maker.candidate(trial.number, maker.suggestion(trial))


@contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


def _trial_seconds(sample: TrialModel, shapes: Shapes, device: DeviceInfo, extent: Extent) -> float:
    """Return the estimated seconds of a whole trial, in an array of the fastest width."""
    shape = shapes.shape(sample, ())
    rows = shape.fastest(device, max(1, min(extent.trials, extent.concurrent())))
    return shape.footprint(device).seconds(rows) / rows * (shapes.minibatches(sample) or 1) * sample.suggestion.epochs


@dataclass(frozen=True)
class FirstForward:
    """Calls the model of a trial in another process, to check that all its code and data are available there."""

    recipe_ref: Any
    sample: bytes

    def call(self, trainer: ArrayTrainer, part: Callable[[Any], Any]) -> None:
        recipe, _ = unpack(part(self.recipe_ref))
        sample: TrialModel = unpack(self.sample)
        cpu, suggestion = torch.device("cpu"), sample.suggestion
        model = replace(sample.maker, device=cpu).model(sample.number, suggestion)
        args, kwargs = call_arguments(first_inputs(recipe.loaders.loader(suggestion.choices.loader), cpu), {})
        with draws_kept(), torch.no_grad():
            model(*args, **kwargs)


def several_devices(
    machine: Machine,
    maker: Maker,
    recipe: SweepRecipe,
    extent: Extent,
    local_objects: Sequence[object],
    saved_count: int | None,
    stack: ExitStack,
) -> tuple[ClusterWorkers | None, Processes]:
    """Return workers in one process per device, closed by ``stack``, or None if one process is to train; and why.

    Args:
        saved_count: the number of processes of the sweep that is resumed, if there is one.
    """
    count = len(machine.devices)
    if saved_count in (1, count):
        processes, sample = Processes(saved_count, "as the sweep that goes on began"), None
    else:
        processes, sample = choose_sweep_processes(machine, maker, recipe, extent, local_objects)
    workers = None
    if processes.count > 1:
        try:
            with ExitStack() as opened:
                executor = ProcessExecutor(machine, with_main=False)
                opened.callback(executor.close)
                workers = ClusterWorkers(executor, recipe, maker.models, MAX_FAILURES)
                if sample is not None:
                    _check_first(executor, FirstForward(workers.recipe_ref, pack("a trial", sample, {})))
                stack.push(opened.pop_all())
        except Exception as error:
            trouble = f"processes could not begin: {type(error).__name__}: {error}"
            warnings.warn(f"hf.sweep goes on in one process, as {trouble}", stacklevel=3)
            processes, workers = Processes(1, trouble), None
    _log.info("%s", processes)
    return workers, processes


def _check_first(executor: Executor, job: FirstForward) -> None:
    executor.start_job(0, job)
    while True:
        for _, message in executor.wait(GLANCE):
            if isinstance(message, Raised):
                raise message.error
            if isinstance(message, Lost):
                raise HFusionError(message.reason)
            if isinstance(message, Answered):
                return
