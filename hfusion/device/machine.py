"""The resources for training: devices with memory budgets, host memory, a disk, and their rates.

Bytes are whole numbers, rates are FLOP/s and bytes/s. Several devices may share one physical device: two
budgets on one GPU, or the CPU cut into ``cpu:0`` and ``cpu:1``; each is scheduled separately.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hfusion.core.errors import PlanError
from hfusion.core.text import aligned, readable
from hfusion.device.backend import accelerators, backend, types
from hfusion.device.calibrate import Rates, calibrate

_UNITS = {"B": 0, "KIB": 1, "MIB": 2, "GIB": 3, "TIB": 4}
# Of free memory. What is accounted for leaves out up to 8% of the bytes of tensors (tests.simulated.pieces), and what
# an allocator keeps between them for each queue.
_ROOM = 0.9
_DECIMAL = {"KB": 1, "MB": 2, "GB": 3, "TB": 4}


def parse_bytes(text: str | int) -> int:
    """Return bytes from ``"8GiB"`` (binary units), ``"8GB"`` (decimal ones), ``"512"`` or an int.

    Raises PlanError for other text and for numbers that are not positive.

    >>> parse_bytes("1.5KiB"), parse_bytes("2 kB"), parse_bytes(7)
    (1536, 2000, 7)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    size = text if isinstance(text, int) and not isinstance(text, bool) else 0
    if match:
        unit = match[2].upper() or "B"
        base, power = (1024, _UNITS[unit]) if unit in _UNITS else (1000, _DECIMAL.get(unit, -1))
        size = int(float(match[1]) * base**power) if power >= 0 else 0
    if size <= 0:
        raise PlanError(f'memory {text!r} is no positive number of bytes: write it as "8GiB", "500MB" or an int')
    return size


@dataclass(frozen=True, init=False)
class Device:
    """A torch device, such as ``"cpu"``, ``"cpu:1"`` or ``"cuda:0"``, with a budget of ``memory`` bytes.

    Args:
        device: as in torch.device. Every ``cpu:i`` is the same CPU.
        name: one word, by default ``device``.
        memory: the budget, a number of bytes or a string such as ``"2GiB"``.

    Raises:
        PlanError: the device, the name or the budget is invalid.

    Example:
        >>> Device("cpu:1", memory="2GiB").memory
        2147483648
    """

    device: str
    name: str
    memory: int

    def __init__(self, device: str | torch.device, name: str | None = None, *, memory: str | int) -> None:
        device, device_types = str(device), ("cpu", *types())
        if not re.fullmatch(rf"({'|'.join(device_types)})(:\d+)?", device):
            raise PlanError(
                f"device {device!r} is not known: give a type and a number, such as 'cpu:1' or '{device_types[1]}:0'; "
                f"the types are {', '.join(device_types)}"
            )
        name = device if name is None else name
        if not isinstance(name, str) or not name or any(character.isspace() for character in name):
            raise PlanError(f"device {name!r}: a name is one word without spaces")
        vars(self).update(device=device, name=name, memory=parse_bytes(memory))

    @property
    def physical(self) -> torch.device:
        """The torch device of its tensors, which several devices may share."""
        kind, _, index = self.device.partition(":")
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, int(index or 0))


@dataclass(frozen=True, init=False)
class Machine:
    """Devices with budgets, ``host`` bytes of memory for spilled state, and a ``disk`` folder for what exceeds them.

    Raises:
        PlanError: no device, two devices of one name, or an invalid size or path.

    Example:
        >>> import hfusion as hf
        >>> machine = hf.Machine([hf.Device("cpu", memory="2GiB")], host="8GiB")
        >>> machine.devices[0].memory
        2147483648
    """

    devices: tuple[Device, ...]
    host: int
    disk: Path

    def __init__(self, devices: Sequence[Device], host: str | int = "64GiB", disk: str | Path = "spill/") -> None:
        if not isinstance(devices, Sequence) or not all(isinstance(device, Device) for device in devices):
            raise PlanError(f"the devices are {devices!r}: give a list of hf.Device")
        if not devices:
            raise PlanError("the machine has no device: give at least one hf.Device")
        if not isinstance(disk, str | os.PathLike):
            raise PlanError(f"the disk is {disk!r}: give a folder, which is made when it is needed")
        names = [device.name for device in devices]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"{names.count(name)} devices are named {name!r}: give each its own name")
        vars(self).update(devices=tuple(devices), host=parse_bytes(host), disk=Path(disk))

    @staticmethod
    def detect(disk: str | Path = "spill/") -> Machine:
        """Return this machine: every accelerator with most of its free memory, and half of the host's memory.

        Without an accelerator the CPU is the device: half of the memory is its budget, a quarter is for spilled state.
        """
        total, present = host_memory(), accelerators()
        if not present:
            return Machine([Device("cpu", memory=total // 2)], total // 4, disk)
        devices = [Device(str(device), memory=int(_ROOM * backend(device).free_bytes())) for device in present]
        return Machine(devices, total // 2, disk)

    def calibrate(self) -> dict[str, Rates]:
        """Measure the rates of every device, by name, and store them in the user's cache folder.

        They are stored per processor, number of threads, torch version and disk folder. Raises PlanError if a device
        is missing, or the disk cannot be written.
        """
        rates: dict[torch.device, Rates] = {}
        for device in self.devices:
            if device.physical not in rates:
                rates[device.physical] = calibrate(device.physical, self.disk)
        return {device.name: rates[device.physical] for device in self.devices}

    def __str__(self) -> str:
        rows = [("name", "device", "memory"), *((d.name, d.device, readable(d.memory)) for d in self.devices)]
        rows += [("host", "", readable(self.host)), ("disk", str(self.disk), "")]
        lines = aligned(rows, left=2)
        return "\n".join([f"machine  {len(self.devices)} devices", *("  " + line for line in lines)])


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container this process runs in.

    Raises PlanError if the system does not report it.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise PlanError("the system does not tell its memory: write the machine down as hf.Machine(...)") from error
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total
