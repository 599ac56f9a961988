"""The state of a shard at rest, in host memory or in a file, and its copy on a device: contiguous buffers.

A buffer has three sections: weights (parameters, buffers, constants), the optimizer's state, and gradients that outlive
a unit. A copy may hold any of them, each in a buffer of its own, so that its memory is free as soon as it has left.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor

from hfusion.core.errors import SpillError
from hfusion.runtime.copying import Move
from hfusion.schedule.actions import Section

# The alignment of torch's own allocations, so that kernels see the same alignment as in plain training.
_ALIGNMENT = 64


# Sections of a shard in host memory, in the order of its buffer.
STATE = (Section.WEIGHTS, Section.OPTIMIZER, Section.GRADIENTS)


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
        """The bytes of the tensor, rounded up to the alignment."""
        return -(-self.bytes // _ALIGNMENT) * _ALIGNMENT


@dataclass(frozen=True)
class BufferLayout:
    """The offsets of a shard's tensors. ``sizes``: the bytes of each section, in the order of `STATE`."""

    fields: tuple[Field, ...]
    sizes: tuple[int, ...]

    @staticmethod
    def of(tensors: Mapping[Section, Mapping[str, Tensor]]) -> BufferLayout:
        fields, sizes = [], dict.fromkeys(STATE, 0)
        for section in STATE:
            for name, tensor in tensors[section].items():
                field = Field(name, section, sizes[section], tensor.shape, tensor.dtype)
                fields.append(field)
                sizes[section] += field.room
        return BufferLayout(tuple(fields), tuple(sizes.values()))

    @cached_property
    def _neighbours(self) -> list[tuple[Section, list[Field]]]:
        """Runs of consecutive fields with the same section and dtype."""
        grouped = groupby(self.fields, key=lambda field: (field.section, field.dtype))
        return [(section, list(fields)) for (section, _), fields in grouped]

    def buffers(self, buffer: Tensor) -> dict[Section, Tensor]:
        """Split a buffer that holds all sections one after the other."""
        return dict(zip(STATE, buffer.split(self.sizes), strict=True))

    def views(self, buffers: Mapping[Section, Tensor]) -> dict[Section, dict[str, Tensor]]:
        """Return the tensors that lie in the buffers of sections, by section and name.

        For autograd they are unrelated tensors, not views of a buffer: otherwise an in-place write to one would count
        as a write to all.
        """
        tensors: dict[Section, dict[str, Tensor]] = {section: {} for section in buffers}
        for section, fields in self._neighbours:
            if section in buffers:
                start, size = fields[0].offset, fields[0].dtype.itemsize
                rooms = [field.room for field in fields]
                run = buffers[section][start : start + sum(rooms)].view(fields[0].dtype)
                for field, piece in zip(fields, run.unsafe_split_with_sizes([r // size for r in rooms]), strict=True):
                    unpadded = field.room == field.bytes
                    tensors[section][field.name] = (piece if unpadded else piece[: field.count]).view(field.shape)
        return tensors


class HostStore:
    """A shard in host memory or in a file. ``views``: its tensors by section and name."""

    def __init__(self, tensors: Mapping[Section, Mapping[str, Tensor]], *, pinned: bool, file: Path | None) -> None:
        self.layout = BufferLayout.of(tensors)
        size = sum(self.layout.sizes)
        buffer = (
            torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
            if file is None
            else _mapped(file, size)
        )
        self._buffers = self.layout.buffers(buffer)
        self.views = self.layout.views(self._buffers)
        for section in STATE:
            for name, tensor in tensors[section].items():
                self.views[section][name].copy_(tensor.detach())

    def load(self, sections: Collection[Section], device: torch.device) -> Copy:
        """Allocate ``sections`` on ``device``. The ``moves`` of the result must be made to fill them."""
        return Copy(self.layout, {section: self._buffers[section] for section in STATE if section in sections}, device)

    def save(self, copy: Copy, section: Section, names: Sequence[str]) -> list[Move]:
        """Return the moves that write tensors of ``copy`` back: a single one if they are the whole section."""
        if names and len(names) == len(self.views[section]):
            return [Move(self._buffers[section], copy.buffers[section])]
        return [Move(self.views[section][name], copy.views[section][name]) for name in names]


class Copy:
    """Some sections of a shard on a device, and their ``views``; ``moves`` fill them."""

    def __init__(self, layout: BufferLayout, host: Mapping[Section, Tensor], device: torch.device) -> None:
        self.device = device
        self.buffers = {s: torch.empty(len(source), dtype=torch.uint8, device=device) for s, source in host.items()}
        self.views = layout.views(self.buffers)
        self.moves = [Move(self.buffers[section], source) for section, source in host.items()]


def _mapped(file: Path, size: int) -> Tensor:
    """Return ``size`` bytes of a new safetensors file, memory-mapped: writing to the tensor writes to the file.

    All blocks are allocated immediately, so a disk that fills up later cannot break a mapping. Format:
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
