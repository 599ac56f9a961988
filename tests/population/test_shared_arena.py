"""Tensors in memory that forks share: values, layout and alignment of the originals."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from torch import Tensor

from hfusion.population.shared_arena import SharedArena, arena_bytes

WHOLE = torch.arange(96.0).view(8, 12)
TENSORS = {
    "contiguous": WHOLE,
    "columns": WHOLE[:, 3:7],
    "transposed": WHOLE.t(),
    "expanded": WHOLE[:1].expand(5, 12),
    "windows": WHOLE.view(-1).unfold(0, 8, 4),
    "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "number": torch.tensor(3.0, dtype=torch.float64),
    "empty": torch.empty(0, 4),
    "bytes": torch.arange(7, dtype=torch.uint8)[1:],
    "bfloat16": torch.randn(5).bfloat16()[3:],
}


@pytest.mark.parametrize("name", TENSORS)
def test_like(name: str) -> None:
    tensor = TENSORS[name]
    arena = SharedArena(3 * arena_bytes(tensor) + 1)
    for other in (arena.like(tensor), arena.like(tensor)):
        assert torch.equal(other, tensor)
        assert (other.dtype, other.stride()) == (tensor.dtype, tensor.stride())
        assert not tensor.numel() or other.data_ptr() % 64 == tensor.data_ptr() % 64


def test_tensors_do_not_overlap() -> None:
    arena = SharedArena(sum(map(arena_bytes, TENSORS.values())))
    copies = {name: arena.like(tensor) for name, tensor in TENSORS.items()}
    for name, tensor in copies.items():
        assert torch.equal(tensor, TENSORS[name])


def test_too_much_is_an_error() -> None:
    arena = SharedArena(arena_bytes(WHOLE))
    arena.like(WHOLE)
    with pytest.raises(MemoryError, match="do not fit"):
        arena.like(WHOLE)
    arena.clear()
    arena.like(WHOLE)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are forked on Linux only")
def test_a_fork_writes_into_it() -> None:
    tensor = SharedArena(4096).like(torch.zeros(3))
    child = os.fork()
    if not child:
        tensor.fill_(7.0)
        os._exit(0)
    os.waitpid(child, 0)
    expected: Tensor = torch.full((3,), 7.0)
    assert torch.equal(tensor, expected)
