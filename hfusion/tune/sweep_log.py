"""The log of a sweep: what happens to its arrays and trials."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hfusion.core.event_log import EventLog, first_line
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.shape_array import ShapeArray, TrialSlot
from hfusion.tune.sweep_workers import SweepWorkers
from hfusion.tune.trials import Decision

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
        self._array(array, "trained", round=number, seconds=f"{result.seconds + result.startup:.3f}")

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
