"""Measure the speed of a device once, and cache it in the user's cache folder.

Rates are the best of some short runs, to exclude the load of other programs. The rates of computing, from which
lowerings are chosen (`compute_rates`), are in a separate file; the rates of moving bytes also depend on the disk.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median

import torch

from hfusion.core.claimed_folder import temporary_folder
from hfusion.core.errors import PlanError
from hfusion.device.backend import accelerators, backend
from hfusion.device.cache import cache_file, cache_folder, lasts, read_sealed, write_sealed
from hfusion.device.native import core_cache, cores, processor, processor_name
from hfusion.device.team import torch_threads

_HALF = ("bfloat16", "float16")
# Rates that arrays on the same device share when they compute at the same time.
_SHARED = ("flops", *_HALF, "memory")
_CALLS = 256
_RUNS = 9
_DISK_RUNS = 5
# Overhead of an action in calls of operators: with 3.3 us per call, a forward, a backward and a step of small models
# took 0.3, 0.12 and 0.08 ms more than their operators.
_ACTION_CALLS = 50
# On a busy machine, torch's threads together reach less than this fraction of the rate of one thread, down to a
# twentieth, as each waits for those without a core. Two threads that share a core reach about 1.
_DISTURBED = 0.8
# A product in half precision that takes longer than this multiple of one in float32 is timed by a part of it, once.
_SLOW = 8.0
_PARTS = 8


class BusyMachine(Exception):
    """The machine cannot be measured, because other programs are running."""


@dataclass(frozen=True)
class ComputeRates:
    """The speed at which a device of type ``device`` computes.

    Attributes:
        flops: matrix products in float32, FLOP/s.
        memory: bytes/s that elementwise operators read and write.
        calls: calls of tiny operators per second, from Python and by autograd.
        bfloat16, float16: matrix products in these dtypes, FLOP/s; None for the rate of float32.
    """

    flops: float
    memory: float
    calls: float
    bfloat16: float | None = field(default=None, kw_only=True)
    float16: float | None = field(default=None, kw_only=True)
    device: str = field(default="cpu", kw_only=True)

    def flops_of(self, dtype: torch.dtype) -> float:
        """Return the rate of matrix products of ``dtype``, FLOP/s."""
        half = {torch.bfloat16: self.bfloat16, torch.float16: self.float16}.get(dtype)
        return self.flops if half is None else half

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if name == "device" or (value is None and name in _HALF):
                continue
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise PlanError(f"rate {name} is {value!r}: it must be a positive number")


@dataclass(frozen=True)
class Rates(ComputeRates):
    """The speed of a device.

    In bytes/s: ``load``: copies from host to device; ``evict``: copies back; ``read`` and ``write``: the disk.
    """

    load: float
    evict: float
    read: float
    write: float

    @property
    def action_seconds(self) -> float:
        """The overhead of one action of a task (a forward, a backward, a step), in seconds."""
        return _ACTION_CALLS / self.calls

    def shared(self, names: int, devices: int) -> Rates:
        """Return the rates if ``names`` entries of a machine for this device, of ``devices`` in all, compute together.

        All share one Python interpreter. A CPU may have free cores for several; an accelerator is shared.
        """
        room = cores() / torch.get_num_threads() if self.device == "cpu" else 1.0
        share = min(1.0, room / names)
        rates = {name: value * share for name, value in asdict(self).items() if name in _SHARED and value is not None}
        return replace(self, **rates, calls=self.calls / devices)


# Rates used without measurements: one core of an Intel Xeon with AVX-512 (2.1 GHz), on which the efficiencies of
# lowerings were fitted. For accelerators, the data sheet of an NVIDIA A100, with TF32 switched off, and 30 us for an
# operator and its backward.
_STANDARD = {"cpu": ComputeRates(150e9, 16e9, 4 / 15e-6)}
_ACCELERATOR = ComputeRates(19.5e12, 1.5e12, 4 / 30e-6, bfloat16=312e12, float16=312e12)


def standard_rates(device: torch.device) -> ComputeRates:
    """Return fixed rates, which are the same on all machines."""
    return replace(_STANDARD.get(device.type, _ACCELERATOR), device=device.type)


def compute_rates(device: torch.device) -> ComputeRates:
    """Return the rates from which lowerings are chosen: those of this machine, measured once in about 0.2 s.

    So that all processes of a machine use the same rates, `standard_rates` are used if
    measurements cannot be cached, if this machine has no such device, and with HFUSION_RATES=standard in the
    environment. They are also used if the machine is too busy to be measured; the next process tries again.
    """
    if _by_standard() or not is_present(device) or not lasts():
        return standard_rates(device)
    path = cache_file("compute", describe(device))
    if path not in _chosen:
        rates, trouble = _computing(device)
        _chosen[path] = standard_rates(device) if trouble else rates
    return _chosen[path]


# Rates by cache file, constant within a process.
_chosen: dict[Path, ComputeRates] = {}


def _by_standard() -> bool:
    return os.environ.get("HFUSION_RATES") == "standard"


def is_present(device: torch.device) -> bool:
    """Return whether this machine has the device."""
    return device.type == "cpu" or torch.device(device.type, device.index or 0) in accelerators()


def calibrate(device: torch.device, disk: Path) -> Rates:
    """Return all rates of ``device``, measuring the disk of the folder ``disk``. Warns if they cannot be cached.

    Raises PlanError if this machine has no such device, or if the folder cannot be written to.
    """
    if not is_present(device):
        present = ", ".join(map(str, accelerators())) or "no accelerator"
        raise PlanError(f"there is no device {device}: torch sees {present}")
    computing, trouble = (standard_rates(device), "") if _by_standard() else _computing(device)
    description = {**describe(device), "disk": str(disk.absolute())}
    moving, moving_trouble = _cached_rates("moving", description, partial(_measure_moving, device, disk))
    if trouble or moving_trouble:
        warnings.warn(f"the rates of {device} are not kept: {trouble or moving_trouble}", stacklevel=3)
    return Rates(**{**asdict(computing), **moving})


def _computing(device: torch.device) -> tuple[ComputeRates, str]:
    """Return the rates of computing, and the reason if they are not cached."""
    try:
        measured, trouble = _cached_rates("compute", describe(device), partial(_measure_computing, device))
    except BusyMachine as error:
        return standard_rates(device), str(error)
    return ComputeRates(**measured, device=device.type), trouble


def describe(device: torch.device) -> dict[str, str]:
    """Return the properties that identify times measured on ``device``: it, the processor, threads, torch.

    The host name is left out: an image may give one name to different machines, and each container has its own.
    """
    return {
        "device": f"{device.type} {backend(device).name}".strip(),
        "processor": f"{processor_name()}, {cores()} cores with {core_cache() >> 10} KiB each",
        # Generations of a processor may share a name.
        "instructions": hashlib.sha256(processor().encode()).hexdigest()[:16],
        "threads": str(torch.get_num_threads()),
        "torch": torch.__version__,
    }


def _cached_rates(
    kind: str, description: Mapping[str, str], measure: Callable[[], dict[str, float]]
) -> tuple[dict[str, float], str]:
    """Read rates from a file, or measure and write them; also returns why they could not be written.

    Raises what ``measure`` does.
    """
    path = cache_file(kind, description)
    if (kept := _read(path)) is not None:
        return kept, ""
    rates = measure()
    # Another process may have measured at the same time: all use the rates that were stored first.
    if (kept := _read(path)) is not None:
        return kept, ""
    try:
        write_sealed(path, json.dumps(rates).encode())
    except OSError as error:
        return rates, (
            f"{cache_folder()}: {error.strerror}; they are measured in every process, unless XDG_CACHE_HOME names "
            "a folder that can be written"
        )
    return rates, ""


def _read(path: Path) -> dict[str, float] | None:
    """Return the rates stored at ``path``; None if there are no usable ones."""
    try:
        rates: dict[str, float] = json.loads(read_sealed(path))
        return rates
    except FileNotFoundError:
        return None
    except OSError as error:
        warnings.warn(f"the rates of the machine in {path} are measured again: {error.strerror}", stacklevel=4)
        return None


def _measure_computing(device: torch.device) -> dict[str, float]:
    """Measure the rates of products, memory and calls. Raises BusyMachine."""
    large = device.type != "cpu"
    n, count = (4096, 2**26) if large else (384, 2**24)
    seconds = partial(_seconds, device)
    with _plainly(device):
        # A separate generator: the user's random numbers must not depend on whether rates were measured.
        draw = torch.Generator(device).manual_seed(0)
        a, b = (torch.randn(n, n, device=device, dtype=torch.float32, generator=draw) for _ in range(2))
        x, y = (torch.zeros(count, device=device, dtype=torch.float32) for _ in range(2))
        operand = torch.ones(4, device=device, dtype=torch.float32)
        product = seconds(lambda: a @ b)
        threads = torch.get_num_threads()
        if not large and threads > 1:
            with torch_threads(1):
                alone = seconds(lambda: a @ b)
            if alone < _DISTURBED * product:
                raise BusyMachine(
                    f"other programs are at work, and {threads} threads multiply matrices {product / alone:.1f} times "
                    "as slowly as one; until a process finds the machine idle, the rates of a reference machine hold"
                )
        return {
            "flops": 2 * n**3 / product,
            **{name: 2 * n**3 / _half_seconds(device, a, b, name, product) for name in _HALF},
            "memory": 12 * count / seconds(lambda: torch.add(x, y, out=x)),
            "calls": _CALLS / seconds(partial(_call, operand)),
        }


def _half_seconds(device: torch.device, a: torch.Tensor, b: torch.Tensor, name: str, product: float) -> float:
    """Return the seconds of a product in the dtype ``name``; ``product`` if the device does not support the dtype."""
    try:
        x, y = (tensor.to(getattr(torch, name)) for tensor in (a, b))
        # Processors without instructions for the dtype take up to a hundred times as long: a part is enough.
        part = x[: len(x) // _PARTS]
        first = _PARTS * _seconds(device, lambda: part @ y, runs=1)
    except (RuntimeError, TypeError):
        return product
    return first if first > _SLOW * product else _seconds(device, lambda: x @ y)


def _measure_moving(device: torch.device, disk: Path) -> dict[str, float]:
    """Measure copies to and from the device and the disk. The folder ``disk`` need not exist."""
    count = 2**26 if device.type != "cpu" else 2**24
    seconds = partial(_seconds, device)
    with _plainly(device):
        device_tensor = torch.zeros(count, device=device, dtype=torch.float32)
        host = torch.zeros(count, dtype=torch.float32, device="cpu", pin_memory=backend(device).pins)
        write, read = _disk(disk, host[: 2**22])
        return {
            "load": 4 * count / seconds(lambda: device_tensor.copy_(host)),
            "evict": 4 * count / seconds(lambda: host.copy_(device_tensor)),
            "read": read,
            "write": write,
        }


@contextmanager
def _plainly(device: torch.device) -> Iterator[None]:
    """Context manager: enable grad mode, and disable inference mode and autocast."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast(device.type, enabled=False):
        yield


def _call(x: torch.Tensor) -> None:
    """Run `_CALLS` small operators, half of them in a backward pass."""
    leaf = y = x.detach().requires_grad_()
    for _ in range(_CALLS // 2):
        y = y * x
    torch.autograd.grad(y.sum(), leaf)


def _seconds(device: torch.device, run: Callable[[], object], runs: int = _RUNS) -> float:
    """Return the minimum time of some runs in seconds, after one that warms up."""
    times = [backend(device).seconds(run) for _ in range(runs + 1)]
    return max(min(times[1:]), 1e-9)


def _disk(folder: Path, content: torch.Tensor) -> tuple[float, float]:
    """Return bytes/s of writing to the disk of ``folder``, and of reading from it."""
    present = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    data, writes, reads = content.numpy().tobytes(), [], []
    try:
        with temporary_folder(present) as scratch:
            for number in range(_DISK_RUNS):
                path = scratch / str(number)
                start = time.perf_counter()
                with path.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                writes.append(time.perf_counter() - start)
                # Drop the file from the system's page cache, where possible, so that reading it reads the disk.
                with path.open("rb") as file:
                    if hasattr(os, "posix_fadvise"):
                        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                start = time.perf_counter()
                path.read_bytes()
                reads.append(time.perf_counter() - start)
                path.unlink()
    except OSError as error:
        raise PlanError(
            f"cannot measure the disk by writing to {present}: {error.strerror}; name a folder that can be written as "
            "the machine's disk"
        ) from error
    return len(data) / median(writes), len(data) / median(reads)
