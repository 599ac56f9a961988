"""Recipes that compute minibatches of one kind, and the source of both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from hfusion.core.program import Part
from hfusion.device.backend import backend


@dataclass(frozen=True)
class Recipe:
    """A recipe to compute batches of one kind.

    Attributes:
        parts: the parts of the program, one per shard.
        inputs: the names of the program's inputs.
        losses: ``losses(outputs, target)`` returns the losses ``[B]`` from the flat outputs of the last part.
        random: whether it may draw random numbers.
        branching: the number of members if they may use different parameters, otherwise None.
    """

    parts: tuple[Part, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    losses: Callable[[Sequence[Any], Any], Tensor]
    random: bool
    branching: int | None = None

    @cached_property
    def _on_host(self) -> dict[str, Tensor]:
        return {}

    def constant(self, name: str, device: torch.device) -> Tensor:
        """Return a constant on a device, by a copy from the host."""
        if name not in self._on_host:
            constant = self.constants[name]
            pins = backend(device).pins and constant.device.type == "cpu"
            self._on_host[name] = constant.pin_memory() if pins else constant.to("cpu")
        return self._on_host[name].to(device, non_blocking=True)

    @cached_property
    def makers(self) -> dict[str, int]:
        """The index of the part that computes each value."""
        return {name: index for index, part in enumerate(self.parts) for name in part.gives}

    @cached_property
    def later(self) -> tuple[frozenset[str], ...]:
        """For each part, the values that later parts take."""
        return tuple(
            frozenset(name for part in self.parts[index:] for name in part.takes)
            for index in range(1, len(self.parts) + 1)
        )


class Source(Protocol):
    """A source of batches and their recipes. A batch has the flat ``inputs`` of the program, and a ``target``."""

    def next(self, drawing: AbstractContextManager[None]) -> Any:
        """Return the next minibatch. It may draw torch's random numbers, in any thread, inside ``drawing``."""

    def stop(self) -> None:
        """Cancel the wait for the next minibatch, by a CancelledError."""

    def find(self, batch: Any) -> Recipe | None:
        """Return the recipe for a batch like this one; None if there is none yet."""

    def prepare(self, batch: Any) -> Recipe:
        """Create the recipe for such batches. Must run while no other thread computes."""
