"""Memory that this process shares with its forks, and tensors in it."""

from __future__ import annotations

import mmap

import torch
from torch import Tensor

# Kernels may take other paths, and round differently, if a tensor begins at another offset in a cache line.
_LINE = 64


def arena_bytes(tensor: Tensor) -> int:
    """Return the maximum number of bytes of an arena that a tensor takes."""
    return _extent(tensor) * tensor.itemsize + 2 * _LINE


class SharedArena:
    """``size`` bytes of shared memory, allocated in order. They are freed with the last tensor in them."""

    def __init__(self, size: int) -> None:
        self.size = max(size, _LINE)
        self._memory = mmap.mmap(-1, self.size)
        self._first = torch.frombuffer(self._memory, dtype=torch.uint8, count=1).data_ptr()
        self._used_bytes = 0

    def clear(self) -> None:
        """Allocate from the beginning again."""
        self._used_bytes = 0

    def allocate(self, tensor: Tensor) -> int:
        """Allocate room for a tensor like ``tensor``, aligned like it, and return its offset. Raises MemoryError."""
        start = -(-(self._first + self._used_bytes) // _LINE) * _LINE + tensor.data_ptr() % _LINE - self._first
        self._used_bytes = start + _extent(tensor) * tensor.itemsize
        if self._used_bytes > self.size:
            raise MemoryError(f"{self._used_bytes} bytes do not fit into {self.size}")
        return start

    def at(self, start: int, dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...]) -> Tensor:
        """Return a tensor on the memory at offset ``start``, with a separate storage."""
        count = _count(shape, stride)
        if not count:
            return torch.empty_strided(shape, stride, dtype=dtype, device="cpu")
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=start).as_strided(shape, stride)

    def put(self, tensor: Tensor) -> int:
        """Copy ``tensor`` to newly allocated room, and return its offset. Raises MemoryError."""
        start, count = self.allocate(tensor), _extent(tensor)
        if count:
            # Copy memory rather than elements: those of an expanded tensor share memory.
            self.at(start, tensor.dtype, (count,), (1,)).copy_(tensor.detach().as_strided((count,), (1,)))
        return start

    def like(self, tensor: Tensor) -> Tensor:
        """Return a copy of ``tensor`` in the arena, with its strides. Raises MemoryError."""
        return self.at(self.put(tensor), tensor.dtype, tuple(tensor.shape), tensor.stride())


def _extent(tensor: Tensor) -> int:
    return _count(tuple(tensor.shape), tensor.stride())


def _count(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return how many elements of memory a tensor reaches over."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
