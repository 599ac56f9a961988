"""Reading a loader such that its processes and threads end with it, and a loader that hangs can be abandoned."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, Generic, TypeAlias, TypeVar

import torch

from hfusion.device.backend import current_queue
from hfusion.torch_private.dataloader_workers import has_workers, kept_iterator, kill_workers, may_stay, shut_down

T = TypeVar("T")

# Seconds that a reader has to end once it was stopped, and once more when the processes that it waits for are gone.
_GRACE = 1.5
_GLANCE = 0.1


@contextmanager
def reading(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """Context manager: iterate over the loader, and end its processes and threads afterwards.

    A DataLoader ends its workers when its iterator is freed, which an error's traceback may delay, and does not join
    the threads that send to them. With ``persistent_workers`` they stay, as requested. At Ctrl-C they are killed.
    """
    iterator = iter(loader)
    try:
        yield iterator
    except KeyboardInterrupt:
        end_workers(iterator)
        raise
    finally:
        if has_workers(iterator) and not may_stay(iterator):
            shut_down(loader, iterator)


def restart_workers(loader: Any) -> None:
    """End the workers that a DataLoader keeps, so that it is read as for the first time: they and it draw by the seed.

    Workers that stay go on with their own generators, and with them a DataLoader draws the order of its samples first,
    else second, after a seed for new workers.
    """
    iterator = kept_iterator(loader)
    if iterator is not None:
        shut_down(loader, iterator)


def end_workers(iterator: object) -> bool:
    """Kill the worker processes of a DataLoader's iterator. Returns whether there were any."""
    if not has_workers(iterator):
        return False
    kill_workers(iterator, _GRACE)
    return True


def generators(loader: Any) -> list[torch.Generator]:
    """The generators of their own that a DataLoader and its samplers draw from, each once."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    found = [getattr(part, "generator", None) for part in parts]
    return list({id(each): each for each in found if isinstance(each, torch.Generator)}.values())


_Job: TypeAlias = "tuple[Future[T], Callable[[], T]]"


class Reader(Generic[T]):
    """Advances ``items`` in a thread of its own, which is left behind if it never comes back.

    Args:
        items: what to read; it runs with the settings of torch of the thread that asks.
        name: of the thread.
        interrupt: ends what ``items`` may wait for, and says whether there was anything.
    """

    def __init__(self, items: Generator[T, None, None], name: str, interrupt: Callable[[], bool]) -> None:
        self._items = items
        self._name = name
        self._interrupt = interrupt
        self._lock = Lock()
        self._jobs: SimpleQueue[_Job[T] | None] = SimpleQueue()
        self._thread: Thread | None = None
        self._awaited: Future[T] | None = None
        self._ended: Future[None] = Future()
        self._deadline: float | None = None

    def next(self, within: AbstractContextManager[Any] | None = None) -> T:
        """The next item, StopIteration after the last; CancelledError if `stop` is called before it is there.

        It is read ``within`` what its thread enters for that.
        """
        with self._lock:
            if self._deadline is not None:
                raise CancelledError
            if self._thread is None:
                self._thread = Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
            awaited = self._awaited = Future()
            self._jobs.put((awaited, _here(self._items, within or nullcontext())))
        try:
            return awaited.result()
        finally:
            self._awaited = None
            del awaited

    def stop(self) -> None:
        """Read no more: whoever waits gives up, and `close` will not wait for long."""
        with self._lock:
            if self._deadline is None:
                self._deadline = time.monotonic() + _GRACE
                self._jobs.put(None)
            if self._awaited is not None:
                self._awaited.cancel()

    def close(self) -> None:
        """End ``items``, and the thread. Raises what ``items`` raises at its end."""
        if self._thread is None:
            self._items.close()
            return
        self._jobs.put(None)
        if self._left_by(self._deadline) or (self._interrupt() and self._left_by(time.monotonic() + _GRACE)):
            self._thread.join()
            self._ended.result()

    def _left_by(self, deadline: float | None) -> bool:
        """Return whether ``items`` has ended before the deadline."""
        # A signal just before the wait begins does not end it.
        while not self._ended.done() and (deadline is None or time.monotonic() < deadline):
            with suppress(TimeoutError):
                self._ended.exception(_GLANCE)
        return self._ended.done()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            _answer(*job)
            del job
        try:
            self._items.close()
        except BaseException as error:
            self._ended.set_exception(error)
        else:
            self._ended.set_result(None)


def _answer(awaited: Future[T], read: Callable[[], T]) -> None:
    try:
        answer = partial(awaited.set_result, read())
    except BaseException as error:
        answer = partial(awaited.set_exception, error)
    # A stopped reader no longer waits for it.
    with suppress(InvalidStateError):
        answer()


def _here(items: Iterator[T], within: AbstractContextManager[Any]) -> Callable[[], T]:
    """Advance ``items`` with this thread's number of threads and queue of the device, wherever that is called."""
    threads = torch.get_num_threads()
    queued = current_queue()

    def read() -> T:
        # A new thread begins with its own number of threads, and kernels may round by it.
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with queued, within:
            return next(items)

    return read


def length(loader: Iterable[Any]) -> int:
    """Return the number of minibatches of a loader with a length."""
    return len(loader)  # type: ignore[arg-type]
