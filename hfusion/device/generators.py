"""Random states per task. torch's generators belong to the process, so threads take turns."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from hfusion.core.exclusive import tracing
from hfusion.device.backend import backend, random_states_kept
from hfusion.torch_private.seeding import seeding_locks


def _before_fork() -> None:
    """Take the locks, since a fork while another thread holds them would leave them locked forever in the child."""
    for lock in (tracing, *seeding_locks()):
        lock.__enter__()


def _after_fork() -> None:
    for lock in (*seeding_locks(), tracing):
        lock.__exit__(None, None, None)


def _after_fork_in_child() -> None:
    tracing.forget_waiting()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)


@dataclass
class Generators:
    """A task's random states, for the CPU and its device. Initially those of ``torch.manual_seed(seed)``."""

    seed: int
    states: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self, device: torch.device, *, advance: bool = True) -> Iterator[None]:
        """Context manager: torch draws from these states; without ``advance`` the states are not updated.

        Other tasks wait for their turn.
        """
        with tracing:
            device_backend = backend(device)
            states_before = device_backend.random_states()
            device_backend.set_random_states({kind: self._state(kind) for kind in states_before})
            try:
                yield
            finally:
                # A thread that hung may have lost its turn.
                if tracing.owned:
                    if advance:
                        self.states.update(device_backend.random_states())
                    device_backend.set_random_states(states_before)

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
    """Context manager: restore torch's random states at the end. Other threads draw from the same states meanwhile."""
    with tracing, random_states_kept():
        yield
