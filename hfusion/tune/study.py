"""The study of a sweep: opening it, seeding its sampler and pruner, and detecting an exhausted space."""

from __future__ import annotations

import copy
import math
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hfusion.population.evaluation import number
from hfusion.tune.population_based_training import PBT
from hfusion.tune.sweep_folder import JOURNAL

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial


# The name of the study in a sweep's folder.
STUDY = "sweep"


def import_optuna() -> Any:
    """Return the module optuna. Raises ImportError with the extra to install."""
    try:
        import optuna
    except ImportError as error:
        raise ImportError("hf.sweep needs Optuna: pip install optuna (extra: hfusion[sweep])") from error
    return optuna


def open_study(
    study: Any,
    storage: Any,
    direction: Any,
    directions: Sequence[Any] | None,
    sampler: Any,
    pruner: Any,
    directory: Path | None,
) -> Study:
    """Return the given study, or one by name, which is in a journal if there is a ``directory``.

    Raises ValueError for settings that a given study already has, for directions that differ from the study's, and for
    a study elsewhere than in the directory, with which a killed sweep could not be resumed.
    """
    optuna = import_optuna()
    settings = {"direction": direction, "directions": directions, "sampler": sampler, "pruner": pruner}
    given = isinstance(study, optuna.Study)
    if directory is not None:
        if given or storage is not None:
            raise ValueError(
                f"a sweep with directory={os.fspath(directory)!r} keeps its study in a journal there, with which it "
                "resumes. Leave out study and storage; afterwards optuna.copy_study copies the trials elsewhere."
            )
        backend = optuna.storages.journal.JournalFileBackend(str(directory / JOURNAL))
        storage, study = optuna.storages.JournalStorage(backend), study or STUDY
    if given:
        for key, value in {"storage": storage, **settings}.items():
            if value is not None:
                raise ValueError(f"{key}={value!r}: the study given has its own; give it to optuna.create_study")
        opened_study: Study = study
    elif study is None or isinstance(study, str):
        opened_study = optuna.create_study(
            study_name=study,
            storage=storage,
            directions=directions or [direction or "minimize"],
            sampler=sampler,
            pruner=pruner,
            load_if_exists=study is not None,
        )
    else:
        raise ValueError(f"study must be an optuna.Study, or the name of one, got {type(study).__name__}")
    name, requested = ("direction", [direction]) if directions is None else ("directions", list(directions))
    names = [goal.name.lower() for goal in opened_study.directions]
    if requested != [None] and [str(getattr(goal, "name", goal)).lower() for goal in requested] != names:
        argument = direction if directions is None else directions
        raise ValueError(f"{name}={argument!r}: study {opened_study.study_name!r} was made to {', '.join(names)}")
    return opened_study


@contextmanager
def listening(study: Study) -> Iterator[None]:
    """Context manager: let samplers and users call `Study.stop`, as in study.optimize."""
    local = study._thread_local
    before, local.in_optimize_loop = local.in_optimize_loop, True
    study._stop_flag = False
    try:
        yield
    finally:
        local.in_optimize_loop = before


def _base_sampler(study: Study) -> Any:
    """Return the study's sampler, or the one that a PartialFixedSampler asks."""
    sampler: Any = study.sampler
    while isinstance(sampler, import_optuna().samplers.PartialFixedSampler):
        sampler = sampler._base_sampler
    return sampler


def concurrent_trials(study: Study, trials: int) -> int:
    """Return how many of ``trials`` can train at a time without making the search worse.

    All of them if neither the sampler nor the pruner uses the values of other trials; else at most a fifth, and at
    least four. A sampler that learns trains as many startup trials, drawn at random, and then a tenth of all, at least
    four. One that works in generations trains a generation.
    """
    optuna = import_optuna()
    samplers, sampler = optuna.samplers, _base_sampler(study)
    if isinstance(sampler, samplers.NSGAIISampler | samplers.NSGAIIISampler):
        return int(sampler._population_size)
    most = max(4, trials // 5)
    draws = (samplers.RandomSampler, samplers.GridSampler, samplers.QMCSampler, samplers.BruteForceSampler)
    if type(sampler) in draws:
        compares = len(study.directions) == 1 and _compares_trials(study.pruner)
        return most if compares else max(1, trials)
    states = optuna.trial.TrialState
    finished = study.get_trials(deepcopy=False, states=(states.COMPLETE, states.PRUNED))
    startup = getattr(sampler, "_n_startup_trials", 0) - len(finished)
    if not isinstance(sampler, samplers.CmaEsSampler):
        return min(most, max(4, trials // 10, startup))
    if startup > 0 or not finished:
        # A trial beside these would be drawn at random, too.
        return max(1, startup)
    categorical = optuna.distributions.CategoricalDistribution
    numbers = sum(
        not isinstance(kind, categorical) for kind in study.get_trials(deepcopy=False)[0].distributions.values()
    )
    # The default of CMA-ES for this many parameters.
    return int(sampler._popsize or 4 + int(3 * math.log(max(1, numbers))))


def _compares_trials(pruner: Any) -> bool:
    pruners = import_optuna().pruners
    while isinstance(pruner, pruners.PatientPruner):
        pruner = pruner._wrapped_pruner
    return pruner is not None and type(pruner) not in (pruners.NopPruner, pruners.ThresholdPruner)


def exhausted(study: Study) -> bool:
    """Return whether a grid or brute-force sampler has no values left, counting running trials as finished.

    It would repeat values if asked again. Optuna asks for one trial at a time per job, and rarely has this problem.
    """
    optuna = import_optuna()
    sampler = _base_sampler(study)
    # Running trials are failed in this view.
    view, stops = study_view(study, lambda trials: [*map(_ended, trials)]), list[bool]()
    view.stop = lambda: stops.append(True)
    trials = view.get_trials(deepcopy=False)
    if not trials or any(trial.state == optuna.trial.TrialState.WAITING for trial in trials):
        return False
    if isinstance(sampler, optuna.samplers.GridSampler):
        return bool(sampler.is_exhausted(view))
    if isinstance(sampler, optuna.samplers.BruteForceSampler):
        sampler.after_trial(view, trials[-1], trials[-1].state, trials[-1].values)
    return bool(stops)


class _ChangedTrials:
    """A view of a storage that returns other trials."""

    def __init__(self, storage: Any, change: Callable[[list[FrozenTrial]], list[FrozenTrial]]) -> None:
        self._original_storage, self._change = storage, change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original_storage, name)

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        trials = self._change(self._original_storage.get_all_trials(study_id, deepcopy=False))
        trials = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(trials) if deepcopy else trials


def study_view(study: Study, change: Callable[[list[FrozenTrial]], list[FrozenTrial]]) -> Any:
    """Return a view of a study whose trials are those that ``change`` returns for the study's."""
    view: Any = copy.copy(study)
    view._storage = _ChangedTrials(study._storage, change)
    return view


def _ended(trial: FrozenTrial) -> FrozenTrial:
    states = import_optuna().trial.TrialState
    if trial.state != states.RUNNING:
        return trial
    ended = copy.copy(trial)
    ended.state = states.FAIL
    return ended


class Draws:
    """Seeds the generators of a sampler before each trial, with a seed of that trial.

    Trial k of a sweep then draws the same numbers, whether or not the sweep was killed and resumed before it.
    """

    def __init__(self, study: Study, base: int | None) -> None:
        self._study = study
        self.base = self._first() if base is None else base

    def _first(self) -> int:
        """Return a base seed drawn from the sampler's own generator, so that its seed determines all; 0 without one."""
        generator = next(generators_of(self._study.sampler), None)
        if isinstance(generator, random.Random):
            return generator.getrandbits(31)
        draw = (
            generator.randint if isinstance(generator, np.random.RandomState) else getattr(generator, "integers", None)
        )
        return 0 if draw is None else int(draw(2**31 - 1))

    def seed_next_trial(self, asked: int) -> None:
        """Seed the sampler's generators for the next trial, after ``asked`` trials."""
        # GPSampler starts from its last fit, which a resumed sweep does not have.
        for name in ("_gprs_cache_list", "_constraints_gprs_cache_list"):
            if getattr(sampler := _base_sampler(self._study), name, None) is not None:
                setattr(sampler, name, None)
        generators = list(generators_of(self._study.sampler))
        for generator, seed in zip(
            generators, np.random.SeedSequence([self.base, asked]).generate_state(len(generators)), strict=True
        ):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(int(seed)).state
            else:
                generator.seed(int(seed))


def generators_of(sampler: Any) -> Iterator[Any]:
    """Yield all random generators in a sampler and in nested samplers, in the order of their attributes."""
    visited: set[int] = set()
    waiting = [sampler]
    while waiting:
        part = waiting.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        if isinstance(part, np.random.RandomState | np.random.Generator | random.Random):
            yield part
        elif type(part).__name__ == "LazyRandomState":
            # Optuna's class, which creates its generator on first access.
            waiting.append(part.rng)
        elif isinstance(part, list | tuple):
            waiting.extend(reversed(part))
        elif isinstance(part, dict):
            waiting.extend(reversed(part.values()))
        elif _of_a_sampler(part, sampler):
            waiting.extend(reversed(vars(part).values()))


def _of_a_sampler(part: Any, sampler: Any) -> bool:
    """Return whether to search an object for generators: the sampler, and its parts from the same packages."""
    if not hasattr(part, "__dict__") or isinstance(part, type):
        return False
    packages = {"optuna", type(sampler).__module__.partition(".")[0]}
    return part is sampler or type(part).__module__.partition(".")[0] in packages


# Heartbeats of sweeps in their study, so that the trials of a crashed sweep do not stay RUNNING for ever.

_PREFIX = "hfusion:sweep:"
# Least seconds between heartbeats, and how long a sweep may be silent: seconds or rounds, whichever is longer.
_EVERY, _SILENT, _ROUNDS = 30.0, 600.0, 10


class Heartbeat:
    """Writes heartbeats of the sweep ``run``, which has no directory, as a user attribute of its study."""

    def __init__(self, study: Study, run: str) -> None:
        self._study, self._key = study, _PREFIX + run
        self._last_write = self._last_round = time.time()
        self._write(self._last_write + _SILENT)

    def beat(self) -> None:
        """Write a heartbeat, unless the last one is recent. Called after every round."""
        now = time.time()
        took, self._last_round = now - self._last_round, now
        if now - self._last_write > _EVERY:
            self._last_write = now
            self._write(now + max(_SILENT, _ROUNDS * took))

    def end(self) -> None:
        """Mark the sweep as ended. Later sweeps fail the trials that it left in training."""
        self._write(0.0)

    def _write(self, until: float) -> None:
        beat = {"host": socket.gethostname(), "process": os.getpid(), "until": until}
        self._study.set_user_attr(self._key, beat)


def dead_runs(study: Study) -> set[str]:
    """Return the names of a study's sweeps without a directory that no process trains."""
    beats = {key.removeprefix(_PREFIX): value for key, value in study.user_attrs.items() if key.startswith(_PREFIX)}
    return {run for run, beat in beats.items() if _dead(beat)}


def _dead(beat: Any) -> bool:
    """Return whether a sweep is dead, by its heartbeat."""
    if beat["host"] == socket.gethostname() and os.name == "posix":
        with suppress(PermissionError):
            try:
                os.kill(beat["process"], 0)
            except ProcessLookupError:
                return True
    return bool(time.time() > beat["until"])


# Values of several objectives: metrics that return them, and the trials that no other trial dominates.


def check_objectives(count: int, metric: Callable[..., Any] | None, pruner: Any, pbt: PBT | None) -> None:
    """Raise ValueError if arguments that need one objective, or no metric, are used with several objectives."""
    if count == 1:
        return
    if metric is None:
        raise ValueError(
            f"{count} objectives need a metric that returns {count} values, such as "
            "lambda outputs, target: (accuracy(outputs, target), F.cross_entropy(outputs, target)); metric is None"
        )
    if pruner is not None and type(pruner).__name__ != "NopPruner":
        raise ValueError(
            f"pruner={type(pruner).__name__} decides by one value, and there are {count} objectives: leave pruner out, "
            "or search with one direction"
        )
    if pbt is not None:
        raise ValueError(
            f"pbt ranks trials by one value, and there are {count} objectives: leave pbt out, or search with one "
            "direction"
        )


def check_plateaus(count: int, kinds: Sequence[str]) -> None:
    """Raise ValueError for a scheduler that watches one value after an epoch, if there are several objectives."""
    if count > 1 and "ReduceLROnPlateau" in kinds:
        raise ValueError(
            f"a ReduceLROnPlateau watches one value, and there are {count} objectives: give another scheduler, or "
            'scheduler_interval="step", where it watches the loss'
        )


def metric_values(count: int, values: Any) -> tuple[float, ...]:
    """Return what a metric returned for one member as floats. Raises ValueError if there are not ``count`` of them."""
    if count == 1:
        return (number(values),)
    if isinstance(values, Tensor | np.ndarray):
        values = [values] if not values.ndim else [*values]
    if not isinstance(values, tuple | list):
        values = [values]
    if len(values) != count:
        raise ValueError(
            f"the metric returned {len(values)} value{'s' * (len(values) != 1)} for one member, and the study has "
            f"{count} objectives: return one for each direction, in their order"
        )
    return tuple(map(number, values))


class BestTrials:
    """The best of the trials that a sweep completed, by Optuna's rules for objectives, constraints and equal values.

    Args:
        numbers: the numbers of the sweep's trials, which grow as it asks for more.

    Attributes:
        models: the models of the best trials so far, by their numbers.
    """

    def __init__(self, study: Study, numbers: Sequence[int]) -> None:
        self._study, self._numbers = study, numbers
        self.models: dict[int, nn.Module] = {}

    def takes(self, number: int) -> bool:
        """Return whether a trial, which the study knows to be complete, is among the best."""
        return number in self._best_numbers()

    def add(self, number: int, model: nn.Module) -> None:
        """Add a trial that `takes` accepted, and remove those that are no longer among the best."""
        numbers = self._best_numbers()
        self.models = {key: other for key, other in self.models.items() if key in numbers} | {number: model}

    def _best_numbers(self) -> set[int]:
        """Return the numbers of the best trials of this sweep in the study."""
        numbers = set(self._numbers)
        if len(self._study.directions) == 1:
            with suppress(ValueError):
                # Storages differ in which of several equal trials is the best.
                if (best := self._study.best_trial.number) in numbers:
                    return {best}
        view = study_view(self._study, lambda trials: [trial for trial in trials if trial.number in numbers])
        front = [trial.number for trial in view.best_trials]
        return {*front[: 1 if len(self._study.directions) == 1 else None]}


def any_nan(values: Sequence[float]) -> bool:
    """Return whether any value is NaN. Members with non-finite parameters or losses have NaN values."""
    return any(math.isnan(value) for value in values)
