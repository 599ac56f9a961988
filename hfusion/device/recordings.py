"""Work recorded on a device for replay, and the numbers of the host that it reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hfusion.device.backend import backend

# The most kinds that are recorded, since each recording keeps its memory.
MAX_RECORDED = 4
# How often tensors may move before recording is given up.
MAX_MOVES = 3

Recorded = TypeVar("Recorded")


class Recordings(Generic[Recorded]):
    """Recordings by kind of work. ``why``: the reason why nothing more is recorded; empty if recording is enabled."""

    def __init__(self, why: str = "") -> None:
        self.why = why
        self._recordings: dict[Hashable, Recorded] = {}
        self._moves = 0

    def __len__(self) -> int:
        return len(self._recordings)

    @property
    def full(self) -> bool:
        return len(self._recordings) == MAX_RECORDED

    def get(self, kind: Hashable) -> Recorded | None:
        """Return the recording of a kind, None if there is none."""
        return self._recordings.get(kind)

    def add(self, kind: Hashable, record: Callable[[], Recorded]) -> Recorded | None:
        """Keep the result of ``record``. If it raises, return None and give up recording."""
        try:
            recording = self._recordings[kind] = record()
        except Exception as error:
            first, _, _ = str(error).strip().partition("\n")
            self.why = f"{type(error).__name__}: {first[:300]}"
            self._recordings.clear()
            return None
        return recording

    def forget(self) -> None:
        """Drop all recordings, because the tensors have moved."""
        if not self._recordings:
            return
        self._recordings.clear()
        self._moves += 1
        if self._moves == MAX_MOVES:
            self.why = f"its tensors have moved {MAX_MOVES} times"


# Numbers that the host knows and a device computes with.


class DeviceNumbers:
    """A copy of host numbers on ``device`` in ``dtype``, in the same memory as long as their shape stays the same.

    Recorded launches therefore read the latest numbers at each replay.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._device_copy: Tensor | None = None
        # The numbers last passed to `write_changed`. A caller whose kernel updates the device copy updates these, too.
        self.host_copy: Tensor | None = None

    def write_changed(self, numbers: Tensor) -> Tensor:
        """Copy ``numbers`` to the device if they differ from `host_copy`; return the device tensor."""
        previous, self.host_copy = self.host_copy, numbers
        device_copy = self._device_copy
        # Compare bits, because -0.0 == 0.0.
        if device_copy is not None and previous is not None and _same_bits(previous, numbers):
            return device_copy
        return self.write(numbers)

    def write(self, numbers: Tensor) -> Tensor:
        """Copy ``numbers`` to the device unconditionally; return the device tensor."""
        device_copy = self._device_copy
        if device_copy is None or device_copy.shape != numbers.shape:
            device_copy = self._device_copy = torch.empty(numbers.shape, dtype=self._dtype, device=self._device)
        if not device_copy.is_cpu:
            numbers = _pinned(numbers.to(self._dtype), self._device)
        return device_copy.copy_(numbers, non_blocking=True)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return ``numbers`` on ``device``; a copy from the host does not block Python."""
    return _pinned(numbers, device).to(device, non_blocking=True) if numbers.is_cpu else numbers.to(device)


def _same_bits(first: Tensor, second: Tensor) -> bool:
    return first.shape == second.shape and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def _pinned(numbers: Tensor, device: torch.device) -> Tensor:
    # torch does not reuse pinned memory before the copies from it are done.
    return numbers.pin_memory() if backend(device).pins else numbers
