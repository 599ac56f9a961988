"""Random numbers belong to the whole process: tasks in several threads take turns, or draw from their own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import RLock

import numpy as np
import torch
from torch import Tensor

from hfusion.device.backend import backend, current_device, random_states_kept
from hfusion.torch_private.seeding import seeding_locks, waiting_seeds_kept
from hfusion.torch_private.thread_draws import drawing_from

# torch's generators belong to the process and its devices: one thread at a time puts its task's state there.
_GENERATORS = RLock()


def _before_fork() -> None:
    """A process that is forked off while another thread draws, or seeds, would find their locks taken for ever."""
    for lock in (_GENERATORS, *seeding_locks()):
        lock.acquire()


def _after_fork() -> None:
    for lock in (*seeding_locks(), _GENERATORS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@dataclass
class Generators:
    """The state of a task's random numbers, on the CPU and on its device; begins as ``torch.manual_seed(seed)``."""

    seed: int
    states: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self, device: torch.device, *, advance: bool = True) -> Iterator[None]:
        """Let torch draw from here; without ``advance`` the next draws are the same again."""
        with _GENERATORS:
            asked = backend(device)
            before = asked.random_states()
            asked.set_random_states({kind: self._state(kind) for kind in before})
            try:
                yield
            finally:
                if advance:
                    self.states.update(asked.random_states())
                asked.set_random_states(before)

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Let this thread draw from here while other tasks draw, too: it may wait for as long as it likes.

        torch's generators of accelerators are taken for single draws.
        """
        own = torch.Generator()
        own.set_state(self._state("cpu"))

        @contextmanager
        def swapped() -> Iterator[None]:
            self.states["cpu"] = own.get_state()
            with self.active(device):
                yield
            own.set_state(self.states["cpu"])

        try:
            with drawing_from(own, swapped):
                yield
        finally:
            self.states["cpu"] = own.get_state()

    def copy(self) -> Generators:
        return Generators(self.seed, dict(self.states))

    def _state(self, kind: str) -> Tensor:
        if kind not in self.states:
            self.states[kind] = torch.Generator(kind).manual_seed(self.seed).get_state()
        return self.states[kind]


@contextmanager
def python_draws_kept() -> Iterator[None]:
    """Context manager: restore the random states of Python and numpy at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Context manager: let this thread draw and seed as if it were alone, and restore torch's random states at the end.

    The draws of other threads are not affected.
    """
    device, alone = current_device(), threading.active_count() == 1
    with random_states_kept() if alone or device.type != "cpu" else waiting_seeds_kept():
        if alone:
            yield
        else:
            with Generators(0, backend(device).random_states()).apart(device):
                yield
