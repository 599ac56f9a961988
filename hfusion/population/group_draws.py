"""Random numbers of a step of a population of several groups: what a group draws depends on no other group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from hfusion.device.backend import backend

_WORD = (1 << 63) - 1


def seeded(device: str, number: int, key: int) -> Tensor:
    """Return the generator state with which group ``key`` begins the step that drew ``number``."""
    seed = (number * 0x5851F42D4C957F2D + key) & _WORD
    return torch.Generator(device).manual_seed(seed).get_state()


class GroupDraws:
    """Seeds the generators of torch for each group of a step, from one number that the step draws.

    A step in which no group draws leaves the generators as they were before it.

    Attributes:
        number: the random number that the step drew.
        has_drawn: whether a group has drawn random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = backend(device)
        self._previous_states: dict[str, Tensor] = self._backend.random_states()
        self.number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._drawn = torch.get_rng_state()
        self.has_drawn = False

    @contextmanager
    def of_group(self, key: int) -> Iterator[None]:
        """Context manager: torch's random numbers depend only on the step and ``key``."""
        states = {kind: seeded(kind, self.number, key) for kind in self._previous_states}
        self._backend.set_random_states(states)
        try:
            yield
        finally:
            after = self._backend.random_states()
            # torch.equal compares states byte by byte, which takes four times as long.
            self.has_drawn |= any(
                after[kind].numpy().tobytes() != state.numpy().tobytes() for kind, state in states.items()
            )

    def __enter__(self) -> GroupDraws:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the generators; if a group has drawn, the CPU's stays advanced by the draw of ``number``."""
        self._backend.set_random_states(
            {**self._previous_states, "cpu": self._drawn} if self.has_drawn else self._previous_states
        )
