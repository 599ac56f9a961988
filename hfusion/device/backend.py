"""What is asked of a device beyond operators: queues of work, pinned memory, random numbers, free memory, waiting.

The one place that asks. Every accelerator answers through `torch.accelerator`, `torch.Stream` and its own module of
torch, so that CUDA, ROCm, XPU and MPS are one path; the host does what it is asked for at once.
Source: https://docs.pytorch.org/docs/stable/accelerator.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

ACCELERATORS = ("cuda", "xpu", "mps")
"""The types of devices, besides the CPU, that tasks run on; ROCm's are called cuda."""


class Queue(Protocol):
    """Work that a device does in the order in which it is asked for, beside that of its other queues."""

    def run(self, job: Callable[[], None]) -> None:
        """Call ``job``; the operators that it calls belong to this queue. They may be done later."""

    def wait(self) -> None:
        """Until all of it is done."""


class Backend(Protocol):
    """One device. ``pins``: copies between it and pinned host memory go on beside the computing."""

    @property
    def pins(self) -> bool: ...

    @property
    def name(self) -> str:
        """Of the model of an accelerator; empty for the host."""

    def queue(self) -> Queue:
        """A queue of its own. Keep it: torch's allocator has a pool of memory for every queue."""

    def current(self) -> AbstractContextManager[Any]:
        """In which it is the device on which kernels are launched."""

    def wait(self) -> None:
        """Until all queues are empty."""

    def free_bytes(self) -> int:
        """Bytes of memory that nobody has taken. Not for the host, whose memory is not this process's."""

    def random_states(self) -> dict[str, Tensor]:
        """The states of the generators that operators there draw from, by type of device."""

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Put back what `random_states` gave."""


@dataclass(frozen=True)
class _Done:
    """The queue of a host: what it is asked for is done when it has been asked."""

    def run(self, job: Callable[[], None]) -> None:
        job()

    def wait(self) -> None:
        return


@dataclass(frozen=True)
class Host:
    """The processor that runs Python."""

    pins: bool = False
    name: str = ""

    def queue(self) -> Queue:
        return _Done()

    def current(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def wait(self) -> None:
        return

    def free_bytes(self) -> int:
        raise NotImplementedError("the memory of a host is not one process's to take")

    def random_states(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state()}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])


@dataclass(frozen=True)
class _Stream:
    stream: torch.Stream

    def run(self, job: Callable[[], None]) -> None:
        with self.stream:
            job()

    def wait(self) -> None:
        self.stream.synchronize()


@dataclass(frozen=True)
class Accelerator:
    """A device of its own memory, which works beside Python."""

    device: torch.device

    @property
    def pins(self) -> bool:
        # One memory for both on Apple's processors: nothing to pin.
        return self.device.type != "mps"

    @property
    def name(self) -> str:
        found = getattr(self._module, "get_device_name", None)
        return str(found(self.device)) if found is not None else self.device.type

    def queue(self) -> Queue:
        return _Stream(torch.Stream(self.device))

    def current(self) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(self.device.index)

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)

    def free_bytes(self) -> int:
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
        return int(self._module.mem_get_info(self.device)[0])

    def random_states(self) -> dict[str, Tensor]:
        return {"cpu": torch.get_rng_state(), self.device.type: self._module.get_rng_state(self.device)}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        torch.set_rng_state(states["cpu"])
        self._module.set_rng_state(states[self.device.type], self.device)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)


def backend(device: torch.device) -> Backend:
    """Whom to ask about ``device``."""
    return Host() if device.type == "cpu" else Accelerator(device)


def accelerators() -> list[torch.device]:
    """The accelerators of this machine on which tasks run."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type not in ACCELERATORS:
        return []
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Inside it, draws leave torch's random states, those of all devices, as they were."""
    devices = accelerators()
    kind = devices[0].type if devices else None
    with torch.random.fork_rng(devices=range(len(devices)), device_type=kind):
        yield
