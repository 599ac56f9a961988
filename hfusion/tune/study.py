"""The study of a sweep: opening it, seeding its sampler and pruner, and detecting an exhausted space."""

from __future__ import annotations

import copy
import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from optuna import Study
    from optuna.trial import FrozenTrial

# Names of the journal in a sweep's folder, and of the study in it.
JOURNAL, STUDY = "study.journal", "sweep"


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
) -> tuple[Study, bool]:
    """Return the given study, or one by name or directory; and whether only this sweep uses it, in the directory.

    Raises ValueError for settings that a given study already has, and for directions that differ from the study's.
    """
    optuna = import_optuna()
    settings = {"direction": direction, "directions": directions, "sampler": sampler, "pruner": pruner}
    if isinstance(study, optuna.Study):
        for key, value in {"storage": storage, **settings}.items():
            if value is not None:
                raise ValueError(f"{key}={value!r}: the study given has its own; give it to optuna.create_study")
        opened_study, is_private = study, False
    elif study is None or isinstance(study, str):
        is_private = False
        if storage is None and directory is not None:
            is_private = True
            backend = optuna.storages.journal.JournalFileBackend(str(directory / JOURNAL))
            storage = optuna.storages.JournalStorage(backend)
        name = study if study is not None else STUDY if is_private else None
        opened_study = optuna.create_study(
            study_name=name,
            storage=storage,
            directions=directions or [direction or "minimize"],
            sampler=sampler,
            pruner=pruner,
            load_if_exists=name is not None,
        )
    else:
        raise ValueError(f"study must be an optuna.Study, or the name of one, got {type(study).__name__}")
    name, requested = ("direction", [direction]) if directions is None else ("directions", list(directions))
    names = [goal.name.lower() for goal in opened_study.directions]
    if requested != [None] and [str(getattr(goal, "name", goal)).lower() for goal in requested] != names:
        argument = direction if directions is None else directions
        raise ValueError(f"{name}={argument!r}: study {opened_study.study_name!r} was made to {', '.join(names)}")
    return opened_study, is_private


def check_outlives(study: Any, storage: Any, directory: Path) -> None:
    """Raise ValueError if a study is in memory, since a sweep resumed in a new process would not find its trials."""
    optuna = import_optuna()
    is_study = isinstance(study, optuna.Study)
    if _in_memory(study._storage if is_study else storage):
        name = f"study {study.study_name!r}" if is_study else f"storage={storage!r}"
        raise ValueError(
            f"{name} is in the memory of this process, and directory={os.fspath(directory)!r} is to go on from after "
            "it has ended: leave study and storage out, and the trials are in a journal in the directory; or give a "
            "storage that outlives the process, such as storage='sqlite:///sweep.db', and the name of a study"
        )


def _in_memory(storage: Any) -> bool:
    """Return whether a storage is in memory, Optuna's own or SQLite's."""
    if isinstance(storage, import_optuna().storages.InMemoryStorage):
        return True
    # Optuna wraps storages that are given as a URL.
    backend = getattr(storage, "_backend", storage)
    url = backend if isinstance(backend, str) else getattr(backend, "url", None)
    if not isinstance(url, str) or not url.startswith("sqlite"):
        return False
    path, _, query = url.partition("://")[2].partition("?")
    return path in ("", "/") or ":memory:" in path or "mode=memory" in query


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
        for generator in generators_of(self._study.sampler):
            if isinstance(generator, np.random.RandomState):
                return int(generator.randint(2**31 - 1))
            return (
                generator.getrandbits(31)
                if isinstance(generator, random.Random)
                else int(generator.integers(2**31 - 1))
            )
        return 0

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
