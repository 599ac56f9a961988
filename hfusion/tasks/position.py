"""The position in a loader, and how another process continues from it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hfusion.tasks.reading import generators, reading


@dataclass(frozen=True)
class Position:
    """A position in a loader.

    Attributes:
        epoch: the epoch that is being read.
        given: how many of its minibatches were read.
        random: torch's random state at the start of the epoch; None if nothing was read.
        begun: the states of the loader's generators at the start of the epoch.
        own: the current states of the loader's generators.
        state: the ``state_dict`` of the loader, if it has one.
    """

    epoch: int
    given: int
    random: Tensor | None
    begun: list[Tensor]
    own: list[Tensor]
    state: Any

    @staticmethod
    def unread(loader: Any) -> Position:
        """Return the position before the first epoch. The loader's generators may already be seeded."""
        states = [generator.get_state() for generator in generators(loader)]
        return Position(0, 0, None, states, states, None)

    @staticmethod
    def at_epoch_start(epoch: int, loader: Iterable[Any]) -> Position:
        """Return the position at the start of an epoch."""
        states = [generator.get_state() for generator in generators(loader)]
        return Position(epoch, 0, torch.get_rng_state(), states, states, None)

    def at(self, count: int, loader: Any) -> Position:
        """Return the position after ``count`` minibatches of this epoch."""
        state = loader.state_dict() if _has_state_dict(loader) else None
        return replace(self, given=count, own=[generator.get_state() for generator in generators(loader)], state=state)

    def restore(self, loader: Any) -> None:
        """Set the loader's generators to their states at this position."""
        for generator, state in zip(generators(loader), self.own, strict=True):
            generator.set_state(state)


def _has_state_dict(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


@contextmanager
def rereading(loader: Any, position: Position) -> Iterator[Iterator[Any]]:
    """Context manager: iterate over the loader from ``position``.

    A loader with a ``load_state_dict`` gets its state; any other is read up to the position with the random state of
    the start of the epoch. Torch's random state is restored afterwards.
    """
    present = torch.get_rng_state()
    assert position.random is not None
    torch.set_rng_state(position.random)
    for generator, state in zip(generators(loader), position.begun, strict=True):
        generator.set_state(state)
    has_state = position.state is not None and _has_state_dict(loader)
    if has_state:
        loader.load_state_dict(position.state)
    with reading(loader) as minibatches:
        for _ in range(0 if has_state else position.given):
            next(minibatches, None)
        torch.set_rng_state(present)
        position.restore(loader)
        yield minibatches
