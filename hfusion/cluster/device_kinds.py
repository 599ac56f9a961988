"""Group similar devices into kinds, so that a cost is estimated once per kind and not once per device."""

from __future__ import annotations

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.rates import DIFFERS
from hfusion.device.calibrate import Rates
from hfusion.tasks.array_plan import Room

# The rates from which seconds are estimated.
_COMPARED = ("flops", "memory", "calls", "load", "evict")


class DeviceKinds:
    """The kinds of the devices of a cluster. Rates and memory of one kind differ by a tenth at most."""

    def __init__(self) -> None:
        self.representatives: list[Room] = []

    def kind(self, device: DeviceInfo) -> int:
        """Return the index of a device's kind in ``representatives``. A device of a new kind is appended."""
        for kind, room in enumerate(self.representatives):
            # Arrays are placed by the budget of the kind, so no device of the kind may have less.
            fits = room.budget <= device.budget <= room.budget * (1 + DIFFERS)
            if room.device == device.physical and fits and _alike(room.rates, device.rates):
                return kind
        self.representatives.append(Room(device.physical, device.budget, device.rates, keep=True))
        return len(self.representatives) - 1


def _alike(first: Rates, second: Rates) -> bool:
    pairs = [(getattr(first, name), getattr(second, name)) for name in _COMPARED]
    return all(max(pair) <= min(pair) * (1 + DIFFERS) for pair in pairs)
