"""The rounds of a sweep: arrays train an epoch, values are reported, and new trials get the free rows."""

from __future__ import annotations

import logging
import os
import random
import time
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import EventLog, first_line
from hfusion.tune.space import Maker, Suggestion, SweepTrial, check_choices
from hfusion.tune.study import ARRAYS, COPIES, ROUND, SweepFolder, Trials, numbered
from hfusion.tune.sweep_workers import SweepWorkers
from hfusion.tune.trial_placement import Extent, Shape, ShapeArray, TrialPlacement

_log = logging.getLogger(__name__)
# The last event of a trial in the log, by its state in the study.
_ENDS = {"COMPLETE": "finished", "PRUNED": "pruned", "FAIL": "failed"}


class SweepRunner:
    """Trains the trials of a sweep on devices, and writes what a resumed sweep needs into a folder.

    In rounds together, all arrays train an epoch. Trials are then reported in the order of their numbers, whatever
    their array, so that decisions do not depend on the number of devices.

    In asynchronous rounds an array reports as soon as it has trained an epoch. A worker trains one array at a time: the
    one in the earliest round. No trial joins or leaves an array while it trains, so that all arrays can be saved
    between any two reports.

    Args:
        bar: shows how many trials have finished; a line of the log does so after every round.

    Attributes:
        best_models: the models of the best trials so far, by number.
    """

    def __init__(
        self,
        trials: Trials,
        maker: Maker,
        extent: Extent,
        workers: SweepWorkers,
        folder: SweepFolder | None,
        bar: Any,
        log: EventLog,
    ) -> None:
        self.trials, self._maker, self._recipe, self._extent = trials, maker, maker.recipe, extent
        self._workers, self._folder = workers, folder
        self._bar, self._events = bar, log
        self.placement = TrialPlacement(workers, maker.recipe, extent, saved=folder is not None)
        self._waiting: tuple[SweepTrial, Shape] | None = None
        # The round of the arrays that reported last.
        self._round = 0
        self.best_models: dict[int, nn.Module] = {}

    def run(self) -> None:
        """Train until every trial has finished."""
        if not self.placement.arrays:
            self._refill()
            self.save()
        while self.placement.arrays:
            began = time.monotonic()
            ready = self._next_ready()
            self._report(ready)
            self._show_round(len(ready), time.monotonic() - began)
            self._round += 1
            self._refill()
            self.save()
        self.save(ended=True)

    def _show_round(self, arrays: int, seconds: float) -> None:
        """Log the end of a round in which ``arrays`` reported, and update the bar."""
        study, training = self.trials.study, len(self.trials.live)
        finished = len(self.trials.asked_numbers) - training
        if len(study.directions) > 1:
            count = len(study.best_trials)
            best = f"{count} trial{'s' * (count != 1)} on the Pareto front."
        else:
            try:
                best = f"Best trial: {study.best_trial.number}. Best value: {study.best_value:.6g}"
            except ValueError:
                best = "No trial is complete."
        counts = f"{finished} trials finished, {training} training in {arrays} arrays"
        _log.info("round %d: %s, %.2f s. %s", self._round, counts, seconds, best)
        if self._bar is not None:
            self._bar.set_description(best)
            self._bar.update(finished - self._bar.n)

    def _next_ready(self) -> dict[ShapeArray, dict[str, tuple[float, ...]]]:
        """Start an epoch, and return the values of the arrays that report.

        All arrays start and report; in asynchronous rounds one starts on each idle worker, and the first reports.
        """
        starting = [array for array in self.placement.arrays if not array.training]
        if self._extent.asynchronous:
            busy = {array.worker for array in self.placement.arrays if array.training}
            starting.sort(key=lambda array: array.round or 0)
            by_worker = {array.worker: array for array in reversed(starting)}
            starting = [array for worker, array in by_worker.items() if worker not in busy]
        for array in starting:
            array.training = True
            assert array.round is not None
            # With several objectives, only the values after the last epoch are reported.
            evaluates = self._recipe.objectives == 1 or any(slot.is_last for slot in array.slots.values())
            self._workers.send(array, "epoch", self._extent.seed + array.round, evaluates)
        training = [array for array in self.placement.arrays if array.training]
        return dict([self._workers.first(training)]) if self._extent.asynchronous else self._workers.collect(training)

    def _report(self, values: Mapping[ShapeArray, Mapping[str, tuple[float, ...]]]) -> None:
        """Report the values of an epoch to the study, in the order of trial numbers, and remove trials that end."""
        self._round = next(iter(values)).round or 0
        for array in values:
            array.save, array.training = "", False
        slots = [(array, array.slots[tag], scores) for array in values for tag, scores in values[array].items()]
        for array, slot, scores in sorted(slots, key=lambda entry: entry[1].number):
            last, slot.epochs = slot.is_last, slot.epochs + 1
            state = self.trials.report(slot.number, scores, slot.epochs - 1, last=last).name
            event = _ENDS.get(state, "evaluated" if scores else "trained")
            error = "NaN in a loss, a gradient or a value" if state == "FAIL" else None
            shown = " ".join(f"{score:.6g}" for score in scores) or None
            self._note(array, slot, event, value=shown, error=error)
            if state in _ENDS:
                self._leave(array, slot, completed=state == "COMPLETE")
        for array in values:
            self._exploit(array, values[array])

    def _note(self, array: ShapeArray, slot: SweepTrial, event: str, **values: object) -> None:
        """Log an event of a trial, with the device, node and process of its array."""
        location, epochs = self._workers.devices[array.device].log_fields, f"{slot.epochs}/{slot.suggestion.epochs}"
        self._events.trial(slot.number, event, {**location, "array": array.name, "epoch": epochs, **values})

    def _note_all(self, array: ShapeArray, event: str, **values: object) -> None:
        for slot in array.slots.values():
            self._note(array, slot, event, **values)

    def lost(self, array: ShapeArray, reason: str, can_stay: bool) -> None:
        """Place an array whose process was lost where it goes on. Raises DeviceLost if no device has room."""
        self._note_all(array, "lost", error=reason)
        if not can_stay:
            self.placement.move(array)
            self._note_all(array, "moved")

    def _leave(self, array: ShapeArray, slot: SweepTrial, *, completed: bool) -> None:
        """Free the row of a trial. Keep its model if it is among the best trials."""
        del array.slots[slot.tag]
        if completed and slot.number in (best := self.trials.best_numbers()):
            model = self._workers.leave(array, slot)
            self.best_models = {n: other for n, other in self.best_models.items() if n in best} | {slot.number: model}
        elif not array.plain:
            self._workers.send(array, "leave", slot.tag)

    def _exploit(self, array: ShapeArray, values: Mapping[str, tuple[float, ...]]) -> None:
        """Apply population based training to the remaining trials of an array, after their reports."""
        pbt = self._extent.pbt
        if pbt is None:
            return
        sign = 1 if self.trials.study.direction.name == "MAXIMIZE" else -1
        due = {tag: sign * values[tag][0] for tag, slot in array.slots.items() if not slot.epochs % pbt.interval}
        draw = random.Random(f"{self.trials.base} {self._round} {array.name}")
        pairs = pbt.pairs(due, draw)
        if not pairs:
            return
        explored = [self._explored(array.slots[source], draw) for source, _ in pairs]
        self._workers.send(array, "exploit", pairs, [suggestion for _, suggestion in explored])
        for (source, tag), (params, suggestion) in zip(pairs, explored, strict=True):
            slot, copied = array.slots[tag], array.slots[source]
            origin = copied.number if copied.origin is None else copied.origin
            slot.params, slot.suggestion, slot.origin = params, suggestion, origin
            trial = self.trials.live[slot.number]
            event = {"epoch": slot.epochs, "source": copied.number, "params": params, "origin": origin}
            trial.set_user_attr(COPIES, [*trial.user_attrs.get(COPIES, []), event])
            self._note(array, slot, "copied", source=copied.number)

    def _explored(self, slot: SweepTrial, draw: random.Random) -> tuple[dict[str, Any], Suggestion]:
        """Return perturbed params and their suggestion, with the same model and array as the trial in ``slot``."""
        assert self._extent.pbt is not None

        def allowed(params: dict[str, Any]) -> bool:
            try:
                suggestion = self._fixed(params, slot.number)
            except (ValueError, self.trials.optuna.TrialPruned):
                # Another branch of the space, or a value that the optimizer rejects.
                return False
            return suggestion.same_but_for_numbers(slot.suggestion)

        origin = numbered(self.trials.study, slot.number if slot.origin is None else slot.origin)
        perturbed = self._extent.pbt.explored(slot.params or origin.params, origin.distributions, allowed, draw)
        return perturbed, self._fixed(perturbed, slot.number)

    def _fixed(self, params: dict[str, Any], number: int) -> Suggestion:
        """Evaluate the search space on fixed values."""
        return self._maker.suggestion(self.trials.optuna.trial.FixedTrial(params, number))

    def _refill(self) -> None:
        """Ask the study for trials while there is room for them, and let them join arrays."""
        while not self.placement.full and (next_trial := self._next()) is not None:
            self._waiting = next_trial
            candidate, shape = next_trial
            if not self.placement.join(shape, candidate):
                break
            self._waiting = None
        for array in self.placement.open():
            new = array.assign_slots(self._round)
            self._workers.join(array, new)
            for trial in new:
                trial.model = None
                self.trials.live[trial.number].set_user_attr(ROUND, trial.began)
                self._note(array, trial, "started")
        self.placement.drop_empty()
        self.trials.beat()

    def _next(self) -> tuple[SweepTrial, Shape] | None:
        """Return the next trial and its shape; None if no more trials start."""
        next_trial, self._waiting = self._waiting, None
        while next_trial is None and len(self.trials.asked_numbers) < self._extent.trials:
            if self.trials.over or time.monotonic() >= self._extent.deadline:
                break
            trial = self.trials.ask()
            try:
                suggestion = self._maker.suggestion(trial)
                if self._folder is not None:
                    check_choices(trial)
                candidate = SweepTrial(trial.number, suggestion, self._recipe.model(trial.number, suggestion))
                shape = self.placement.shape(candidate)
                self.placement.check(shape, f"trial {candidate.number} with {trial.params}")
                next_trial = candidate, shape
            except Exception as error:
                pruned = isinstance(error, self.trials.optuna.TrialPruned)
                state = self.trials.states.PRUNED if pruned else self.trials.states.FAIL
                self.trials.end(trial.number, state)
                self._events.trial(trial.number, _ENDS[state.name], {"error": first_line(error)})
                if not pruned and not isinstance(error, self._extent.catch):
                    error.add_note(f"in trial {trial.number} of study {self.trials.study.study_name!r}")
                    raise
                if not pruned:
                    _log.warning("trial %d failed: %r", trial.number, error)
        return next_trial

    def save(self, *, ended: bool = False) -> None:
        """Save the state that a resumed sweep needs, with the size of the study."""
        if self._folder is None:
            return
        changed = [array for array in self.placement.arrays if not array.save]
        root = self._folder.root.absolute()
        for array, path in self._workers.save(changed, root / ARRAYS).items():
            # Relative, so that the folder can be moved.
            array.save = os.fspath(path.relative_to(root))
        arrays = [
            {
                "name": array.name,
                "plain": array.plain,
                "save": array.save,
                "first": array.first,
                "seats": [
                    {key: value for key, value in vars(slot).items() if key not in ("suggestion", "model")}
                    for slot in array.slots.values()
                ],
            }
            for array in self.placement.arrays
        ]
        tensors: dict[str, Tensor] = {}
        best = {number: dict(model.state_dict()) for number, model in self.best_models.items()}
        body = {
            "base": self.trials.base,
            "arguments": self._extent.arguments,
            "round": self._round,
            "ended": ended,
            "journal": self._folder.journal_size,
            "opened": self.placement.opened,
            "asked": self.trials.asked_numbers,
            "stopped": self._extent.trials if self.trials.study._stop_flag else None,
            "waiting": None if self._waiting is None else self._waiting[0].number,
            "arrays": arrays,
            "best": encode(best, tensors, "the best models"),
        }
        self._folder.write(body, {key: tensor.detach().clone() for key, tensor in tensors.items()}, self._round)

    def resume(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Restore a saved state."""
        assert self._folder is not None
        self._round, self.placement.opened = body["round"], body["opened"]
        if self._extent.trials <= (body.get("stopped") or -1):
            self.trials.study.stop()
        numbers = [seat["number"] for record in body["arrays"] for seat in record["seats"]]
        trials = self.trials.resume(numbers if body["waiting"] is None else [*numbers, body["waiting"]])
        # Trials keep their suggested values: nothing is sampled again.
        suggestions = {number: self._restore_suggestion(trial.params, number) for number, trial in trials.items()}
        for record in body["arrays"]:
            slots = [SweepTrial(suggestion=suggestions[seat["number"]], model=None, **seat) for seat in record["seats"]]
            for slot in slots:
                if slot.params is not None:
                    # It became a copy of another trial.
                    slot.suggestion = self._restore_suggestion(slot.params, slot.number)
            slots[0].model = self._recipe.model(slots[0].number, slots[0].suggestion)
            shape = self.placement.shape(slots[0])
            array = self.placement.restored(record["name"], shape, slots, record["first"], plain=record["plain"])
            self._workers.restore(array, (self._folder.root / record["save"]).absolute())
            array.save, slots[0].model = record["save"], None
            self._note_all(array, "resumed")
        if body["waiting"] is not None:
            suggestion = suggestions[body["waiting"]]
            model = self._recipe.model(body["waiting"], suggestion)
            candidate = SweepTrial(body["waiting"], suggestion, model)
            self._waiting = candidate, self.placement.shape(candidate)
        for number, state in decode(body["best"], tensors).items():
            self.best_models[number] = self._restore_best(number, state)

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

    def _restore_best(self, number: int, state: Mapping[str, Tensor]) -> nn.Module:
        """Return the model of a best trial of the saved sweep: it is made again, and its saved tensors are loaded."""
        trial = numbered(self.trials.study, number)
        copies = trial.user_attrs.get(COPIES)
        suggestion = self._restore_suggestion(copies[-1]["params"] if copies else trial.params, number)
        model = self._recipe.model(number, suggestion).cpu()
        try:
            model.load_state_dict(state)
        except RuntimeError as error:
            raise self._changed(f"make_model gave another model for trial {number}", error) from error
        return model
