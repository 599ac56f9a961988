"""Devices that are alike, for which one estimate holds: of a thousand nodes, a few kinds."""

from __future__ import annotations

from hfusion.cluster.messages import DeviceInfo
from hfusion.cluster.rates import DIFFERS
from hfusion.device.calibrate import Rates
from hfusion.tasks.array_plan import Room

# Of which estimates of seconds consist.
_COMPARED = ("flops", "memory", "calls", "load", "evict")


class DeviceKinds:
    """The kinds of the devices of a cluster. Rates and memory of one kind differ by a tenth at most."""

    def __init__(self) -> None:
        self.rooms: list[Room] = []

    def kind(self, device: DeviceInfo) -> int:
        """Return the index of a device's kind in ``rooms``; it may be a new one, at the end."""
        for kind, room in enumerate(self.rooms):
            # Arrays that are placed by the memory of a kind must fit each of its devices.
            fits = room.budget <= device.budget <= room.budget * (1 + DIFFERS)
            if room.device == device.physical and fits and _alike(room.rates, device.rates):
                return kind
        self.rooms.append(Room(device.physical, device.budget, device.rates, keep=True))
        return len(self.rooms) - 1


def _alike(one: Rates, other: Rates) -> bool:
    pairs = [(getattr(one, name), getattr(other, name)) for name in _COMPARED]
    return all(max(pair) <= min(pair) * (1 + DIFFERS) for pair in pairs)
