"""What there is to train on: devices with memory budgets, host memory, a disk, and how fast they are.

Bytes are whole numbers, rates are FLOP/s and bytes/s. Several devices may share one physical device: two
budgets on one GPU, or the CPU cut into ``cpu:0`` and ``cpu:1``; each is scheduled by itself.
"""

from __future__ import annotations

import math
import os
import platform
import re
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median

import torch

from hfusion.core.errors import PlanError
from hfusion.device.backend import accelerators, backend, types
from hfusion.device.cache import cache_file, number, read_json, write_json

_UNITS = {"B": 0, "KIB": 1, "MIB": 2, "GIB": 3, "TIB": 4}
_DECIMAL = {"KB": 1, "MB": 2, "GB": 3, "TB": 4}
_CALLS = 256
_RUNS = 5
# Rates that a file may tell, per second.
_PLAUSIBLE = (1.0, 1e24)


def parse_bytes(text: str | int) -> int:
    """A number of bytes from ``"8GiB"`` (binary units), ``"8GB"`` (decimal ones), ``"512"`` or an int.

    Raises PlanError for any other text and for what is not positive.

    >>> parse_bytes("1.5KiB"), parse_bytes("2 kB"), parse_bytes(7)
    (1536, 2000, 7)
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text) if isinstance(text, str) else None
    size = text if isinstance(text, int) else 0
    if found:
        unit = found[2].upper() or "B"
        base, power = (1024, _UNITS[unit]) if unit in _UNITS else (1000, _DECIMAL.get(unit, -1))
        size = int(float(found[1]) * base**power) if power >= 0 else 0
    if size <= 0:
        raise PlanError(f'memory {text!r} is no positive number of bytes: write it as "8GiB", "500MB" or an int')
    return size


@dataclass(frozen=True, init=False)
class Device:
    """A torch device ``"cpu"``, ``"cpu:1"``, ``"cuda:0"``, ... with a budget of ``memory`` bytes.

    Args:
        device: as torch.device reads it; any ``cpu:i`` is the one CPU.
        name: one word, by default ``device``.
        memory: bytes that may be taken there, as `parse_bytes` reads them.

    Raises PlanError for a device that is neither, a name with spaces, and a bad budget.
    """

    device: str
    name: str
    memory: int

    def __init__(self, device: str, name: str | None = None, *, memory: str | int) -> None:
        known = ("cpu", *types())
        if not re.fullmatch(rf"({'|'.join(known)})(:\d+)?", device):
            raise PlanError(
                f"device {device!r} is not known: give a type and a number, such as 'cpu:1' or '{known[1]}:0'; the "
                f"types are {', '.join(known)}"
            )
        name = device if name is None else name
        if not name or any(character.isspace() for character in name):
            raise PlanError(f"device {name!r}: a name is one word without spaces")
        object.__setattr__(self, "device", device)
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "memory", parse_bytes(memory))

    @property
    def physical(self) -> torch.device:
        """Where tensors of this device really lie; equal for devices that share it."""
        kind, _, index = self.device.partition(":")
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, int(index or 0))


@dataclass(frozen=True)
class Rates:
    """How fast a device is.

    ``flops``: float32 matrix products, FLOP/s. Bytes/s: ``memory`` of elementwise operators, read and written;
    ``load`` from host to device and ``evict`` back; ``read`` and ``write`` of the disk. ``calls``: operators per second
    that Python calls, and autograd differentiates, while they have next to nothing to compute.
    """

    flops: float
    memory: float
    load: float
    evict: float
    read: float
    write: float
    calls: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PlanError(f"rate {field.name} is {value!r}: it must be a positive number")


@dataclass(frozen=True, init=False)
class Machine:
    """Devices, ``host`` bytes of memory that spilled state may take, and a ``disk`` folder for the rest.

    Raises PlanError for no device, two of one name, and a bad size of the host.
    """

    devices: tuple[Device, ...]
    host: int
    disk: Path

    def __init__(self, devices: Sequence[Device], host: str | int = "64GiB", disk: str | Path = "spill/") -> None:
        if not devices:
            raise PlanError("the machine has no device: give at least one hf.Device")
        names = [device.name for device in devices]
        for name in names:
            if names.count(name) > 1:
                raise PlanError(f"{names.count(name)} devices are named {name!r}: give each its own name")
        object.__setattr__(self, "devices", tuple(devices))
        object.__setattr__(self, "host", parse_bytes(host))
        object.__setattr__(self, "disk", Path(disk))

    @staticmethod
    def detect(disk: str | Path = "spill/") -> Machine:
        """This machine: every accelerator with the memory that is free there now and half of the host's.

        Without one the CPU is the device, and shares the memory: half for it, a quarter for spilled state.
        """
        total, present = host_memory(), accelerators()
        if not present:
            return Machine([Device("cpu", memory=total // 2)], total // 4, disk)
        found = [Device(str(device), memory=backend(device).free_bytes()) for device in present]
        return Machine(found, total // 2, disk)

    def calibrate(self) -> dict[str, Rates]:
        """The rates of every device by name: medians of short runs, kept in the user's cache folder.

        They are kept per processor, number of threads, torch version and disk folder. An unreadable file is
        measured anew. Raises PlanError where a device is missing, or the disk cannot be written.
        """
        made: dict[torch.device, Rates] = {}
        for device in self.devices:
            if device.physical not in made:
                made[device.physical] = _calibrated(device.physical, self.disk)
        return {device.name: made[device.physical] for device in self.devices}

    def __str__(self) -> str:
        rows = [("name", "device", "memory"), *((d.name, d.device, _gib(d.memory)) for d in self.devices)]
        rows += [("host", "", _gib(self.host)), ("disk", str(self.disk), "")]
        widths = [max(len(row[column]) for row in rows) for column in range(3)]
        lines = [f"{a:<{widths[0]}}  {b:<{widths[1]}}  {c:>{widths[2]}}".rstrip() for a, b, c in rows]
        return "\n".join([f"machine  {len(self.devices)} devices", *("  " + line for line in lines)])


def host_memory() -> int:
    """Bytes of memory of this machine, or of the container this process runs in.

    Raises PlanError where the system does not tell.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError) as error:
        raise PlanError("the system does not tell its memory: write the machine down as hf.Machine(...)") from error
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    return min(total, int(text)) if text.isdigit() else total


def _gib(size: int) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if size >= 1024**power:
            return f"{size / 1024**power:.1f}{unit}"
    return f"{size}B"


def _calibrated(device: torch.device, disk: Path) -> Rates:
    if device.type != "cpu" and device not in (present := accelerators()):
        raise PlanError(f"there is no device {device}: torch sees {', '.join(map(str, present)) or 'no accelerator'}")
    description = {**describe(device), "disk": str(disk.absolute())}
    path = cache_file("rates", description)
    kept = _read(path, description)
    if kept is None:
        kept = measure(device, disk)
        try:
            write_json(path, {"machine": description, "rates": asdict(kept)})
        except OSError as error:
            warnings.warn(
                f"cannot keep the rates of {device} in {path.parent}: {error.strerror}; they are measured anew in "
                "every process, unless XDG_CACHE_HOME names a folder that can be written",
                stacklevel=3,
            )
    return kept


def describe(device: torch.device) -> dict[str, str]:
    """What times measured on ``device`` depend on: it, the processor, the number of threads, torch."""
    return {
        "device": f"{device.type} {backend(device).name}".strip(),
        "processor": f"{platform.node()} {platform.machine()} {platform.processor()} x{os.cpu_count()}",
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def _read(path: Path, description: Mapping[str, str]) -> Rates | None:
    """The rates kept at ``path``; None if there are none that can be used."""
    try:
        kept = read_json(path)
        found = Rates(**{name: number(rate, *_PLAUSIBLE) for name, rate in kept["rates"].items()})
        return found if kept["machine"] == description else None
    except (FileNotFoundError, ValueError, LookupError, TypeError, AttributeError):
        return None
    except OSError as error:
        warnings.warn(f"the rates of the machine in {path} are measured anew: {error.strerror}", stacklevel=3)
        return None


def measure(device: torch.device, disk: Path) -> Rates:
    """The rates of ``device``, each the median of short runs; takes about a second. ``disk`` need not exist."""
    large = device.type != "cpu"
    n, count = (4096, 2**26) if large else (512, 2**24)
    # Not the user's random numbers: what a seed gives must not hang on whether there was something to measure.
    draw = torch.Generator(device).manual_seed(0)
    a, b = (torch.randn(n, n, device=device, generator=draw) for _ in range(2))
    x, y = torch.zeros(count, device=device), torch.zeros(count, device=device)
    host = torch.zeros(count, pin_memory=backend(device).pins)
    size = 4 * count
    seconds = partial(_seconds, device)
    write, read = _disk(disk, host[: 2**22])
    return Rates(
        flops=2 * n**3 / seconds(lambda: a @ b),
        memory=3 * size / seconds(lambda: torch.add(x, y, out=x)),
        load=size / seconds(lambda: x.copy_(host)),
        evict=size / seconds(lambda: host.copy_(x)),
        read=read,
        write=write,
        calls=_CALLS / seconds(partial(_call, torch.ones(4, device=device))),
    )


def _call(x: torch.Tensor) -> None:
    """`_CALLS` calls of small operators, half of them autograd's."""
    leaf = y = x.requires_grad_()
    for _ in range(_CALLS // 2):
        y = y * x
    torch.autograd.grad(y.sum(), leaf)


def _seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median seconds of ``run``, after a first run that warms up."""
    times = []
    for _ in range(_RUNS + 1):
        backend(device).wait()
        start = time.perf_counter()
        run()
        backend(device).wait()
        times.append(time.perf_counter() - start)
    return max(median(times[1:]), 1e-9)


def _disk(folder: Path, content: torch.Tensor) -> tuple[float, float]:
    """Bytes/s of writing to the disk of ``folder`` and of reading from it."""
    present = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    try:
        return _disk_rates(present, content.numpy().tobytes())
    except OSError as error:
        raise PlanError(
            f"cannot measure the disk by writing to {present}: {error.strerror}; name a folder that can be written as "
            "the machine's disk"
        ) from error


def _disk_rates(folder: Path, data: bytes) -> tuple[float, float]:
    writes, reads = [], []
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        for number in range(_RUNS):
            path = Path(scratch, str(number))
            start = time.perf_counter()
            with path.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            writes.append(time.perf_counter() - start)
            _forget(path)
            start = time.perf_counter()
            path.read_bytes()
            reads.append(time.perf_counter() - start)
            path.unlink()
    return len(data) / median(writes), len(data) / median(reads)


def _forget(path: Path) -> None:
    """Drop the file from the system's memory, where that can be asked for, so that reading it means the disk."""
    if hasattr(os, "posix_fadvise"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
