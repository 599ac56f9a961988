"""The state of a shard at rest, in host memory or in a file, and its copy on a device: contiguous buffers.

A buffer has three sections, of which a copy may hold any: weights (parameters, buffers, constants), the optimizer's
state, and gradients that outlive a unit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.errors import SpillError

# As torch aligns its own allocations: kernels must not see another alignment than in plain training.
_ALIGNMENT = 64


class Section(IntEnum):
    """A part of a shard's buffer."""

    WEIGHTS = 0
    OPTIMIZER = 1
    GRADIENTS = 2


@dataclass(frozen=True)
class Field:
    """A tensor in a section, ``offset`` bytes from the section's start."""

    name: str
    section: Section
    offset: int
    shape: torch.Size
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def of(self, buffer: Tensor, start: int) -> Tensor:
        """The tensor in a buffer of bytes whose section begins at ``start``.

        It is no view for autograd, which would take a write to one tensor of the buffer for a write to all.
        """
        offset = (buffer.storage_offset() + start + self.offset) // self.dtype.itemsize
        found: Any = torch.empty(0, dtype=self.dtype, device=buffer.device)
        result: Tensor = found.set_(buffer.untyped_storage(), offset, self.shape)
        return result


@dataclass(frozen=True)
class Layout:
    """Where the tensors of a shard lie; ``sizes`` are the bytes of the sections."""

    fields: tuple[Field, ...]
    sizes: tuple[int, int, int]

    @staticmethod
    def of(tensors: Mapping[Section, Mapping[str, Tensor]]) -> Layout:
        fields, sizes = [], [0, 0, 0]
        for section in Section:
            for name, tensor in tensors[section].items():
                field = Field(name, section, sizes[section], tensor.shape, tensor.dtype)
                fields.append(field)
                sizes[section] += -(-field.bytes // _ALIGNMENT) * _ALIGNMENT
        return Layout(tuple(fields), (sizes[0], sizes[1], sizes[2]))

    def views(self, buffer: Tensor, sections: Sequence[Section]) -> dict[Section, dict[str, Tensor]]:
        """The tensors by name in a buffer that holds ``sections`` one after the other."""
        starts, start = {}, 0
        for section in sections:
            starts[section] = start
            start += self.sizes[section]
        found: dict[Section, dict[str, Tensor]] = {section: {} for section in sections}
        for field in self.fields:
            if field.section in starts:
                found[field.section][field.name] = field.of(buffer, starts[field.section])
        return found


class Home:
    """A shard at rest. ``views`` are the tensors by section and name."""

    def __init__(self, tensors: Mapping[Section, Mapping[str, Tensor]], *, pinned: bool, file: Path | None) -> None:
        self.layout = Layout.of(tensors)
        size = sum(self.layout.sizes)
        self._buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned) if file is None else _mapped(file, size)
        self.views = self.layout.views(self._buffer, tuple(Section))
        for section in Section:
            for name, tensor in tensors[section].items():
                self.views[section][name].copy_(tensor.detach())

    @property
    def bytes(self) -> int:
        return self._buffer.numel()

    def load(self, sections: Sequence[Section], device: torch.device) -> Copy:
        """A copy of ``sections`` on ``device``: one transfer for each run of neighbouring sections."""
        buffer = torch.empty(sum(self.layout.sizes[s] for s in sections), dtype=torch.uint8, device=device)
        starts, start = {}, 0
        for first, last in _runs(sections):
            begin, end = self._start(first), self._start(last) + self.layout.sizes[last]
            buffer[start : start + end - begin].copy_(self._buffer[begin:end], non_blocking=True)
            for section in Section:
                if first <= section <= last:
                    starts[section] = start + self._start(section) - begin
            start += end - begin
        return Copy(buffer, starts, self.layout.views(buffer, sections))

    def save(self, copy: Copy, section: Section, names: Sequence[str]) -> None:
        """Write tensors of ``copy`` back; in one transfer, if it is the whole section."""
        if len(names) == len(self.views[section]):
            begin, start, size = self._start(section), copy.starts[section], self.layout.sizes[section]
            self._buffer[begin : begin + size].copy_(copy.buffer[start : start + size])
            return
        for name in names:
            self.views[section][name].copy_(copy.views[section][name])

    def _start(self, section: Section) -> int:
        return sum(self.layout.sizes[:section])


@dataclass(frozen=True)
class Copy:
    """Sections of a shard on a device, in one buffer from ``starts`` on."""

    buffer: Tensor
    starts: Mapping[Section, int]
    views: Mapping[Section, Mapping[str, Tensor]]


def _runs(sections: Sequence[Section]) -> list[tuple[Section, Section]]:
    runs: list[tuple[Section, Section]] = []
    for section in sections:
        if runs and section == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], section)
        else:
            runs.append((section, section))
    return runs


def _mapped(file: Path, size: int) -> Tensor:
    """``size`` bytes of a new safetensors file, memory-mapped: writing to the tensor writes to the file.

    All blocks are taken at once: a disk that fills up later cannot break a mapping. Format:
    https://github.com/safetensors/safetensors#format
    """
    header = json.dumps({"shard": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    start = 8 + len(header)
    try:
        with file.open("wb") as target:
            target.write(len(header).to_bytes(8, "little") + header)
            target.flush()
            _reserve(target.fileno(), start + size)
    except OSError as error:
        raise SpillError(
            f"cannot spill {size:,} bytes to {file}: {error.strerror}; free space there, name another folder as the "
            "machine's disk, or give the machine more host memory"
        ) from error
    try:
        return torch.from_file(str(file), shared=True, size=start + size, dtype=torch.uint8)[start:]
    except RuntimeError as error:
        raise SpillError(f"the spill file {file} is gone or cannot be mapped: {error}") from error


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        block = bytes(1 << 20)
        written = os.fstat(descriptor).st_size
        while written < size:
            written += os.write(descriptor, block[: size - written])
