"""Random states per task. torch's generators belong to the process, so threads take turns or use their own."""

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

# Held by the thread that has put its task's states into torch's generators.
_GENERATORS = RLock()


def _before_fork() -> None:
    """Take the locks, since a fork while another thread holds them would leave them locked forever in the child."""
    for lock in (_GENERATORS, *seeding_locks()):
        lock.acquire()


def _after_fork() -> None:
    for lock in (*seeding_locks(), _GENERATORS):
        lock.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@dataclass
class Generators:
    """A task's random states, for the CPU and its device. Initially those of ``torch.manual_seed(seed)``."""

    seed: int
    states: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self, device: torch.device, *, advance: bool = True) -> Iterator[None]:
        """Context manager: torch draws from these states; without ``advance`` the states are not updated."""
        with _GENERATORS:
            device_backend = backend(device)
            states_before = device_backend.random_states()
            device_backend.set_random_states({kind: self._state(kind) for kind in states_before})
            try:
                yield
            finally:
                if advance:
                    self.states.update(device_backend.random_states())
                device_backend.set_random_states(states_before)

    @contextmanager
    def apart(self, device: torch.device) -> Iterator[None]:
        """Context manager: this thread draws from these states, without blocking draws of other threads meanwhile.

        Only single draws on an accelerator take turns with other tasks.
        """
        generator = torch.Generator()
        generator.set_state(self._state("cpu"))

        @contextmanager
        def swapped() -> Iterator[None]:
            self.states["cpu"] = generator.get_state()
            with self.active(device):
                yield
            generator.set_state(self.states["cpu"])

        try:
            with drawing_from(generator, swapped):
                yield
        finally:
            self.states["cpu"] = generator.get_state()

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
    """Context manager: this thread draws and seeds as usual, and torch's random states are restored at the end.

    Draws of other threads are not affected.
    """
    device, alone = current_device(), threading.active_count() == 1
    with random_states_kept() if alone or device.type != "cpu" else waiting_seeds_kept():
        if alone:
            yield
        else:
            with Generators(0, backend(device).random_states()).apart(device):
                yield
