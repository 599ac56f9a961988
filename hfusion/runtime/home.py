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
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from hfusion.errors import SpillError
from hfusion.runtime.copying import Move

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

    @cached_property
    def count(self) -> int:
        return self.shape.numel()

    @cached_property
    def bytes(self) -> int:
        return self.count * self.dtype.itemsize

    @cached_property
    def room(self) -> int:
        """Its bytes, and those up to where the next one may begin."""
        return -(-self.bytes // _ALIGNMENT) * _ALIGNMENT


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
                sizes[section] += field.room
        return Layout(tuple(fields), (sizes[0], sizes[1], sizes[2]))

    @cached_property
    def _runs(self) -> list[tuple[Section, list[Field]]]:
        """Neighbours of one section and dtype."""
        grouped = groupby(self.fields, key=lambda field: (field.section, field.dtype))
        return [(section, list(fields)) for (section, _), fields in grouped]

    def views(self, buffer: Tensor, sections: Sequence[Section]) -> dict[Section, dict[str, Tensor]]:
        """The tensors by name in a buffer that holds ``sections`` one after the other.

        They are no views of one another for autograd, which would take a write to one for a write to all.
        """
        starts, start = {}, 0
        for section in sections:
            starts[section] = start
            start += self.sizes[section]
        found: dict[Section, dict[str, Tensor]] = {section: {} for section in sections}
        for section, fields in self._runs:
            if section in starts:
                begin = starts[section] + fields[0].offset
                size = fields[0].dtype.itemsize
                rooms = [field.room for field in fields]
                run = buffer[begin : begin + sum(rooms)].view(fields[0].dtype)
                for field, piece in zip(fields, run.unsafe_split_with_sizes([r // size for r in rooms]), strict=True):
                    whole = field.room == field.bytes
                    found[section][field.name] = (piece if whole else piece[: field.count]).view(field.shape)
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

    def load(self, sections: Sequence[Section], device: torch.device) -> tuple[Copy, list[Move]]:
        """A copy of ``sections`` on ``device``, and what must be copied: a piece for each run of neighbours."""
        sizes = self.layout.sizes
        buffer = torch.empty(sum(sizes[section] for section in sections), dtype=torch.uint8, device=device)
        starts, start = {}, 0
        moves: list[Move] = []
        for first, last in _runs(sections):
            begin, end = self._start(first), self._start(last) + sizes[last]
            moves.append((buffer[start : start + end - begin], self._buffer[begin:end]))
            for section in Section:
                if first <= section <= last:
                    starts[section] = start + self._start(section) - begin
            start += end - begin
        return Copy(buffer, starts, self.layout.views(buffer, sections)), moves

    def save(self, copy: Copy, section: Section, names: Sequence[str]) -> list[Move]:
        """What must be copied to write tensors of ``copy`` back: one piece, if it is the whole section."""
        if len(names) == len(self.views[section]):
            begin, start, size = self._start(section), copy.starts[section], self.layout.sizes[section]
            return [(self._buffer[begin : begin + size], copy.buffer[start : start + size])]
        return [(self.views[section][name], copy.views[section][name]) for name in names]

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
