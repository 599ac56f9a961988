"""Minibatches, recipes to compute those of one kind, and the source of both."""

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
class Batch:
    """One minibatch on the host: the flat inputs of the program, and the target of the loss.

    ``call``: the same as whoever made it calls the whole array with it.
    """

    inputs: tuple[Any, ...]
    target: Any
    key: Any
    call: Any = None


@dataclass(frozen=True)
class Recipe:
    """A recipe to compute batches of one kind.

    ``inputs``: the names of the program's inputs. ``losses(outputs, target)``: flat outputs of the last part to the
    losses ``[B]``. ``random``: it draws random numbers. ``branching``: the number of members, if they may use different
    parameters.
    """

    parts: tuple[Part, ...]
    inputs: tuple[str, ...]
    constants: Mapping[str, Tensor]
    losses: Callable[[Sequence[Any], Any], Tensor]
    random: bool
    branching: int | None = None

    @cached_property
    def _placed(self) -> dict[tuple[str, torch.device], Tensor]:
        return {}

    def constant(self, name: str, device: torch.device, *, stays: bool) -> Tensor:
        """A constant on a device, where it ``stays``; else it is copied at each call, from pinned memory."""
        kept = device if stays else torch.device("cpu")
        key = name, kept
        if key not in self._placed:
            constant = self.constants[name]
            pins = not stays and backend(device).pins and constant.device.type == "cpu"
            self._placed[key] = constant.pin_memory() if pins else constant.to(kept)
        return self._placed[key].to(device, non_blocking=True)

    @cached_property
    def makers(self) -> dict[str, int]:
        """The part that gives each value."""
        return {name: index for index, part in enumerate(self.parts) for name in part.gives}

    @cached_property
    def later(self) -> tuple[frozenset[str], ...]:
        """For each part the values that those after it take."""
        return tuple(
            frozenset(name for after in self.parts[index:] for name in after.takes)
            for index in range(1, len(self.parts) + 1)
        )


class WholeStep(Protocol):
    """Forward and backward of a whole array, on its own tensors."""

    @property
    def known_calls(self) -> list[str]:
        """The kinds of calls that are compiled already, or at their next."""

    def expect(self, calls: Sequence[str]) -> None:
        """Go on where these are known, before anything was computed."""

    def prepare(self, batch: Batch, device: torch.device) -> Any:
        """Prepare the argument of `run`, once; may compile."""

    def rest(self, rows: frozenset[int]) -> None:
        """Mark members whose results are no longer needed: they may get losses of NaN and gradients of 0."""

    def run(self, prepared: Any, update: Callable[[], object]) -> Tensor:
        """The losses ``[B]``; ``update`` is called when the gradients are those of the parameters."""

    def release(self) -> None:
        """Free what its programs keep on the device, which the array leaves."""


class Source(Protocol):
    """A source of batches and their recipes."""

    def next(self, drawing: AbstractContextManager[None]) -> Batch:
        """The next minibatch. Within ``drawing``, in any thread, it may draw from torch's random numbers."""

    def stop(self) -> None:
        """Cancel the wait for the next minibatch, by a CancelledError."""

    def find(self, batch: Batch) -> Recipe | None:
        """The recipe for a batch like this one, if there is one already."""

    def make(self, batch: Batch) -> Recipe:
        """Make the recipe. Must run while no other thread computes."""
