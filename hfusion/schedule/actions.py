"""Actions of a device on a shard, as data; each prints as one line of text."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import NamedTuple

from hfusion.core.errors import PlanError


class Act(StrEnum):
    """The kind of an action."""

    LOAD = "LOAD"
    FORWARD = "FORWARD"
    RECOMPUTE = "RECOMPUTE"
    BACKWARD = "BACKWARD"
    STEP = "STEP"
    EVALUATE = "EVALUATE"
    EVICT = "EVICT"
    SAVE = "SAVE"

    @property
    def lane(self) -> str:
        """The lane of a device that does this action: ``in``, ``compute`` or ``out``. Lanes work concurrently."""
        return _LANES.get(self, "compute")


_LANES = {Act.LOAD: "in", Act.EVICT: "out"}


class Section(StrEnum):
    """A section of a shard's memory on a device: its state, values at its cuts, or activations saved for backward."""

    WEIGHTS = "weights"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    BOUNDARY = "boundary"
    SAVED = "saved"


@dataclass(frozen=True, slots=True)
class Action:
    """One action on one shard, in a list whose order a single device can follow.

    It allocates ``takes`` bytes on the device when it starts and releases ``frees`` when it ends; it copies ``moves``
    bytes or computes for ``seconds``. ``sections``: loaded by a LOAD and removed by its EVICT. ``after``: indices of
    actions that must have ended; ``~k`` is the last EVICT of shard ``k`` in earlier minibatches. A LOAD may be hoisted
    over all other actions.
    """

    act: Act
    shard: int
    sections: frozenset[Section] = frozenset()
    takes: int = 0
    frees: int = 0
    moves: int = 0
    seconds: float = 0.0
    after: tuple[int, ...] = ()

    def __str__(self) -> str:
        sections = "+".join(section for section in Section if section in self.sections) or "-"
        after = ",".join(f"~{~index}" if index < 0 else str(index) for index in self.after) or "-"
        numbers = f"takes {self.takes} frees {self.frees} moves {self.moves} seconds {self.seconds!r}"
        return f"{self.act} {self.shard} {sections} {numbers} after {after}"


def estimate(action: Action, load_rate: float, evict_rate: float) -> float:
    """Return the estimated seconds of an action. Rates are in bytes per second."""
    if action.act is Act.LOAD:
        return action.moves / load_rate
    if action.act is Act.SAVE:
        return action.moves / evict_rate
    # An eviction copies at most the bytes that it frees.
    return min(action.moves, action.frees) / evict_rate if action.act is Act.EVICT else action.seconds


# Shards with their costs, and units: one phase of one shard.


class Phase(StrEnum):
    """Forward, backward, update and evaluation.

    UPDATE is the optimizer step if it must wait for the gradients of all shards. Otherwise the step of a shard belongs
    to its backward unit.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"
    EVALUATE = "evaluate"


@dataclass(frozen=True)
class Shard:
    """Nodes ``[first, last)`` of the linearised graph, with the costs of one minibatch of all members.

    Bytes on the device:
        weights: parameters and buffers.
        gradients: of the parameters that are trained.
        optimizer: state of the optimizer for them.
        activations: saved between forward and backward inside the shard.
        workspace: peak of temporaries while one of its nodes runs forward.
        peak: peak of its backward: gradients, activations, temporaries.
        boundary: values alive at its output cut, including inputs of later shards; 0 for the last shard.
    Seconds: ``forward``, ``backward`` (without the recomputation), ``step`` (its optimizer step).
    ``frozen``: bytes of ``weights`` that training never changes, which are not written back.
    ``borrows``: earlier shards that own some of its tensors, such as tied weights.
    ``passing``: peak bytes of a forward that saves nothing; None: all values of the forward.
    """

    index: int
    first: int
    last: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    workspace: int
    peak: int
    boundary: int
    forward: float
    backward: float
    step: float
    frozen: int = 0
    borrows: tuple[int, ...] = ()
    passing: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first < self.last:
            raise PlanError(f"shard {self.index} holds nodes [{self.first}, {self.last}): give it at least one")
        for field in fields(self)[3:]:
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
                raise PlanError(f"shard {self.index}: {field.name} is {value}: it must be finite and at least 0")
        if self.frozen > self.weights:
            sizes = f"frozen is {self.frozen:,} bytes, weights {self.weights:,}"
            raise PlanError(f"shard {self.index}: {sizes}: frozen is a part of weights, so it cannot be more")
        if not all(0 <= owner < self.index for owner in self.borrows):
            raise PlanError(f"shard {self.index} borrows from {self.borrows}: give shards before it")

    def of_larger(self, growth: float) -> Shard:
        """Return the shard with the costs of evaluating a minibatch whose values take ``growth`` times the bytes."""
        passing = self.activations + self.workspace if self.passing is None else self.passing
        return replace(
            self,
            forward=growth * self.forward,
            workspace=math.ceil(growth * passing),
            boundary=math.ceil(growth * self.boundary),
        )

    @property
    def seconds(self) -> float:
        """Seconds of one minibatch with its optimizer step when nothing is recomputed."""
        return self.forward + self.backward + self.step


class Unit(NamedTuple):
    """One phase of one shard on one minibatch (``step``) of a task: the unit of scheduling.

    Minibatches of evaluations are counted separately. ``updates``: it ends with the optimizer step of its shard.
    """

    task: str
    step: int
    phase: Phase
    shard: int
    updates: bool
