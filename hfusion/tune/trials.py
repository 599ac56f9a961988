"""The trials of a sweep in its study: asked, reported, pruned and told."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypeAlias

from hfusion.core.errors import CheckpointError
from hfusion.tune.study import Draws, any_nan, exhausted, import_optuna

if TYPE_CHECKING:
    from optuna import Study, Trial
    from optuna.trial import FrozenTrial

# A callback as in study.optimize.
Callback: TypeAlias = "Callable[[Study, FrozenTrial], None]"

RUN, ROUND, COPIES = "hfusion:run", "hfusion:round", "hfusion:copies"
# The suggested values of a trial, stored next to the parameters it was trained with last.
SUGGESTED = "hfusion:suggested"


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
        draws: seeds the sampler before each trial.
        asked_numbers: the numbers of the trials that had been asked when the sweep was saved.
        callbacks: functions that are called with the study and each finished trial.
    """

    def __init__(
        self,
        study: Study,
        run: str,
        draws: Draws,
        asked_numbers: Iterable[int] = (),
        callbacks: Iterable[Callback] = (),
    ) -> None:
        self._callbacks = tuple(callbacks)
        self.optuna = import_optuna()
        self.study, self.run, self.asked_numbers = study, run, list(asked_numbers)
        self.draws = draws
        self._live: dict[int, Trial] = {}

    def fail_stale_trials(self, dead: set[str]) -> None:
        """Mark running trials of the sweeps named in ``dead`` as failed."""
        states = self.optuna.trial.TrialState
        for trial in self.study.get_trials(deepcopy=False, states=(states.RUNNING,)):
            if trial.user_attrs.get(RUN) in dead - {self.run}:
                self.study.tell(trial.number, state=states.FAIL, skip_if_finished=True)

    @property
    def signs(self) -> tuple[int, ...]:
        """For each objective, 1 if it is maximized and -1 if it is minimized."""
        return tuple(1 if direction.name == "MAXIMIZE" else -1 for direction in self.study.directions)

    @property
    def live(self) -> list[int]:
        """The numbers of the unfinished trials that this process has asked for or resumed."""
        return list(self._live)

    @property
    def over(self) -> bool:
        """True if no more trials start: the study was stopped, or its sampler has exhausted the space."""
        return self.study._stop_flag or exhausted(self.study)

    def ask(self) -> Trial:
        """Return the next trial."""
        self.draws.seed_next_trial(len(self.asked_numbers))
        trial = self.study.ask()
        trial.set_user_attr(RUN, self.run)
        self.asked_numbers.append(trial.number)
        self._live[trial.number] = trial
        return trial

    def resume(self, numbers: Iterable[int]) -> dict[int, Trial]:
        """Return the trials that were training or waiting in the save. Raises CheckpointError if one is missing."""
        ids = {trial.number: trial._trial_id for trial in self.study.get_trials(deepcopy=False)}
        if missing := set(self.asked_numbers) - ids.keys():
            raise CheckpointError(
                f"trial {min(missing)} of the sweep that was saved is not in study {self.study.study_name!r}: give the "
                "name of the study that it was, or a new directory"
            )
        self._live = {number: self.optuna.Trial(self.study, ids[number]) for number in numbers}
        return dict(self._live)

    def record_start_round(self, number: int, at: int) -> None:
        """Record the round of the sweep in which a trial began."""
        self._live[number].set_user_attr(ROUND, at)

    def report(self, number: int, values: Sequence[float], step: int, *, last: bool) -> Decision:
        """Report the values of a trial after epoch ``step``. Return its state, and tell the study if it ends.

        With several objectives trials are only told, after their last epoch: Optuna then supports neither reports nor
        pruning.
        """
        decision = Decision.COMPLETE if last else Decision.CONTINUE
        single = len(self.signs) == 1
        if single:
            self._live[number].report(values[0], step)
        if any_nan(values):
            decision = Decision.FAILED
        elif single and self._live[number].should_prune():
            decision = Decision.PRUNED
        if decision is not Decision.CONTINUE:
            self.end(number, decision, values)
        return decision

    def suggested(self, number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the suggested values of a trial, and their distributions."""
        trial = _numbered(self.study, number)
        return trial.params, trial.distributions

    def copied(self, number: int, source: int, epoch: int, params: Mapping[str, Any], origin: int) -> None:
        """Record that trial ``number`` is a copy of ``source`` after ``epoch`` epochs, and continues with ``params``.

        ``origin``: the trial whose distributions the parameters belong to.
        """
        trial = self._live[number]
        earlier = trial.user_attrs.get(COPIES, [])
        event = {"epoch": epoch, "source": source, "params": dict(params), "origin": origin}
        trial.set_user_attr(COPIES, [*earlier, event])

    def end(self, number: int, decision: Decision, values: Sequence[float] = ()) -> None:
        """Tell the study that a trial is complete, with its ``values``, or that it was pruned or failed."""
        states = self.optuna.trial.TrialState
        if decision is Decision.COMPLETE:
            trial = self.study.tell(number, list(values), skip_if_finished=True)
        else:
            state = states.PRUNED if decision is Decision.PRUNED else states.FAIL
            trial = self.study.tell(number, state=state, skip_if_finished=True)
        self._live.pop(number, None)
        for callback in self._callbacks:
            callback(self.study, as_trained(trial, self.study))


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
