"""Graphs of work that a device repeats by one call (CUDA graphs), and the memory that several of them share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol, TypeVar
from weakref import WeakSet

import torch

T = TypeVar("T")


class GraphPool:
    """The memory pool that the graphs of a recorder share.

    torch frees a pool with the last graph that uses it, and fails an internal assertion if a later graph requests it.
    So the pool is that of a live graph; if there is none, torch creates a new one.
    """

    def __init__(self) -> None:
        self._graphs: WeakSet[PooledGraph] = WeakSet()

    def handle(self) -> Any:
        """Return torch's handle of the pool, None for a new one."""
        graph = next(iter(self._graphs), None)
        return None if graph is None else graph.pool()

    def add(self, graph: PooledGraph) -> None:
        """Let later graphs share the pool of ``graph`` as long as it is alive."""
        self._graphs.add(graph)


class PooledGraph(Protocol):
    """A graph that was recorded in a pool of memory."""

    def pool(self) -> Any:
        """Return torch's handle of that pool."""


class DeviceGraph:
    """A graph of ``device`` with memory from ``pool``. Raises RuntimeError if torch cannot record graphs there.

    CUDA and ROCm use `torch.cuda.CUDAGraph`. Other devices use `torch.accelerator.Graph`, which exists since torch 2.13
    and refuses CUDA and ROCm as of 2.14.
    """

    def __init__(self, device: torch.device, pool: Any) -> None:
        # With thread_local, other threads, such as those that load data, may keep using the device.
        options = {"pool": pool, "capture_error_mode": "thread_local"}
        if device.type == "cuda":
            self.graph: Any = torch.cuda.CUDAGraph()
            self._start_capture: Callable[[], None] = partial(self.graph.capture_begin, **options)
        elif hasattr(torch.accelerator, "Graph"):
            self.graph = torch.accelerator.Graph(**options)
            self._start_capture = self.graph.capture_begin
        else:
            raise RuntimeError("there is no torch.accelerator.Graph")

    def pool(self) -> Any:
        return self.graph.pool()

    def capture(self, work: Callable[[], T]) -> T:
        self._start_capture()
        try:
            result = work()
        except BaseException:
            # Errors of ending the capture would hide the original one.
            with suppress(Exception):
                self.graph.capture_end()
            raise
        self.graph.capture_end()
        return result


@contextmanager
def generators_kept(device: torch.device) -> Iterator[None]:
    """Context manager: on errors, give the device's generator a new state; a failed capture spoils the old one."""
    generators = getattr(torch.get_device_module(device), "default_generators", ())
    saved_states = [(generator, generator.clone_state()) for generator in generators[device.index : device.index + 1]]
    try:
        yield
    except BaseException:
        for generator, state in saved_states:
            generator.graphsafe_set_state(state)
        raise
