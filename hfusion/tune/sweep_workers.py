"""Workers that hold the rows of a sweep's arrays: this process, or processes of a cluster."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import nn

from hfusion.cluster.messages import DeviceInfo
from hfusion.device.machine import Machine
from hfusion.tune.parallel_trials import SpreadTrials, TrialSpread
from hfusion.tune.space import ArrayChoices, TrialModel
from hfusion.tune.training_setup import SweepRecipe

if TYPE_CHECKING:
    from hfusion.tune.trial_rows import TrialRows

# A method of `TrialRows`, and what it is given.
RowsCall: TypeAlias = tuple[str, tuple[Any, ...]]


class SweepWorkers(Protocol):
    """Hold the `TrialRows` of every array, by its name, and call their methods."""

    @property
    def devices(self) -> Sequence[DeviceInfo]: ...

    @property
    def gone(self) -> Collection[int]:
        """The numbers of the devices that are lost."""

    @property
    def busy(self) -> Collection[int]:
        """The numbers of the devices that train."""

    @property
    def side_by_side(self) -> int:
        """Number of plain trials that a device trains at the same time."""

    def open(self, name: str, device: int, choices: ArrayChoices, plain: bool = False) -> None:
        """Make rows for an array of trials with these choices, on a device; or for plain trials, without an array."""

    def send(self, name: str, method: str, *args: Any) -> None:
        """Call a method that gives nothing; it may be called later, before the next that gives something."""

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        """Call a method of each array; what they give."""

    def start(self, calls: Mapping[str, RowsCall]) -> None:
        """Begin to call a method of each array, whose results `first` gives."""

    def first(self) -> tuple[str, Any]:
        """Wait for the first result of those that were started, and return the array's name and it."""

    def leave(self, name: str, member: TrialModel) -> nn.Module:
        """A member's model, on the CPU; its row is free."""

    def save(self, folders: Mapping[str, Path], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, Path]:
        """Save each array with these members in a folder; where."""

    def move(self, devices: Mapping[str, int], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, int]:
        """Let arrays with these members go on on other devices; where they are then."""

    def drop(self, name: str, *, collect: bool) -> None:
        """Nobody is in an array any more; ``collect`` its memory at once."""


class LocalWorkers:
    """All on the largest device of ``machine``: arrays in this process, plain trials in at most ``processes`` more."""

    def __init__(self, machine: Machine, recipe: SweepRecipe, processes: int | None = 0) -> None:
        device = largest(machine)
        rates = machine.calibrate()[device.name]
        self.devices: Sequence[DeviceInfo] = [DeviceInfo(device.name, device.physical, device.memory, rates, 0.0)]
        self.gone: Collection[int] = ()
        self.busy: Collection[int] = ()
        self._started: dict[str, RowsCall] = {}
        self._results: dict[str, Any] = {}
        self._recipe = recipe
        self._rows: dict[str, TrialRows | SpreadTrials] = {}
        self._spread = TrialSpread(recipe, processes)

    @property
    def side_by_side(self) -> int:
        return self._spread.side_by_side

    def open(self, name: str, device: int, choices: ArrayChoices, plain: bool = False) -> None:
        if plain:
            self._rows[name] = self._spread.open(name, choices)
        else:
            # Arrays need the compiler, which a sweep of plain trials does not import.
            from hfusion.tune.trial_rows import TrialRows

            self._rows[name] = TrialRows(self._recipe, choices, lambda: False)

    def send(self, name: str, method: str, *args: Any) -> None:
        getattr(self._rows[name], method)(*args)

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        plain = {
            name: args
            for name, (method, args) in calls.items()
            if method == "epoch" and isinstance(self._rows[name], SpreadTrials)
        }
        self._spread.begin(plain)
        others = {name: call for name, call in calls.items() if name not in plain}
        found = {name: getattr(self._rows[name], method)(*args) for name, (method, args) in others.items()}
        return found | self._spread.finish(plain)

    def start(self, calls: Mapping[str, RowsCall]) -> None:
        self._started |= calls

    def first(self) -> tuple[str, Any]:
        if not self._results:
            self._results, self._started = self.ask(self._started), {}
        name = next(iter(self._results))
        return name, self._results.pop(name)

    def leave(self, name: str, member: TrialModel) -> nn.Module:
        return self._rows[name].leave(member.tag)

    def save(self, folders: Mapping[str, Path], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, Path]:
        return {name: self._rows[name].save(folder) for name, folder in folders.items()}

    def move(self, devices: Mapping[str, int], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, int]:
        raise AssertionError("unreachable: there is one device")

    def drop(self, name: str, *, collect: bool) -> None:
        del self._rows[name]
        self._spread.drop(name)
        if collect:
            gc.collect()

    def close(self) -> None:
        """End other processes."""
        self._spread.close()


def largest(machine: Machine) -> Any:
    """The device with the most memory, where the trials of a sweep are."""
    return max(machine.devices, key=lambda one: one.memory)
