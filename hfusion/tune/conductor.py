"""The rounds of a sweep: every array trains an epoch, trials are told, and others get the rows that are free."""

from __future__ import annotations

import gc
import logging
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from hfusion.core.errors import PlanError
from hfusion.device.calibrate import Rates
from hfusion.device.machine import Device
from hfusion.tasks.task import length
from hfusion.tune.beats import Beats
from hfusion.tune.exploit import PBT
from hfusion.tune.folder import SweepFolder
from hfusion.tune.footprint import Footprint, fits
from hfusion.tune.result import Best
from hfusion.tune.shape_array import Seat, ShapeArray, SweepRecipe, first_inputs
from hfusion.tune.space import Maker, Suggestion, TrialModel
from hfusion.tune.trials import COPIES, Trials, Verdict

T = TypeVar("T")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Extent:
    """How many ``trials`` of how many ``epochs``, in at most so many ``rows`` at once; what users let trials raise."""

    trials: int
    epochs: int
    rows: int | None
    seed: int
    catch: tuple[type[BaseException], ...]
    pbt: PBT | None


class Conductor:
    """Trains the trials of a sweep on a device, and writes what a resumed sweep needs into a folder."""

    def __init__(
        self,
        trials: Trials,
        maker: Maker,
        recipe: SweepRecipe,
        extent: Extent,
        device: Device,
        rates: Rates,
        folder: SweepFolder | None,
        beats: Beats,
    ) -> None:
        self.trials, self._maker, self._recipe, self._extent = trials, maker, recipe, extent
        self._device, self._rates, self._folder, self._beats = device, rates, folder, beats
        self._arrays: list[ShapeArray] = []
        self._waiting: tuple[TrialModel, ShapeArray] | None = None
        self._round = self._opened = 0
        self.best: Best | None = None
        self._inputs: Any = None

    def run(self) -> None:
        """Train until every trial is told."""
        resumed = bool(self._arrays)
        if not resumed:
            self._refill()
        while self._arrays:
            if not resumed:
                self.save()
            resumed = False
            seats = sum(len(array.seats) for array in self._arrays)
            for array in self._arrays:
                self._train(array)
            self._round += 1
            self._beats.beat()
            if sum(len(array.seats) for array in self._arrays) < seats and self._crowded():
                gc.collect()
            self.trials.caught_up()
            self._refill()
        self.save()

    def _train(self, array: ShapeArray) -> None:
        """An epoch of an array; what its members come to is reported in the order of their rows."""
        values = array.epoch(self._extent.seed + self._round)
        for tag, value in values.items():
            seat = array.seats[tag]
            seat.epochs += 1
            last = seat.epochs == self._extent.epochs
            verdict = self.trials.report(seat.number, value, seat.epochs - 1, last=last)
            if verdict is Verdict.GO_ON:
                continue
            model = array.leave(tag)
            if verdict is Verdict.COMPLETE and self._is_best(seat.number, value):
                self.best = Best(seat.number, value, model)
        self._exploit(array, values)

    def _exploit(self, array: ShapeArray, values: dict[str, float]) -> None:
        """Population based training among the trials of an array that go on, after their reports."""
        pbt = self._extent.pbt
        if pbt is None:
            return
        sign = 1 if self.trials.study.direction.name == "MAXIMIZE" else -1
        due = {tag: sign * values[tag] for tag, seat in array.seats.items() if not seat.epochs % pbt.interval}
        draw = random.Random(f"{self.trials.base} {self._round} {array.name}")
        pairs = pbt.pairs(due, draw)
        if not pairs:
            return
        explored = [self._explored(array.seats[source], draw) for source, _ in pairs]
        array.exploit(pairs, explored)
        for (source, tag), (params, _) in zip(pairs, explored, strict=True):
            seat = array.seats[tag]
            self.trials.copied(seat.number, array.seats[source].number, seat.epochs, params)

    def _explored(self, seat: Seat, draw: random.Random) -> tuple[dict[str, Any], Suggestion]:
        """Other suggestions that lead to the same model as those of ``seat``, and to the same array."""
        assert self._extent.pbt is not None

        def allowed(params: dict[str, Any]) -> bool:
            try:
                found = self._fixed(params, seat.number)
            except (ValueError, self.trials.optuna.TrialPruned):
                # Another branch of the space, or what the optimizer does not take.
                return False
            return found.rest == seat.suggestion.rest and found.options == seat.suggestion.options

        params, distributions = self.trials.suggested(seat.number)
        found = self._extent.pbt.explored(seat.params or params, distributions, allowed, draw)
        return found, self._fixed(found, seat.number)

    def _fixed(self, params: dict[str, Any], number: int) -> Suggestion:
        """What the space gives for these values."""
        return self._maker.suggestion(self.trials.optuna.trial.FixedTrial(params, number))

    def _is_best(self, number: int, value: float) -> bool:
        """As Optuna ranks: of equal values that of the trial that was asked first."""
        if self.best is None:
            return True
        sign = -1 if self.trials.study.direction.name == "MAXIMIZE" else 1
        return (sign * value, number) < (sign * self.best.value, self.best.number)

    def _refill(self) -> None:
        """Ask for trials while there is room for them, and let them join."""
        while (found := self._next()) is not None:
            self._waiting = found
            if not self._has_room(found[1]):
                break
            candidate, array = found
            array.joining.append(candidate)
            if array not in self._arrays:
                self._arrays.append(array)
            self._waiting = None
        for array in self._arrays:
            for number in array.join(self._round):
                self.trials.place(number, self._round)
        self._give_back()

    def _give_back(self) -> None:
        """Free rows, and arrays that nobody is in, give back what they take."""
        crowded = self._crowded()
        for array in self._arrays:
            array.compact()
        left = [array for array in self._arrays if array.taken]
        if len(left) < len(self._arrays):
            self._arrays = left
            del array
            if crowded:
                gc.collect()

    def _crowded(self) -> bool:
        """Whether arrays need more than half of the device.

        Members that left, arrays and programs hold one another, and so their memory, until Python looks for such
        cycles. To make it look takes a fifth of a second, and can wait where there is room.
        """
        return not fits(self._device.memory // 2, [(one.footprint, one.rows()) for one in self._arrays])

    def _next(self) -> tuple[TrialModel, ShapeArray] | None:
        """The trial that comes next, and the array that takes it; None where all are asked."""
        found, self._waiting = self._waiting, None
        while found is None and len(self.trials.asked) < self._extent.trials:
            trial = self.trials.ask()
            if trial is not None:
                found = self._attempt(trial.number, partial(self._candidate, trial))
        return found

    def _attempt(self, number: int, make: Callable[[], T]) -> T | None:
        """What ``make`` gives; None where it raises what users let trials raise, and the trial has failed then."""
        try:
            return make()
        except Exception as error:
            pruned = isinstance(error, self.trials.optuna.TrialPruned)
            self.trials.end(number, Verdict.PRUNED if pruned else Verdict.FAILED)
            if pruned:
                return None
            if not isinstance(error, self._extent.catch):
                error.add_note(f"in trial {number} of study {self.trials.study.study_name!r}")
                raise
            _log.warning("trial %d failed: %r", number, error)
            return None

    def _candidate(self, trial: Any) -> tuple[TrialModel, ShapeArray]:
        candidate = self._maker.candidate(trial.number, self._maker.suggestion(trial))
        for array in self._arrays:
            if array.takes(candidate):
                return candidate, array
        array = self._array(f"array-{self._opened}", candidate)
        if not fits(self._device.memory, [(array.footprint, 1)]):
            need = array.footprint.held(1) + array.footprint.passing(1)
            raise PlanError(
                f"trial {candidate.number} with {trial.params} needs {need:,} bytes to be trained, and device "
                f"{self._device.name} has {self._device.memory:,}: bound the space, give a smaller minibatch, or let "
                "such trials fail with catch=(hf.PlanError,)"
            )
        self._opened += 1
        return candidate, array

    def _array(self, name: str, first: TrialModel) -> ShapeArray:
        if self._inputs is None:
            self._inputs = first_inputs(self._recipe.loader, torch.device("cpu"))
        # What is made with other seeds only in values is the same shape, and shares what models share.
        models = [self._maker.model(first.number, first.suggestion) for _ in range(2)]
        footprint = Footprint(
            models,
            self._recipe.optimizer_with(first.suggestion.options),
            self._inputs,
            self._device,
            self._rates,
            evaluated=length(self._recipe.judged[1]) if self._recipe.evaluates else 0,
            saved=self._folder is not None,
        )
        return ShapeArray(name, first, footprint, self._recipe)

    def _has_room(self, array: ShapeArray) -> bool:
        """Whether one more trial may join it: by the rows at once, and in bytes."""
        others = [one for one in self._arrays if one is not array]
        taken = sum(one.taken for one in self._arrays)
        if not taken:
            if array not in self._arrays:
                self._give_back()
            return True
        if self._extent.rows is None:
            # The part of the device that each array fills, where 1 is all that makes members cheaper.
            parts = sum(one.taken / one.fastest(self._extent.trials) for one in others)
            if parts + (array.taken + 1) / array.fastest(self._extent.trials) > 1:
                return False
        elif taken >= self._extent.rows:
            return False
        for _ in range(2):
            sizes = [(array.footprint, array.rows(1)), *((one.footprint, one.rows()) for one in others)]
            if fits(self._device.memory, sizes):
                return True
            self._give_back()
            others = [one for one in self._arrays if one is not array]
        return False

    def save(self) -> None:
        """Write all that a resumed sweep needs; the trials themselves are in the study."""
        if self._folder is None:
            return
        attributes = self.trials.attributes()
        arrays = [
            {
                "name": array.name,
                "save": self._folder.save_array(array.name, array.population),
                "seats": [
                    [seat.number, seat.began, seat.epochs, attributes.get(seat.number, []), seat.params]
                    for seat in array.seats.values()
                ],
            }
            for array in self._arrays
        ]
        tensors: dict[str, Tensor] = {}
        if self.best is not None:
            tensors = {key: value.detach().clone() for key, value in self.best.model.state_dict().items()}
        body = {
            "run": self.trials.run,
            "base": self.trials.base,
            "seed": self._extent.seed,
            "epochs": self._extent.epochs,
            "round": self._round,
            "opened": self._opened,
            "asked": self.trials.asked,
            "waiting": None if self._waiting is None else self._waiting[0].number,
            "arrays": arrays,
            "best": None if self.best is None else [self.best.number, self.best.value],
        }
        self._folder.write(body, tensors, self._round)

    def resume(self, body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from what was written."""
        assert self._folder is not None
        self._round, self._opened = body["round"], body["opened"]
        epochs = {number: done for one in body["arrays"] for number, _, done, *_ in one["seats"]}
        if body["waiting"] is not None:
            epochs[body["waiting"]] = 0
        found = self.trials.resume(epochs)
        suggestions = {number: self._maker.suggestion(trial) for number, trial in found.items()}
        for one in body["arrays"]:
            seats = [
                Seat(number, self._copied(number, params) or suggestions[number], began, done, params)
                for number, began, done, _, params in one["seats"]
            ]
            self._arrays.append(self._restored(one["name"], self._folder.root / one["save"], seats))
        if body["waiting"] is not None:
            candidate = self._maker.candidate(body["waiting"], suggestions[body["waiting"]])
            array = next((one for one in self._arrays if one.takes(candidate)), None)
            self._waiting = candidate, array or self._array(f"array-{self._opened - 1}", candidate)
        if body["best"] is not None:
            number, value = body["best"]
            self.best = self._kept(number, value, tensors)

    def _copied(self, number: int, params: dict[str, Any] | None) -> Suggestion | None:
        """What a trial has that became a copy of another."""
        return None if params is None else self._fixed(params, number)

    def _restored(self, name: str, path: Path, seats: list[Seat]) -> ShapeArray:
        first = self._maker.candidate(seats[0].number, seats[0].suggestion)
        array = self._array(name, first)
        array.restore(path, seats, lambda seat: self._maker.model(seat.number, seat.suggestion))
        return array

    def _kept(self, number: int, value: float, tensors: Mapping[str, Tensor]) -> Best:
        """The best trial of before, whose model is made again and written over."""
        trial = next(one for one in self.trials.study.get_trials(deepcopy=False) if one.number == number)
        copies = trial.user_attrs.get(COPIES)
        suggestion = self._fixed(copies[-1]["params"] if copies else trial.params, number)
        model = self._maker.model(number, suggestion).cpu()
        model.load_state_dict(dict(tensors))
        return Best(number, value, model)
