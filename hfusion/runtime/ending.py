"""How a run ends: by itself, or all of it at the first error."""

from __future__ import annotations

from threading import Condition


class Stopped(Exception):
    """The run ends; whoever waits gives up. Never shown to the user."""


class TaskFailed(Exception):
    """A unit of the task numbered ``task`` raised ``__cause__``."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task


class Ending:
    """Whether a run goes on, and the first error. ``changed`` guards what its threads share, and wakes who waits."""

    def __init__(self) -> None:
        self.changed = Condition()
        self.error: TaskFailed | None = None
        self.stopping = False

    def stop(self) -> None:
        """End the run."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def failed(self, task: int, error: BaseException) -> Stopped:
        """End the run by the error of a task; what to raise."""
        with self.changed:
            if self.error is None:
                self.error = TaskFailed(task)
                self.error.__cause__ = error
        self.stop()
        return Stopped()
