"""Streams of devices, each lent to one owner at a time and used again afterwards."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch


class StreamUse(Enum):
    """The purpose of a stream. Streams for copies need no workspaces of libraries."""

    COMPUTE = auto()
    COPY = auto()
    RECORD = auto()


@dataclass(frozen=True)
class LentStream:
    """A stream, and the function that gives it back."""

    stream: torch.Stream
    give_back: Callable[[], object]


_idle: defaultdict[tuple[torch.device, StreamUse], list[torch.Stream]] = defaultdict(list)


def lend_stream(device: torch.device, owner: object, use: StreamUse) -> LentStream:
    """Lend a stream of ``device`` until it is given back, or ``owner`` is no longer alive.

    A stream costs memory for as long as the process lives: cuBLAS keeps a workspace for each in which it has computed,
    32 MiB on an H100, and torch gives memory that was freed on a stream to that stream only.
    """
    idle = _idle[device, use]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.Stream(device)
    # Work that is still queued runs before work of the next owner, as always on a stream.
    give_back = weakref.finalize(owner, idle.append, stream)
    give_back.atexit = False
    return LentStream(stream, give_back)
