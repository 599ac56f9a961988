"""The study of a sweep: its trials there, asked, reported, pruned and told; its result; the folder of its saves."""

from __future__ import annotations

import copy
import math
import os
import random
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from torch import Tensor, nn

from hfusion.checkpoint import files
from hfusion.core.claimed_folder import lock_folder
from hfusion.core.errors import CheckpointError
from hfusion.core.text import folded, html_table
from hfusion.tune.population_based_training import PBT

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial, TrialState

# A callback as in study.optimize.
Callback: TypeAlias = "Callable[[Study, FrozenTrial], None]"

# User attributes of trials.
ROUND, COPIES = "hfusion:round", "hfusion:copies"
# The suggested values of a trial, stored next to the parameters it was trained with last.
SUGGESTED = "hfusion:suggested"
# The name of the study in a sweep's folder, and the entries of the folder.
STUDY = "sweep"
STATE, ARRAYS, JOURNAL = "state", "arrays", "study.journal"
# How many states, and saves of an array named by them, are kept.
KEEP = 2


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
    """Context manager: as in study.optimize, samplers and users may call `Study.stop`, and stale trials are failed."""
    local = study._thread_local
    before, local.in_optimize_loop = local.in_optimize_loop, True
    study._stop_flag = False
    with warnings.catch_warnings(action="ignore", category=import_optuna().exceptions.ExperimentalWarning):
        import_optuna().storages.fail_stale_trials(study)
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
        pruner: Any = study.pruner
        while isinstance(pruner, optuna.pruners.PatientPruner):
            pruner = pruner._wrapped_pruner
        alone = (type(None), optuna.pruners.NopPruner, optuna.pruners.ThresholdPruner)
        compares = len(study.directions) == 1 and type(pruner) not in alone
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


def exhausted(study: Study) -> bool:
    """Return whether a grid or brute-force sampler has no values left, counting running trials as finished.

    It would repeat values if asked again. Optuna asks for one trial at a time per job, and rarely has this problem.
    """
    samplers, sampler, trials = import_optuna().samplers, _base_sampler(study), study.get_trials(deepcopy=False)
    if not trials or any(trial.state.name == "WAITING" for trial in trials):
        return False
    if isinstance(sampler, samplers.GridSampler):
        running = {trial.system_attrs.get("grid_id") for trial in trials if not trial.state.is_finished()}
        return running.issuperset(sampler._get_unvisited_grid_ids(study))
    view, stops = copy.copy(study), list[bool]()
    view.stop = lambda: stops.append(True)  # type: ignore[method-assign]
    if isinstance(sampler, samplers.BruteForceSampler):
        sampler = copy.copy(sampler)
        # True would count running trials as unfinished.
        sampler._avoid_premature_stop = False
        sampler.after_trial(view, trials[-1], trials[-1].state, trials[-1].values)
    return bool(stops)


def study_view(study: Study, trials: Sequence[FrozenTrial]) -> Any:
    """Return a view of a study that has only these trials."""

    def get_trials(deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        chosen = [trial for trial in trials if states is None or trial.state in states]
        return copy.deepcopy(chosen) if deepcopy else chosen

    view: Any = copy.copy(study)
    view.get_trials = get_trials
    return view


class Trials:
    """The trials of a sweep in a study.

    Args:
        asked_numbers: the numbers of the trials that had been asked when the sweep was saved.
        base: the saved seed of all draws; None: one that the sampler draws, so that its own seed determines all.
        callbacks: functions that are called with the study and each finished trial.

    Attributes:
        live: the unfinished trials that this process has asked for or resumed, by number.
    """

    def __init__(
        self, study: Study, asked_numbers: Iterable[int], base: int | None, callbacks: Iterable[Callback]
    ) -> None:
        self.optuna = import_optuna()
        self.states = self.optuna.trial.TrialState
        self.study, self.asked_numbers, self._callbacks = study, list(asked_numbers), tuple(callbacks)
        self.base = _first_draw(study.sampler) if base is None else base
        self.live: dict[int, Trial] = {}

    @property
    def over(self) -> bool:
        """True if no more trials start: the study was stopped, or its sampler has exhausted the space."""
        return self.study._stop_flag or exhausted(self.study)

    def ask(self) -> Trial:
        """Return the next trial.

        The sampler's generators are seeded by the number of trials so far: trial k of a sweep draws the same numbers,
        whether or not the sweep was killed and resumed before it.
        """
        # GPSampler starts from its last fit, which a resumed sweep does not have.
        for name in ("_gprs_cache_list", "_constraints_gprs_cache_list"):
            if getattr(sampler := _base_sampler(self.study), name, None) is not None:
                setattr(sampler, name, None)
        generators = list(generators_of(self.study.sampler))
        seeds = np.random.SeedSequence([self.base, len(self.asked_numbers)]).generate_state(len(generators))
        for generator, seed in zip(generators, seeds, strict=True):
            if isinstance(generator, np.random.Generator):
                generator.bit_generator.state = type(generator.bit_generator)(int(seed)).state
            else:
                generator.seed(int(seed))
        trial = self.study.ask()
        self.asked_numbers.append(trial.number)
        self.live[trial.number] = trial
        return trial

    def resume(self, numbers: Iterable[int]) -> dict[int, Trial]:
        """Return the trials that were training or waiting in the save. Raises CheckpointError if one is missing."""
        ids = {trial.number: trial._trial_id for trial in self.study.get_trials(deepcopy=False)}
        if missing := set(self.asked_numbers) - ids.keys():
            raise CheckpointError(
                f"trial {min(missing)} of the sweep that was saved is not in study {self.study.study_name!r}: give the "
                "name of the study that it was, or a new directory"
            )
        self.live = {number: self.optuna.Trial(self.study, ids[number]) for number in numbers}
        return dict(self.live)

    def report(self, number: int, values: Sequence[float], step: int, *, last: bool) -> TrialState:
        """Report the values of a trial after epoch ``step``. Return its state, and tell the study if it ends.

        With several objectives trials are only told, after their last epoch: Optuna then supports neither reports nor
        pruning.
        """
        state: TrialState = self.states.COMPLETE if last else self.states.RUNNING
        single = len(self.study.directions) == 1
        if single:
            self.live[number].report(values[0], step)
        if any(map(math.isnan, values)):
            state = self.states.FAIL
        elif single and self.live[number].should_prune():
            state = self.states.PRUNED
        if state != self.states.RUNNING:
            self.end(number, state, values)
        return state

    def end(self, number: int, state: TrialState, values: Sequence[float] = ()) -> None:
        """Tell the study that a trial is complete, with its ``values``, or that it was pruned or failed."""
        told = list(values) if state == self.states.COMPLETE else None
        trial = self.study.tell(number, told, state=state, skip_if_finished=True)
        self.live.pop(number, None)
        for callback in self._callbacks:
            callback(self.study, as_trained(trial, self.study))

    def best_numbers(self) -> set[int]:
        """Return the best completed trials of this sweep, by Optuna's rules for objectives, constraints and ties."""
        numbers = set(self.asked_numbers)
        if len(self.study.directions) == 1:
            with suppress(ValueError):
                # Storages differ in which of several equal trials is the best.
                if (best := self.study.best_trial.number) in numbers:
                    return {best}
        trials = [trial for trial in self.study.get_trials(deepcopy=False) if trial.number in numbers]
        front = [trial.number for trial in study_view(self.study, trials).best_trials]
        return {*front[: 1 if len(self.study.directions) == 1 else None]}

    def beat(self) -> None:
        """Record a heartbeat of every live trial, if the study's storage has Optuna's heartbeats."""
        storage: Any = self.study._storage
        # Storages without heartbeats, such as journals, have no such method.
        if getattr(storage, "get_heartbeat_interval", lambda: None)() is not None:
            for trial in self.live.values():
                storage.record_heartbeat(trial._trial_id)


def numbered(study: Study, number: int) -> FrozenTrial:
    """Return a trial of a study by its number."""
    return study.get_trials(deepcopy=False)[number]


def as_trained(trial: FrozenTrial, study: Study) -> FrozenTrial:
    """Return a trial with the params of its last epochs, and its suggested values as a user attribute if they differ.

    In the study itself, trials keep their suggested values.
    """
    copies = trial.user_attrs.get(COPIES)
    if not copies:
        return trial
    trained = copy.copy(trial)
    trained.params = dict(copies[-1]["params"])
    trained.distributions = numbered(study, copies[-1]["origin"]).distributions
    trained.user_attrs = {**trial.user_attrs, SUGGESTED: trial.params}
    return trained


def _first_draw(sampler: Any) -> int:
    """Return a number that the sampler's own generator draws; 0 without one."""
    generator = next(generators_of(sampler), None)
    if isinstance(generator, random.Random):
        return generator.getrandbits(31)
    draw = getattr(generator, "randint", None) or getattr(generator, "integers", None)
    return 0 if draw is None else int(draw(2**31 - 1))


def generators_of(sampler: Any) -> Iterator[Any]:
    """Yield all random generators in a sampler and in nested samplers, in the order of their attributes."""
    packages = {"optuna", type(sampler).__module__.partition(".")[0]}
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
        elif (
            hasattr(part, "__dict__")
            and not isinstance(part, type)
            and (part is sampler or type(part).__module__.partition(".")[0] in packages)
        ):
            waiting.extend(reversed(vars(part).values()))


def check(name: str, value: object, is_valid: bool, remedy: str) -> None:
    """Raise ValueError for an argument that is not valid."""
    if not is_valid:
        raise ValueError(f"{name}={value!r}: {remedy}")


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is a whole number of at least ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_positive(value: object) -> bool:
    """Return whether a value is a number above 0."""
    return isinstance(value, Real) and not isinstance(value, bool) and float(value) > 0


def check_objectives(count: int, metric: Callable[..., Any] | None, pruner: Any, pbt: PBT | None) -> None:
    """Raise ValueError if arguments that need one objective, or no metric, are used with several objectives."""
    if count == 1:
        return
    values = "such as lambda outputs, target: (accuracy(outputs, target), F.cross_entropy(outputs, target))"
    check("metric", metric, metric is not None, f"{count} objectives need one of {count} values, {values}")
    remedy = f"it compares trials by one value of {count}: leave it out, or search with one direction"
    check("pruner", pruner, pruner is None or type(pruner).__name__ == "NopPruner", remedy)
    check("pbt", pbt, pbt is None, remedy)


# The result of a sweep.

# The most trials and the width of a printed result.
_BEST, _WIDTH = 10, 100


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The study of a sweep, and the models of its best completed trials. ``print`` shows the best trials.

    With several objectives, ``best_trials`` and ``best_models`` hold the Pareto front; ``best_trial``, ``best_params``,
    ``best_value`` and ``best_model`` raise RuntimeError, as in Optuna.

    With population based training, ``params`` of a trial are those it was trained with last. What it suggested first is
    in its user attribute ``hfusion:suggested`` and in the ``study``.

    ``numbers``: the numbers of the trials that this sweep started. ``processes``: how many processes trained its
    arrays, 1 or one for each device of the machine or cluster.

    Example:
        >>> import torch, hfusion as hf
        >>> result = hf.sweep(
        ...     lambda: torch.nn.Linear(2, 1),
        ...     lambda trial: {"lr": trial.suggest_float("lr", 1e-3, 1e-1, log=True)},
        ...     torch.nn.functional.mse_loss,
        ...     [(torch.zeros(4, 2), torch.ones(4, 1))],
        ...     trials=2,
        ...     epochs=1,
        ...     processes=0,
        ... )
        >>> len(result.study.trials), type(result.best_model).__name__
        (2, 'Linear')
    """

    study: Study
    numbers: tuple[int, ...]
    _best: dict[int, nn.Module]
    processes: int = 1

    @property
    def trials(self) -> list[FrozenTrial]:
        """The trials of the sweep, in the order in which they started."""
        trials = self.study.get_trials(deepcopy=False)
        return [as_trained(trials[number], self.study) for number in self.numbers]

    @property
    def best_trial(self) -> FrozenTrial:
        """The best trial of the study. Raises ValueError if no trial is complete, as Optuna does."""
        return as_trained(self.study.best_trial, self.study)

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The trials of the study that no other trial dominates: the Pareto front."""
        return [as_trained(trial, self.study) for trial in self.study.best_trials]

    @property
    def best_params(self) -> dict[str, Any]:
        """The parameters with which the best trial of the study was trained last."""
        return self.best_trial.params

    @property
    def best_value(self) -> float:
        """Value of the best trial of the study."""
        return self.study.best_value

    @property
    def best_model(self) -> nn.Module:
        """The model of the best trial that this sweep completed, on the CPU. Raises ValueError if there is none."""
        if len(self.study.directions) > 1:
            raise RuntimeError(
                f"a sweep of {len(self.study.directions)} objectives has no single best model: use best_models, by the "
                "numbers of best_trials"
            )
        if not self._best:
            raise ValueError(
                "no trial of this sweep is complete within its constraints, so it has no best model: see print(result)"
            )
        return next(iter(self._best.values()))

    @property
    def best_models(self) -> dict[int, nn.Module]:
        """The models of the best trials that this sweep completed, on the CPU, by trial number.

        With one objective there is one; with several, those that no other trial of this sweep dominates.
        """
        return dict(sorted(self._best.items()))

    def trials_dataframe(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trials of this sweep as a pandas frame, as optuna.Study.trials_dataframe does.

        The columns of parameters have the values with which trials were trained last. Raises ImportError without
        pandas.
        """
        return study_view(self.study, self.trials).trials_dataframe(*args, **kwargs)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        """Return ``plot_*`` of optuna.visualization, for the trials of the sweep. Calls need plotly."""
        if not name.startswith("plot_"):
            raise AttributeError(f"SweepResult has no attribute {name!r}")
        plots = import_module("optuna.visualization")
        if not hasattr(plots, name):
            raise AttributeError(f"optuna.visualization has no {name!r}")
        return partial(getattr(plots, name), study_view(self.study, self.trials))

    def _headline(self, trials: list[FrozenTrial]) -> str:
        states = [trial.state.name.lower() for trial in trials]
        counts = [f"{states.count(state)} {state}" for state in dict.fromkeys(sorted(states))]
        return f"sweep {self.study.study_name!r}  {len(trials)} trials" + (f": {', '.join(counts)}" if counts else "")

    def _rows(self, trials: list[FrozenTrial]) -> list[list[str]]:
        """Return the table cells of the best trials, one row per trial."""
        rows = []
        for trial in self._ranked(trials)[:_BEST]:
            values = [f"{value:.6g}" for value in trial.values]
            epochs = [str(len(trial.intermediate_values))] if len(values) == 1 else []
            rows.append([str(trial.number), *values, *epochs, _params(trial)])
        return rows

    def __str__(self) -> str:
        trials = self.trials
        rows = self._rows(trials)
        shown = [self._columns, *rows] if rows else []
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
        lines = ["  ".join([*map(str.rjust, row[:-1], widths), row[-1]]) for row in shown]
        cut = [line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..." for line in lines]
        return "\n".join([self._headline(trials), *cut])

    def __repr__(self) -> str:
        return f"<{self._headline(self.trials)}>"

    def _repr_html_(self) -> str:
        trials = self.trials
        rows = self._rows(trials)
        return folded(self._headline(trials), html_table(self._columns, rows, len(rows)), is_open=True)

    @property
    def _columns(self) -> list[str]:
        count = len(self.study.directions)
        if count == 1:
            return ["trial", "value", "epochs", "params"]
        # The same column names as in trials_dataframe.
        names = self.study.metric_names or range(count)
        return ["trial", *(f"values_{name}" for name in names), "params"]

    def _ranked(self, trials: list[FrozenTrial]) -> list[FrozenTrial]:
        """Return the complete trials, best first; with several objectives, those on the Pareto front."""
        numbers = self.best_models.keys()
        complete = [trial for trial in trials if trial.state.name == "COMPLETE"]
        if len(self.study.directions) > 1:
            return [trial for trial in complete if trial.number in numbers]
        sign = -1.0 if self.study.direction.name == "MAXIMIZE" else 1.0
        return sorted(complete, key=lambda trial: (trial.number not in numbers, sign * (trial.value or 0.0)))


def _params(trial: FrozenTrial) -> str:
    """Format a trial's last parameters, with the suggested values where they differ."""
    suggested = trial.user_attrs.get(SUGGESTED, trial.params)
    return ", ".join(
        f"{key}={_short(value)}" + (f" (first {_short(suggested[key])})" if suggested.get(key, value) != value else "")
        for key, value in trial.params.items()
    )


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


# The folder of a sweep, from which it can be resumed after it was killed. Each array has a folder of its saves. The
# state of the sweep is written last, and names one save of each array. Like every save it is written atomically.


class SweepFolder:
    """Locks the folder for this process until `close`. Raises CheckpointError if another process has locked it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        with files.wrap_load_errors(root):
            root.mkdir(parents=True, exist_ok=True)
            self.close = lock_folder(root, "sweep")

    @property
    def journal_size(self) -> int:
        """The bytes of the journal of the study; 0 if there is none."""
        path = self.root / JOURNAL
        return path.stat().st_size if path.exists() else 0

    def rewind(self, size: int) -> None:
        """Cut the journal of the study to its size at the last save. What a killed sweep wrote later is done again."""
        if self.journal_size > size:
            os.truncate(self.root / JOURNAL, size)

    def read(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Return the last saved state. Raises CheckpointError if it is damaged."""
        if not files.saves(self.root / STATE):
            return None
        saved = files.read(self.root / STATE)
        if self.journal_size < saved.body["journal"]:
            raise CheckpointError(f"{self.root / JOURNAL} is shorter than when the sweep was saved: it is damaged")
        return saved.body, saved.tensors

    def write(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor], step: int) -> None:
        """Write the state of the sweep, then remove the folders of arrays that it does not name."""
        files.write(self.root / STATE, body, tensors, step=step, keep=KEEP)
        named = {array["name"] for array in body["arrays"]}
        for path in (self.root / ARRAYS).glob("*"):
            if path.name not in named:
                shutil.rmtree(path, ignore_errors=True)
