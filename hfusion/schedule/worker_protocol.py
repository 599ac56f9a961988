"""The protocol between the engine and its workers: requests and reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hfusion.schedule.actions import Action
from hfusion.schedule.shards import Unit


class Ticket(Protocol):
    """An action that began. Once ``done``, it has its ``started`` and ``ended`` times, and the ``seconds`` it took.

    It starts when all actions that it waits for have ended, so the worker's overhead to begin it counts as its time.
    """

    @property
    def done(self) -> bool: ...

    @property
    def started(self) -> float: ...

    @property
    def ended(self) -> float: ...

    @property
    def seconds(self) -> float: ...


class Worker(Protocol):
    """Executes the actions of the engine. Each lane of a device runs one action at a time, in the order they began."""

    def begin(self, device: int, task: int, unit: Unit, action: Action, after: Sequence[Ticket]) -> Ticket:
        """Begin an action for a unit, as soon as the actions of the tickets ``after`` have ended."""

    def wait(self) -> Sequence[Ticket]:
        """Wait until at least one action has ended, and return those that have. Raises TaskFailed."""


class TaskFailed(Exception):
    """An action of the task numbered ``task`` raised ``__cause__``."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task
