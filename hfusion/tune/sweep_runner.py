"""The rounds of a sweep: every array trains an epoch, values are reported, and new trials get the free rows."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor, nn

from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import EventLog, first_line
from hfusion.tune.heartbeat import Heartbeat
from hfusion.tune.objectives import BestTrials
from hfusion.tune.population_based_training import PBT
from hfusion.tune.shape_array import Shape, ShapeArray, Shapes, TrialSlot
from hfusion.tune.space import Maker, Suggestion, TrialModel, check_choices
from hfusion.tune.sweep_folder import SweepFolder
from hfusion.tune.sweep_workers import RowsCall, SweepWorkers
from hfusion.tune.training_setup import EpochResult, SweepRecipe
from hfusion.tune.trial_placement import TrialPlacement
from hfusion.tune.trials import COPIES, Decision, Trials

if TYPE_CHECKING:
    from optuna import Study

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extent:
    """The size and limits of a sweep.

    Attributes:
        rows: the number of concurrent trials that the user gave; None: at most ``concurrent()``, and only as many as
            lower the time per trial.
        concurrent: returns the maximum number of concurrent trials.
        catch: exceptions that fail their trial only.
        deadline: the time, by time.monotonic, after which no more trials start.
        processes: the number of processes of one machine that train.
    """

    trials: int
    epochs: int
    rows: int | None
    seed: int
    catch: tuple[type[BaseException], ...]
    pbt: PBT | None
    deadline: float
    concurrent: Callable[[], int]
    processes: int = 1


class SweepRunner:
    """Trains the trials of a sweep on devices, and writes what a resumed sweep needs into a folder.

    Trials are reported in the order of their numbers, whatever their array, so that decisions do not depend on the
    number of devices.
    """

    rounds = "together"
    # Whether recorded reports of the killed sweep remain to be repeated.
    _replays = False

    def __init__(
        self,
        trials: Trials,
        maker: Maker,
        recipe: SweepRecipe,
        extent: Extent,
        workers: SweepWorkers,
        folder: SweepFolder | None,
        heartbeat: Heartbeat,
        progress: SweepProgress,
        log: EventLog,
    ) -> None:
        self.trials, self._maker, self._recipe, self._extent = trials, maker, recipe, extent
        self._workers, self._folder, self._heartbeat, self._progress = workers, folder, heartbeat, progress
        self._events = SweepLog(log, workers)
        self.placement = TrialPlacement(
            workers, extent.trials, extent.concurrent, fixed=extent.rows is not None, together=extent.pbt is not None
        )
        self._waiting: tuple[TrialModel, Shape] | None = None
        # The round of the array that reported last, and how many times arrays have reported.
        self._round = self._reported = 0
        self.best = BestTrials(trials.study, trials.asked_numbers)
        waves = max(1.0, extent.trials / extent.concurrent())
        self._shapes = Shapes(recipe, waves, saved=folder is not None, may_be_plain=extent.pbt is None)

    def run(self) -> None:
        """Train until every trial has finished."""
        resumed = bool(self.placement.arrays)
        if not resumed:
            self._refill()
        while self.placement.arrays:
            if not resumed:
                self.save()
            resumed = False
            began = time.monotonic()
            self._train()
            self._end_round(sum(bool(array.slots) for array in self.placement.arrays), time.monotonic() - began)
        self.save()

    def _end_round(self, training: int, seconds: float) -> None:
        """Log a round of ``training`` arrays, and give free rows to new trials."""
        live = len(self.trials.live)
        self._progress.round(self._round, len(self.trials.asked_numbers) - live, live, training, seconds)
        self._round += 1
        self._heartbeat.beat()
        if not self._replays:
            self.trials.caught_up()
        self._promote()
        self._refill()

    def _train(self) -> None:
        """Train all arrays for an epoch, and report the values of their trials."""
        arrays = self.placement.arrays
        self._report(self._workers.ask({array.name: self._epoch(array) for array in arrays}), arrays)

    def _epoch(self, array: ShapeArray) -> RowsCall:
        """The call that trains an array in its next round."""
        assert array.round is not None
        # With several objectives, only the values after the last epoch are reported.
        evaluates = self._recipe.objectives == 1 or array.any_ends
        return "epoch", (self._extent.seed + array.round, evaluates)

    def _report(self, results: Mapping[str, EpochResult], arrays: Sequence[ShapeArray]) -> None:
        """Report the values of an epoch to the study, in the order of trial numbers, and remove trials that end."""
        for array in arrays:
            array.save = ""
            self.placement.note(array, results[array.name])
            self._events.round(array, self._round, results[array.name])
        values = {array.name: results[array.name].values for array in arrays}
        slots = [(array, array.slots[tag], scores) for array in arrays for tag, scores in values[array.name].items()]
        freed_devices: set[int] = set()
        for array, slot, scores in sorted(slots, key=lambda entry: entry[1].number):
            last, slot.epochs = slot.is_last, slot.epochs + 1
            decision = self.trials.report(slot.number, scores, slot.epochs - 1, last=last)
            self._events.trained(array, slot, scores, decision)
            if decision is not Decision.CONTINUE:
                best = decision is Decision.COMPLETE and self.best.takes(slot.number)
                self._leave(array, slot, is_best=best)
                freed_devices.add(array.device)
        for array in arrays:
            self._exploit(array, values[array.name])
        for array in arrays:
            if not array.plain and array.device in freed_devices and self.placement.crowded(array.device):
                freed_devices.remove(array.device)
                self._workers.send(array.name, "collect")

    def lost(self, name: str, reason: str) -> None:
        """Note that the process of an array was lost."""
        self._events.lost(next(array for array in self.placement.arrays if array.name == name), reason)

    def take_over(self, name: str) -> int:
        """Return the device that takes over a lost array. Raises DeviceLost if none has room for it."""
        device = self.placement.moved(name)
        self._events.moved(next(array for array in self.placement.arrays if array.name == name))
        return device

    def _promote(self) -> None:
        """Continue plain trials as arrays if that is faster by now. The choice is saved before the array trains."""
        for old, array in self.placement.promoted():
            states = self._workers.ask({old: ("states", ())})[old]
            self._workers.open(array.name, array.device, array.shape.first.suggestion.choices)
            self._workers.send(array.name, "adopt", states, self._members(array))
            self._workers.drop(old, collect=False)
            self._events.placed(array, array.slots.values(), "moved")
            _log.info("%d trials of one shape go on as an array", len(array.slots))

    def _leave(self, array: ShapeArray, slot: TrialSlot, *, is_best: bool) -> None:
        """Free the row of a trial. Keep its model if it is among the best trials."""
        del array.slots[slot.tag]
        if is_best:
            self.best.add(slot.number, self._workers.leave(array.name, self._member(slot)))
        else:
            self._workers.send(array.name, "discard", slot.tag)

    def _member(self, slot: TrialSlot) -> TrialModel:
        return TrialModel(slot.number, slot.suggestion, self._maker.models)

    def _members(self, array: ShapeArray) -> list[TrialModel]:
        return [self._member(slot) for slot in array.slots.values()]

    def _exploit(self, array: ShapeArray, values: Mapping[str, tuple[float, ...]]) -> None:
        """Apply population based training to the remaining trials of an array, after their reports."""
        pbt = self._extent.pbt
        if pbt is None:
            return
        (sign,), tags = self.trials.signs, [tag for tag, slot in array.slots.items() if not slot.epochs % pbt.interval]
        due = {tag: sign * values[tag][0] for tag in tags}
        draw = random.Random(f"{self.trials.base} {self._round} {array.name}")
        pairs = pbt.pairs(due, draw)
        if not pairs:
            return
        explored = [self._explored(array.slots[source], draw) for source, _ in pairs]
        self._workers.send(array.name, "exploit", pairs, [suggestion for _, suggestion in explored])
        for (source, tag), (params, suggestion) in zip(pairs, explored, strict=True):
            slot, copied = array.slots[tag], array.slots[source]
            origin = copied.number if copied.origin is None else copied.origin
            slot.params, slot.suggestion, slot.origin = params, suggestion, origin
            self.trials.copied(slot.number, copied.number, slot.epochs, params, origin)
            self._events.copied(array, slot, copied.number)

    def _explored(self, slot: TrialSlot, draw: random.Random) -> tuple[dict[str, Any], Suggestion]:
        """Return perturbed params and their suggestion, with the same model and array as the trial in ``slot``."""
        assert self._extent.pbt is not None

        def allowed(params: dict[str, Any]) -> bool:
            try:
                suggestion = self._fixed(params, slot.number)
            except (ValueError, self.trials.optuna.TrialPruned):
                # Another branch of the space, or a value that the optimizer rejects.
                return False
            return suggestion.same_but_for_numbers(slot.suggestion)

        params, distributions = self.trials.suggested(slot.number if slot.origin is None else slot.origin)
        perturbed = self._extent.pbt.explored(slot.params or params, distributions, allowed, draw)
        return perturbed, self._fixed(perturbed, slot.number)

    def _fixed(self, params: dict[str, Any], number: int) -> Suggestion:
        """Evaluate the search space on fixed values."""
        return self._maker.suggestion(self.trials.optuna.trial.FixedTrial(params, number))

    def _refill(self) -> None:
        """Ask the study for trials while there is room for them, and let them join arrays."""
        while not self.placement.full and (next_trial := self._next()) is not None:
            self._waiting = next_trial
            candidate, shape = next_trial
            array = self.placement.room_for(shape)
            if array is None:
                break
            self.placement.join(array, candidate)
            self._waiting = None
        for array in self.placement.arrays:
            if array.joining:
                if not array.slots:
                    self.placement.open(array)
                new = array.assign_slots(self._round)
                self._workers.send(array.name, "join", new)
                for member in new:
                    self.trials.record_start_round(member.number, array.slots[member.tag].began)
                self._events.placed(array, [array.slots[member.tag] for member in new], "started")
        self.placement.give_back()
        self._events.close_all_but(self.placement.arrays)

    def _next(self) -> tuple[TrialModel, Shape] | None:
        """Return the next trial and its shape; None if no more trials start."""
        next_trial, self._waiting = self._waiting, None
        while next_trial is None and len(self.trials.asked_numbers) < self._extent.trials and not self._late():
            if self.trials.over:
                break
            trial = self.trials.ask()
            if trial is not None:
                next_trial = self._attempt(trial.number, partial(self._candidate, trial))
        return next_trial

    def _late(self) -> bool:
        return time.monotonic() >= self._extent.deadline

    def _attempt(self, number: int, make: Callable[[], T]) -> T | None:
        """Return ``make()``; None if it raises one of the exceptions to catch, which fails the trial."""
        try:
            return make()
        except Exception as error:
            pruned = isinstance(error, self.trials.optuna.TrialPruned)
            decision = Decision.PRUNED if pruned else Decision.FAILED
            self.trials.end(number, decision)
            self._events.ended(number, decision, error)
            if pruned:
                return None
            if not isinstance(error, self._extent.catch):
                error.add_note(f"in trial {number} of study {self.trials.study.study_name!r}")
                raise
            _log.warning("trial %d failed: %r", number, error)
            return None

    def _candidate(self, trial: Any) -> tuple[TrialModel, Shape]:
        suggestion = self._maker.suggestion(trial)
        if self._folder is not None:
            check_choices(trial)
        candidate = self._maker.candidate(trial.number, suggestion)
        shape = self._shapes.shape(candidate, self.placement.arrays)
        self.placement.check(shape, f"trial {candidate.number} with {trial.params}")
        return candidate, shape

    def fail_unfinished(self) -> None:
        """Mark all unfinished trials as failed, as a sweep without a folder must: it cannot be resumed."""
        for number in self.trials.live:
            self.trials.end(number, Decision.FAILED)
        self._heartbeat.end()

    def save(self) -> None:
        """Save the state that a resumed sweep needs, apart from the study."""
        if self._folder is None:
            return
        attributes = self.trials.attributes()
        changed = [array for array in self.placement.arrays if not array.save]
        saves = self._workers.save(
            {array.name: self._folder.of_array(array.name) for array in changed},
            {array.name: self._members(array) for array in changed},
        )
        for array in changed:
            array.save = self._folder.relative_path(saves[array.name])
        tensors: dict[str, Tensor] = {}
        for number, model in self.best.models.items():
            tensors |= {f"{number}.{key}": value.detach().clone() for key, value in model.state_dict().items()}
        body = {
            "run": self.trials.run,
            "base": self.trials.base,
            "seed": self._extent.seed,
            "epochs": self._extent.epochs,
            "processes": self._extent.processes,
            "rounds": self.rounds,
            "round": self._round,
            "reported": self._reported,
            "opened": self.placement.opened,
            "asked": self.trials.asked_numbers,
            "stopped": self._extent.trials if self.trials.stopped else None,
            "waiting": None if self._waiting is None else self._waiting[0].number,
            "arrays": [_saved_array(array, attributes) for array in self.placement.arrays],
            "best": list(self.best.models),
        }
        self._folder.write(body, tensors, self._round)
        self._events.saved(changed, self._round)

    def resume(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved state."""
        assert self._folder is not None
        self._round, self.placement.opened = body["round"], body["opened"]
        if self._extent.trials <= (body.get("stopped") or -1):
            self.trials.study.stop()
        epochs = {number: done for record in body["arrays"] for number, _, done, *_ in record["seats"]}
        if body["waiting"] is not None:
            epochs[body["waiting"]] = 0
        trials = self.trials.resume(epochs)
        # Trials keep their suggested values: nothing is sampled again.
        suggestions = {number: self._restore_suggestion(trial.params, number) for number, trial in trials.items()}
        for record in body["arrays"]:
            slots = [
                TrialSlot(number, self._copied(number, params) or suggestions[number], began, done, params, *origin)
                for number, began, done, _, params, *origin in record["seats"]
            ]
            self._restore(record["name"], record["save"], slots, plain=record["plain"])
        if body["waiting"] is not None:
            candidate = self._maker.candidate(body["waiting"], suggestions[body["waiting"]])
            self._waiting = candidate, self._shapes.shape(candidate, self.placement.arrays)
        for number in body["best"]:
            self.best.models[number] = self._restore_best(number, tensors)

    def _copied(self, number: int, params: dict[str, Any] | None) -> Suggestion | None:
        """Return the suggestion of a trial that became a copy of another."""
        return None if params is None else self._restore_suggestion(params, number)

    def _restore_suggestion(self, params: dict[str, Any], number: int) -> Suggestion:
        """Evaluate the search space on saved values. Raises CheckpointError if the space has changed."""
        try:
            return self._fixed(params, number)
        except ValueError as error:
            raise self._changed(f"space does not take {params} of trial {number}", error) from error

    def _changed(self, difference: str, error: Exception) -> CheckpointError:
        assert self._folder is not None
        return CheckpointError(
            f"the sweep in {self._folder.root} was saved with another space or make_model: {difference}: {error}; give "
            "those that it was, or a new directory"
        )

    def _restore(self, name: str, save: str, slots: list[TrialSlot], *, plain: bool) -> None:
        assert self._folder is not None
        path, members = self._folder.root / save, [self._member(slot) for slot in slots]
        array = self.placement.restored(name, self._shapes.shape(members[0], self.placement.arrays), slots, plain=plain)
        results = self._workers.ask({name: ("restore", (path.absolute(), members))})
        (array.widths, array.width), array.save = results[name] or (None, 0), save
        self._events.placed(array, slots, "resumed")

    def _restore_best(self, number: int, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the model of a best trial of the saved sweep: it is made again, and its saved tensors are loaded."""
        trial = next(frozen for frozen in self.trials.study.get_trials(deepcopy=False) if frozen.number == number)
        copies = trial.user_attrs.get(COPIES)
        suggestion = self._restore_suggestion(copies[-1]["params"] if copies else trial.params, number)
        model = self._maker.models.model(number, suggestion).cpu()
        try:
            state = {key: value for key, value in tensors.items() if key.startswith(f"{number}.")}
            model.load_state_dict({key.partition(".")[2]: value for key, value in state.items()})
        except RuntimeError as error:
            raise self._changed(f"make_model gave another model for trial {number}", error) from error
        return model


def _saved_array(array: ShapeArray, attributes: Mapping[int, Sequence[str]]) -> dict[str, Any]:
    """Return what a save has of an array and its slots. ``attributes``: names of system attributes, by trial."""
    slots = [
        [slot.number, slot.began, slot.epochs, attributes.get(slot.number, []), slot.params, slot.origin]
        for slot in array.slots.values()
    ]
    return {"name": array.name, "plain": array.plain, "save": array.save, "seats": slots}


# The log of a sweep: what happens to its arrays and trials.

_ENDS = {Decision.COMPLETE: "finished", Decision.PRUNED: "pruned", Decision.FAILED: "failed"}


class SweepLog:
    """Writes events of a sweep, each with the device, node and process of the array."""

    def __init__(self, log: EventLog, workers: SweepWorkers) -> None:
        self._log, self._workers = log, workers
        self._open: dict[str, ShapeArray] = {}

    def _array(self, array: ShapeArray, event: str, **values: object) -> None:
        location = self._workers.devices[array.device].log_fields
        self._log.array(array.name, event, {**location, "trials": len(array.slots), **values})

    def _trial(self, array: ShapeArray, slot: TrialSlot, event: str, **values: object) -> None:
        location, epochs = self._workers.devices[array.device].log_fields, f"{slot.epochs}/{slot.suggestion.epochs}"
        self._log.trial(slot.number, event, {**location, "array": array.name, "epoch": epochs, **values})

    def placed(self, array: ShapeArray, slots: Iterable[TrialSlot], event: str) -> None:
        """Log that trials were started, resumed or moved in an array, and the start of the array if it is new."""
        if array.name not in self._open:
            self._open[array.name] = array
            self._array(array, "resumed" if event == "resumed" else "started", plain=array.plain)
        for slot in slots:
            self._trial(array, slot, event)

    def moved(self, array: ShapeArray) -> None:
        """Log that an array and its trials have moved to another device."""
        self._array(array, "moved")
        self.placed(array, array.slots.values(), "moved")

    def lost(self, array: ShapeArray, reason: str) -> None:
        """Log that the process of an array was lost. The array will be restored."""
        self._array(array, "lost", error=reason)

    def round(self, array: ShapeArray, number: int, result: EpochResult) -> None:
        """Log that an array has trained an epoch."""
        self._array(array, "trained", round=number, seconds=f"{result.seconds:.3f}")

    def trained(self, array: ShapeArray, slot: TrialSlot, values: Sequence[float], decision: Decision) -> None:
        """Log that a trial has trained an epoch, or ended after it."""
        event = _ENDS.get(decision, "evaluated" if values else "trained")
        error = "NaN in a loss, a gradient or a value" if decision is Decision.FAILED else None
        self._trial(array, slot, event, value=" ".join(f"{value:.6g}" for value in values) or None, error=error)

    def copied(self, array: ShapeArray, slot: TrialSlot, source: int) -> None:
        """Log that a trial continues as a copy of trial ``source``."""
        self._trial(array, slot, "copied", source=source)

    def ended(self, number: int, decision: Decision, error: BaseException) -> None:
        """Log that a trial ended by an exception before it was trained."""
        self._log.trial(number, _ENDS[decision], {"error": first_line(error)})

    def saved(self, arrays: Iterable[ShapeArray], number: int) -> None:
        """Log that these arrays were saved, before round ``number``."""
        for array in arrays:
            self._array(array, "saved", round=number)

    def close_all_but(self, arrays: Sequence[ShapeArray]) -> None:
        """Log that all arrays except these have finished."""
        names = {array.name for array in arrays}
        for name in [name for name in self._open if name not in names]:
            del self._open[name]
            self._log.array(name, "finished", {})


# The progress of a sweep: a bar like in study.optimize, and a log line after every round.


class SweepProgress:
    """Shows how many of ``trials`` have finished, and the best value so far.

    Args:
        shown: whether to draw a bar; without one only the log is written.
    """

    def __init__(self, study: Study, trials: int, *, shown: bool) -> None:
        self._study = study
        self._bar: Any = None
        if shown:
            # tqdm is a dependency of Optuna.
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=trials)

    def round(self, number: int, finished: int, training: int, arrays: int, seconds: float) -> None:
        """Log the end of a round, with counts of trials and arrays, and update the bar."""
        best = self._best()
        _log.info(
            "round %d: %d trials finished, %d training in %d arrays, %.2f s. %s",
            number,
            finished,
            training,
            arrays,
            seconds,
            best,
        )
        if self._bar is not None:
            self._bar.set_description(best)
            self._bar.update(finished - self._bar.n)

    def close(self) -> None:
        """Close the bar, if there is one."""
        if self._bar is not None:
            self._bar.close()

    def _best(self) -> str:
        if len(self._study.directions) > 1:
            count = len(self._study.best_trials)
            return f"{count} trial{'s' * (count != 1)} on the Pareto front."
        try:
            best = self._study.best_trial
        except ValueError:
            return "No trial is complete."
        return f"Best trial: {best.number}. Best value: {best.value:.6g}"
