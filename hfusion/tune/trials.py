"""The trials of a sweep in its study: each is asked, reported, pruned and told once, even if the sweep is killed.

The study may be ahead of the saved arrays; a resumed sweep then computes the same values again. Reports in the study
are kept, finished trials keep their state, and trials that were only asked are taken over. Reports and decisions have a
fixed order, so every report before the last one has been decided. For the last report, the pruner may or may not have
been asked. It is asked again, on the state that it saw then.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from hfusion.core.errors import CheckpointError
from hfusion.tune.objectives import any_nan
from hfusion.tune.study import Draws, exhausted, import_optuna

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

# A callback as in study.optimize.
Callback: TypeAlias = "Callable[[Study, FrozenTrial], None]"

RUN, ROUND, COPIES = "hfusion:run", "hfusion:round", "hfusion:copies"
# The suggested values of a trial, stored next to the parameters it was trained with last.
SUGGESTED = "hfusion:suggested"
# What samplers kept in the attributes of the study when a trial was asked: counts, and the number of lists.
ASKED_AT = "hfusion:asked at"


class Decision(StrEnum):
    """The state of a trial after a report."""

    CONTINUE = "go on"
    PRUNED = "pruned"
    FAILED = "failed"
    COMPLETE = "complete"


class Trials:
    """The trials of a sweep in a study.

    Args:
        run: the sweep's name in the study.
        asked_numbers: the numbers of the trials that had been asked when the sweep was saved.
        attributes: for each trial in training then, the names of its system attributes, where pruners keep notes.
        alone: no other process asks for trials of this study.
        callbacks: functions that are called with the study and each finished trial.
    """

    def __init__(
        self,
        study: Study,
        run: str,
        draws: Draws,
        *,
        asked_numbers: Iterable[int] = (),
        attributes: Mapping[int, Iterable[str]] | None = None,
        alone: bool = False,
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._callbacks = tuple(callbacks)
        self.optuna = import_optuna()
        self.study, self.run, self.asked_numbers = study, run, list(asked_numbers)
        self._draws = draws
        self._live: dict[int, Trial] = {}
        self._attributes = {number: set(names) for number, names in (attributes or {}).items()}
        self._ahead: dict[int, FrozenTrial] = {}
        self._adopted: deque[FrozenTrial] = deque()
        self._reports = 0
        self._look_ahead(alone)

    def _look_ahead(self, alone: bool) -> None:
        """Find trials and reports that are in the study, but not in the saved sweep."""
        states = self.optuna.trial.TrialState
        saved_numbers = set(self.asked_numbers)
        trials = self.study.get_trials(deepcopy=True)
        present = {trial.number for trial in trials if trial.user_attrs.get(RUN) == self.run}
        if missing := saved_numbers - present:
            raise CheckpointError(
                f"trial {min(missing)} of the sweep that was saved is not in study {self.study.study_name!r}: give the "
                "study that it was, from a storage that outlives a process, or a new directory"
            )
        adopted = [
            trial for trial in trials if trial.number not in saved_numbers and _is_ours(trial, self.run, alone, states)
        ]
        self._adopted = deque(sorted(adopted, key=lambda trial: (trial.datetime_start, trial.number)))
        self._ahead = {trial.number: trial for trial in trials if trial.number in self._attributes}

    def fail_stale_trials(self, dead: set[str]) -> None:
        """Mark running trials of the sweeps named in ``dead`` as failed."""
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if trial.user_attrs.get(RUN) in dead - {self.run}:
                self.study.tell(trial.number, state=states.FAIL, skip_if_finished=True)

    @property
    def base(self) -> int:
        """The base seed from which the sampler is seeded before each trial."""
        return self._draws.base

    @property
    def signs(self) -> tuple[int, ...]:
        """For each objective, 1 if it is maximized and -1 if it is minimized."""
        return tuple(1 if direction.name == "MAXIMIZE" else -1 for direction in self.study.directions)

    @property
    def live(self) -> list[int]:
        """The numbers of the unfinished trials that this process has asked for or resumed."""
        return list(self._live)

    @property
    def stopped(self) -> bool:
        """True if study.stop() was called."""
        return self.study._stop_flag

    @property
    def over(self) -> bool:
        """True if no more trials start: the study was stopped, or its sampler has exhausted the space."""
        return not self._adopted and (self.stopped or exhausted(self.study))

    def ask(self) -> Trial | None:
        """Return the next trial; None if it is one that had finished before the sweep was killed."""
        self._draws.seed_next_trial(len(self.asked_numbers))
        if not self._adopted:
            trial = self._mark(self.study.ask())
        else:
            frozen = self._adopted.popleft()
            if frozen.state.is_finished():
                self.asked_numbers.append(frozen.number)
                return None
            trial = self._take_over(frozen)
        self.asked_numbers.append(trial.number)
        self._live[trial.number] = trial
        return trial

    def _mark(self, trial: Trial) -> Trial:
        """Mark a trial without values as one of this sweep, with what samplers keep in the study at this time."""
        counts, lists = self._kept_by_samplers()
        if counts or lists:
            trial.set_user_attr(ASKED_AT, [counts, len(lists)])
        trial.set_user_attr(RUN, self.run)
        return trial

    def _kept_by_samplers(self) -> tuple[dict[str, int], list[str]]:
        """Return the numbers among the study's attributes, and the names of the lists."""
        attributes = self.study._storage.get_study_system_attrs(self.study._study_id)
        counts = {name: value for name, value in attributes.items() if isinstance(value, int)}
        return counts, [name for name, value in attributes.items() if isinstance(value, list)]

    def _take_over(self, frozen: FrozenTrial) -> Trial:
        """Return a trial that was asked before the sweep was killed.

        Only the last one may lack values. It is sampled again as it was then, and keeps the values that it has.
        """
        if self._adopted:
            return self.optuna.Trial(self.study, frozen._trial_id)  # type: ignore[no-any-return]
        view, storage = copy.copy(self.study), self.study._storage
        earlier: Any = _EarlierStorage(storage, frozen._trial_id, {"fixed_params"}, set())
        view._storage, view.stop = earlier, self.study.stop  # type: ignore[method-assign]
        if RUN in frozen.user_attrs and self.study.get_trials(deepcopy=False)[-1].number == frozen.number:
            known, kept = frozen.user_attrs.get(ASKED_AT, [{}, 0])
            counts, lists = self._kept_by_samplers()
            # QMCSampler counts its points from 0. Genetic samplers store the parents of a generation, which draws.
            for name in (*counts, *lists[kept:]):
                before = known.get(name, -1) if name in counts else None
                storage.set_study_system_attr(self.study._study_id, name, before)
        trial = self.optuna.Trial(view, frozen._trial_id)
        if RUN not in frozen.user_attrs:
            self._mark(trial)
        for name, distribution in frozen.distributions.items():
            trial._suggest(name, distribution)
            trial._cached_frozen_trial.params[name] = frozen.params[name]
        return trial  # type: ignore[no-any-return]

    def resume(self, epochs: Mapping[int, int]) -> dict[int, Trial]:
        """Return the trials that were training or waiting in the save. ``epochs``: how many each had trained then."""
        ids = {trial.number: trial._trial_id for trial in self.study.get_trials(deepcopy=False)}
        self._live = {number: self.optuna.Trial(self.study, ids[number]) for number in epochs}
        self._reports = sum(
            sum(step >= epochs[number] for step in trial.intermediate_values) for number, trial in self._ahead.items()
        )
        return dict(self._live)

    def caught_up(self) -> None:
        """Note that the round in which the sweep was killed is complete, so that all later reports are new."""
        self._ahead.clear()
        self._attributes.clear()
        self._reports = 0

    def record_start_round(self, number: int, at: int) -> None:
        """Record the round of the sweep in which a trial began."""
        trial = self._live[number]
        if trial.study is not self.study:
            # It was taken over, and saw the study as it was when it was asked.
            trial = self._live[number] = self.optuna.Trial(self.study, trial._trial_id)
        if trial.user_attrs.get(ROUND) != at:
            trial.set_user_attr(ROUND, at)

    def report(self, number: int, values: Sequence[float], step: int, *, last: bool) -> Decision:
        """Report the values of a trial after epoch ``step``. Return its state, and tell the study if it ends.

        With several objectives trials are only told, after their last epoch: Optuna then supports neither reports nor
        pruning.
        """
        if len(self.signs) > 1:
            decision = self._decided(values, last, lambda: False)
        else:
            decision = self._reported(number, values[0], step, last)
        self._tell(number, decision, values)
        return decision

    def _reported(self, number: int, value: float, step: int, last: bool) -> Decision:
        """Report a value and decide, or return the decision if the study already has the report."""
        frozen = self._ahead.get(number)
        if frozen is None or step not in frozen.intermediate_values:
            self._live[number].report(value, step)
            return self._decided((value,), last, self._live[number].should_prune)
        self._reports -= 1
        if frozen.state.is_finished():
            return _DECISIONS[frozen.state.name]
        settled = self._reports > 0
        return self._decided((value,), last, lambda: not settled and self._asked_again(number))

    def _decided(self, values: Sequence[float], last: bool, prune: Callable[[], bool]) -> Decision:
        if any_nan(values):
            return Decision.FAILED
        if prune():
            return Decision.PRUNED
        return Decision.COMPLETE if last else Decision.CONTINUE

    def _asked_again(self, number: int) -> bool:
        """Return the pruner's decision, replayed from its state before it may have been asked."""
        view = copy.copy(self.study)
        trial_id = self._live[number]._trial_id
        storage: Any = _EarlierStorage(self.study._storage, trial_id, set(self._attributes[number]))
        view._storage = storage
        return bool(self.study.pruner.prune(view, storage.get_trial(trial_id)))

    def _tell(self, number: int, decision: Decision, values: Sequence[float]) -> None:
        if decision is Decision.CONTINUE:
            return
        if decision is Decision.COMPLETE:
            self._note_finished(number, self.study.tell(number, list(values), skip_if_finished=True))
        else:
            self.end(number, decision)

    def _note_finished(self, number: int, trial: FrozenTrial) -> None:
        self._live.pop(number, None)
        frozen = self._ahead.get(number)
        if frozen is None or not frozen.state.is_finished():
            for callback in self._callbacks:
                callback(self.study, as_trained(trial, self.study))

    def suggested(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the suggested values of a trial, and their distributions."""
        trial = _numbered(self.study, number)
        return trial.params, trial.distributions

    def copied(self, number: int, source: int, epoch: int, params: Mapping[str, Any], origin: int) -> None:
        """Record that trial ``number`` is a copy of ``source`` after ``epoch`` epochs, and continues with ``params``.

        ``origin``: the trial whose distributions the parameters belong to.
        """
        trial = self._live[number]
        earlier = [record for record in trial.user_attrs.get(COPIES, []) if record["epoch"] < epoch]
        event = {"epoch": epoch, "source": source, "params": dict(params), "origin": origin}
        trial.set_user_attr(COPIES, [*earlier, event])

    def end(self, number: int, decision: Decision) -> None:
        """Tell the study that a trial was pruned or failed."""
        states = self.optuna.trial.TrialState
        state = states.PRUNED if decision is Decision.PRUNED else states.FAIL
        self._note_finished(number, self.study.tell(number, state=state, skip_if_finished=True))

    def attributes(self) -> dict[int, list[str]]:
        """Return the names of the system attributes of each unfinished trial."""
        trials = self.study.get_trials(deepcopy=False, states=(self.optuna.trial.TrialState.RUNNING,))
        return {trial.number: sorted(trial.system_attrs) for trial in trials if trial.number in self._live}


def as_trained(trial: FrozenTrial, study: Study) -> FrozenTrial:
    """Return a trial with the params of its last epochs, and its suggested values as a user attribute if they differ.

    In the study itself, trials keep their suggested values.
    """
    copies = trial.user_attrs.get(COPIES)
    if not copies:
        return trial
    origin = copies[-1].get("origin", trial.number)
    trained = copy.copy(trial)
    trained.params = dict(copies[-1]["params"])
    if origin != trial.number:
        trained.distributions = _numbered(study, origin).distributions
    trained.user_attrs = {**trial.user_attrs, SUGGESTED: trial.params}
    return trained


def _numbered(study: Study, number: int) -> FrozenTrial:
    return next(trial for trial in study.get_trials(deepcopy=False) if trial.number == number)


_DECISIONS = {"COMPLETE": Decision.COMPLETE, "PRUNED": Decision.PRUNED, "FAIL": Decision.FAILED}


def _is_ours(trial: FrozenTrial, run: str, alone: bool, states: Any) -> bool:
    if RUN in trial.user_attrs:
        return bool(trial.user_attrs[RUN] == run)
    # Killed before the run's name was set on the trial.
    return alone and trial.state == states.RUNNING


class _EarlierStorage:
    """A view of a storage in which one trial has only some of its values, and those that are set from now on.

    Args:
        names: the system attributes that it has.
        params: the parameters that it has; None: all. Others are not written again.
    """

    def __init__(self, storage: Any, trial_id: int, names: set[str], params: set[str] | None = None) -> None:
        self._original_storage, self._trial_id, self._names, self._params = storage, trial_id, names, params
        self._written = {*storage.get_trial(trial_id).params}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original_storage, name)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._original_storage.set_trial_system_attr(trial_id, key, value)
        self._names.add(key)

    def set_trial_param(self, trial_id: int, name: str, value: float, distribution: Any) -> None:
        if name not in self._written:
            self._original_storage.set_trial_param(trial_id, name, value, distribution)
        if self._params is not None:
            self._params.add(name)

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self._cut(self._original_storage.get_trial(trial_id))

    def get_all_trials(self, study_id: int, deepcopy: bool = True, states: Any = None) -> list[FrozenTrial]:
        return [self._cut(trial) for trial in self._original_storage.get_all_trials(study_id, deepcopy, states)]

    def get_trial_system_attrs(self, trial_id: int) -> dict[str, Any]:
        return self.get_trial(trial_id).system_attrs

    def _cut(self, trial: FrozenTrial) -> FrozenTrial:
        if trial._trial_id != self._trial_id:
            return trial
        cut = copy.copy(trial)
        cut.system_attrs = {name: value for name, value in trial.system_attrs.items() if name in self._names}
        if self._params is not None:
            cut.params = {name: value for name, value in trial.params.items() if name in self._params}
            cut.distributions = {name: value for name, value in trial.distributions.items() if name in self._params}
        return cut
