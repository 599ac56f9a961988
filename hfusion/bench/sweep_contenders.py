"""Ways to search hyper-parameters on one machine: `hfusion.bench.sweep_benchmark` compares them."""

from __future__ import annotations

import logging
import multiprocessing
import os
import tempfile
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import hfusion as hf
from hfusion.bench.sweep_benchmark import (
    BATCH,
    REDUCTION,
    Searched,
    SweepCase,
    SweepContender,
    SweepSettings,
    accuracy,
    space,
    train,
)

NAME = "bench"


def configurations(count: int) -> list[dict[str, float]]:
    """The same for all, drawn at random."""
    import optuna

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    return [space(study.ask()) for _ in range(count)]


def pruner(settings: SweepSettings) -> Any:
    import optuna

    if not settings.pruned:
        return optuna.pruners.NopPruner()
    return optuna.pruners.HyperbandPruner(1, settings.epochs, REDUCTION)


def study_of(settings: SweepSettings, storage: Any = None) -> Any:
    """Return a study with all configurations enqueued."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(study_name=NAME, storage=storage, direction="maximize", pruner=pruner(settings))
    for configuration in configurations(settings.trials):
        study.enqueue_trial(configuration)
    return study


def searched(study: Any) -> Searched:
    trials = study.get_trials(deepcopy=False)
    return Searched(len(trials), sum(len(trial.intermediate_values) for trial in trials), study.best_value)


def _objective(case: SweepCase, epochs: int, data: Any, trial: Any) -> float:
    import optuna

    value = 0.0
    for step, value in enumerate(train(case, data, space(trial), trial.number, epochs)):
        trial.report(value, step)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


def optimize(case: SweepCase, settings: SweepSettings, jobs: int) -> Searched:
    """study.optimize, in so many threads."""
    study = study_of(settings)
    study.optimize(partial(_objective, case, settings.epochs, case.data()), n_trials=settings.trials, n_jobs=jobs)
    return searched(study)


def one_by_one(case: SweepCase, settings: SweepSettings) -> Searched:
    return optimize(case, settings, 1)


def threads(case: SweepCase, settings: SweepSettings) -> Searched:
    return optimize(case, settings, settings.cores)


def _journal(path: str) -> Any:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return JournalStorage(JournalFileBackend(path))


def _worker(path: str, case: SweepCase, settings: SweepSettings, trials: int) -> None:
    import optuna

    torch.set_num_threads(1)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.load_study(study_name=NAME, storage=_journal(path), pruner=pruner(settings))
    study.optimize(partial(_objective, case, settings.epochs, case.data()), n_trials=trials)


def processes(case: SweepCase, settings: SweepSettings) -> Searched:
    """A process for each core, with the study in a journal."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "journal"))
        study = study_of(settings, _journal(path))
        context = multiprocessing.get_context("spawn")
        ends = [settings.trials * core // settings.cores for core in range(settings.cores + 1)]
        shares = [last - first for first, last in pairwise(ends)]
        workers = [context.Process(target=_worker, args=(path, case, settings, share)) for share in shares]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
            if worker.exitcode:
                raise RuntimeError(f"a worker ended with status {worker.exitcode}; see its error above")
        return searched(study)


def arrays(
    case: SweepCase, settings: SweepSettings, *, rows: int | None = None, compile: bool | None = False
) -> Searched:
    """hf.sweep."""
    data, study = case.data(), study_of(settings)
    inputs, target = data.judge
    hf.sweep(
        case.make_model,
        space,
        F.cross_entropy,
        data.train,
        eval_loader=list(zip(inputs.split(BATCH), target.split(BATCH), strict=True)),
        metric=accuracy,
        study=study,
        trials=settings.trials,
        epochs=settings.epochs,
        rows=rows,
        compile=compile,
    )
    return searched(study)


def tune(case: SweepCase, settings: SweepSettings, share: float) -> Searched:
    """Ray Tune: each trial an actor that has ``share`` of a core."""
    import ray
    from ray import tune as ray_tune
    from ray.tune.schedulers import AsyncHyperBandScheduler

    trial_configurations = configurations(settings.trials)
    reported: list[list[float]] = []

    def trainable(config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        for value in train(
            case, config["data"], trial_configurations[config["number"]], config["number"], settings.epochs
        ):
            ray_tune.report({"accuracy": value})

    # Else it prints tables of its own, whatever `verbose` says.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ray.init(num_cpus=settings.cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        scheduler: Any = None
        if settings.pruned:
            scheduler = AsyncHyperBandScheduler(
                max_t=settings.epochs, grace_period=1, reduction_factor=REDUCTION, brackets=3
            )
        tuner = ray_tune.Tuner(
            ray_tune.with_resources(ray_tune.with_parameters(trainable), {"cpu": share}),
            param_space={"number": ray_tune.grid_search(list(range(settings.trials))), "data": case.data()},
            tune_config=ray_tune.TuneConfig(metric="accuracy", mode="max", scheduler=scheduler, reuse_actors=True),
            run_config=ray_tune.RunConfig(storage_path=folder, verbose=0),
        )
        results = tuner.fit()
        for index in range(len(results)):
            frame: Any = results[index].metrics_dataframe
            reported.append(list(frame["accuracy"]))
    return Searched(len(reported), sum(map(len, reported)), max(values[-1] for values in reported))


CONTENDERS = (
    SweepContender("one-by-one", "study.optimize: one trial after the other, torch on all cores", one_by_one, True),
    SweepContender("threads", "study.optimize(n_jobs=cores)", threads),
    SweepContender("processes", "study.optimize in a process for each core, one journal", processes),
    SweepContender("ray", "Ray Tune, a core for each trial", partial(tune, share=1.0), needs="ray.tune"),
    SweepContender("ray-half", "Ray Tune, half a core for each trial", partial(tune, share=0.5), needs="ray.tune"),
    SweepContender("hfusion", "hf.sweep", arrays, True),
    SweepContender("hfusion-wide", "hf.sweep of 64 rows", partial(arrays, rows=64), True),
    SweepContender(
        "hfusion-compiled",
        "hf.sweep of 64 rows, compiled where that pays",
        partial(arrays, rows=64, compile=None),
        True,
    ),
)
