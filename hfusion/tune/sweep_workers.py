"""Workers that hold the rows of a sweep's arrays: this process, or processes of a cluster."""

from __future__ import annotations

import gc
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from torch import nn

from hfusion.cluster.messages import DeviceInfo
from hfusion.device.machine import Machine
from hfusion.tune.parallel_trials import ParallelTrials, TrialPool
from hfusion.tune.space import ArrayChoices, TrialModel
from hfusion.tune.training_setup import SweepRecipe

if TYPE_CHECKING:
    from hfusion.tune.trial_rows import TrialRows

# The name of a method of `TrialRows`, and its arguments.
RowsCall: TypeAlias = tuple[str, tuple[Any, ...]]


class SweepWorkers(Protocol):
    """Interface of workers, which hold the `TrialRows` of each array by its name, and call their methods."""

    @property
    def devices(self) -> Sequence[DeviceInfo]: ...

    @property
    def lost_devices(self) -> Collection[int]:
        """Indices of lost devices."""

    @property
    def busy(self) -> Collection[int]:
        """Indices of devices that are training."""

    @property
    def side_by_side(self) -> int:
        """Number of plain trials that a device trains at the same time."""

    def open(self, name: str, device: int, choices: ArrayChoices, plain: bool = False) -> None:
        """Create an empty array, or a holder of plain trials, on a device for trials with these choices."""

    def send(self, name: str, method: str, *args: Any) -> None:
        """Call a method without a result. The call may be deferred until the next one whose result is needed."""

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        """Call a method of each array, and return the results by array name."""

    def start(self, calls: Mapping[str, RowsCall]) -> None:
        """Start a method call of each array. `first` returns the results."""

    def first(self) -> tuple[str, Any]:
        """Wait for the first result of a started call. Return the name of its array and the result."""

    def leave(self, name: str, member: TrialModel) -> nn.Module:
        """Free the row of a member, and return its model on the CPU."""

    def save(self, folders: Mapping[str, Path], members: Mapping[str, Sequence[TrialModel]]) -> dict[str, Path]:
        """Save each array into its folder, and return the paths of the saves. ``members``: of each array."""

    def drop(self, name: str, *, collect: bool) -> None:
        """Remove an array without trials. ``collect``: collect garbage, to free its memory now."""


class LocalWorkers:
    """Trains arrays in this process on the machine's largest device; plain trials in ``processes``, see `TrialPool`."""

    def __init__(self, machine: Machine, recipe: SweepRecipe, processes: int = 0) -> None:
        device = largest(machine)
        rates = machine.calibrate()[device.name]
        self.devices: Sequence[DeviceInfo] = [DeviceInfo(device.name, device.physical, device.memory, rates)]
        self.lost_devices: Collection[int] = ()
        self.busy: Collection[int] = ()
        self._started: dict[str, RowsCall] = {}
        self._results: dict[str, Any] = {}
        self._recipe = recipe
        self._rows: dict[str, TrialRows | ParallelTrials] = {}
        self._pool = TrialPool(recipe, processes)

    @property
    def side_by_side(self) -> int:
        return self._pool.side_by_side

    def open(self, name: str, device: int, choices: ArrayChoices, plain: bool = False) -> None:
        if plain:
            self._rows[name] = self._pool.open(name, choices)
        else:
            # Imported late: it imports the compiler, which a sweep of plain trials does not need.
            from hfusion.tune.trial_rows import TrialRows

            self._rows[name] = TrialRows(self._recipe, choices, lambda: False)

    def send(self, name: str, method: str, *args: Any) -> None:
        getattr(self._rows[name], method)(*args)

    def ask(self, calls: Mapping[str, RowsCall]) -> dict[str, Any]:
        plain = {
            name: args
            for name, (method, args) in calls.items()
            if method == "epoch" and isinstance(self._rows[name], ParallelTrials)
        }
        self._pool.start(plain)
        others = {name: call for name, call in calls.items() if name not in plain}
        results = {name: getattr(self._rows[name], method)(*args) for name, (method, args) in others.items()}
        return results | self._pool.finish(plain)

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

    def drop(self, name: str, *, collect: bool) -> None:
        del self._rows[name]
        self._pool.drop(name)
        if collect:
            gc.collect()

    def close(self) -> None:
        """End the processes of plain trials."""
        self._pool.close()


def largest(machine: Machine) -> Any:
    """Return the device with the most memory."""
    return max(machine.devices, key=lambda device: device.memory)
