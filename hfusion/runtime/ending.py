"""How a run ends: by itself, or all of it at the first error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition, Event, Thread

_GLANCE_SECONDS = 0.1


class Stopped(Exception):
    """The run ends; whoever waits gives up. Never shown to the user."""


class TaskFailed(Exception):
    """A unit of the task numbered ``task`` raised ``__cause__``."""

    def __init__(self, task: int) -> None:
        super().__init__(task)
        self.task = task


class Ending:
    """Whether a run goes on, and the first error. ``changed`` guards what its threads share, and wakes who waits.

    ``release`` is called at the end, for those who wait for something else.
    """

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self.changed = Condition()
        self.error: TaskFailed | None = None
        self.stopping = False

    def stop(self) -> None:
        """End the run."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        self._release()

    def failed(self, task: int, error: BaseException) -> Stopped:
        """End the run by the error of a task; what to raise."""
        with self.changed:
            if self.error is None:
                self.error = TaskFailed(task)
                self.error.__cause__ = error
        self.stop()
        return Stopped()


class WorkerThread(Thread):
    """A thread that can be awaited under Ctrl-C: Python 3.11 takes one whose ``join`` is interrupted for ended."""

    def __init__(self, work: Callable[[], None], name: str) -> None:
        super().__init__(name=name)
        self._work = work
        self._ended = Event()

    def run(self) -> None:
        try:
            self._work()
        finally:
            self._ended.set()

    def wait(self) -> None:
        """Until the work is done. Ctrl-C comes through."""
        # A signal just before the wait begins does not end it.
        while not self._ended.wait(_GLANCE_SECONDS):
            pass


def finish(ending: Ending, threads: Sequence[WorkerThread]) -> None:
    """End a run: none of ``threads`` uses the user's tensors any longer. A Ctrl-C meanwhile is raised afterwards."""
    pressed: KeyboardInterrupt | None = None
    ended = False
    while not ended:
        try:
            ending.stop()
            for thread in threads:
                if thread.ident is not None:
                    thread.wait()
                    thread.join()
            ended = True
        except KeyboardInterrupt as interrupt:
            pressed = interrupt
    if pressed is not None:
        raise pressed
