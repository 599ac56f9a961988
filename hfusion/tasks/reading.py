"""Read loaders so that their processes end with the reading, hanging ones can be abandoned, and positions resumed."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hfusion.capture.python_state import GENERATORS, change_back
from hfusion.core.exclusive import tracing
from hfusion.core.python_values import own_attributes
from hfusion.device.backend import current_queue
from hfusion.device.team import as_caller
from hfusion.torch_private.dataloader_workers import has_workers, kept_iterator, kill_workers, may_stay, shut_down

T = TypeVar("T")

# Seconds that a stopped reader has to end, and again after the worker processes that it waits for were killed.
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
    """End the persistent workers of a DataLoader, so that its random draws follow the seed as at the first reading.

    Persistent workers continue with their own generators. A DataLoader with new workers also draws a seed for them
    before the order of its samples.
    """
    iterator = kept_iterator(loader)
    if iterator is not None:
        shut_down(loader, iterator)


def end_workers(iterator: object) -> bool:
    """Kill the worker processes of a DataLoader's iterator. Return whether there were any."""
    if not has_workers(iterator):
        return False
    kill_workers(iterator, _GRACE)
    return True


def generators(loader: Any) -> list[torch.Generator]:
    """Return the ``generator`` objects of a DataLoader and its samplers, each once."""
    batches = getattr(loader, "batch_sampler", None)
    parts = (loader, getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None))
    sources = [getattr(part, "generator", None) for part in parts]
    return list({id(generator): generator for generator in sources if isinstance(generator, torch.Generator)}.values())


def other_generators(loader: Any) -> Iterator[Any]:
    """Yield the generators of numpy and Python that a loader, or a data set below it, has in its attributes."""
    seeded = generators(loader)
    while loader is not None:
        held = own_attributes(loader)
        for value in held.values():
            if isinstance(value, GENERATORS) and all(value is not other for other in seeded):
                yield value
        loader = held.get("dataset")


def generator_states(loader: Any) -> list[Tensor]:
    """Return the states of a loader's `generators`."""
    return [generator.get_state() for generator in generators(loader)]


def set_generators(loader: Any, states: Sequence[Tensor]) -> None:
    """Set a loader's `generators` to earlier states."""
    for generator, state in zip(generators(loader), states, strict=True):
        generator.set_state(state)


class Reader(Generic[T]):
    """Advances a generator in a separate thread, which is abandoned if the generator hangs.

    Args:
        items: the generator. It runs with the number of threads and device queue of the thread that calls `next`.
        name: the name of the thread.
        interrupt: ends the processes that ``items`` may wait for, and returns whether there were any.
    """

    def __init__(self, items: Generator[T, None, None], name: str, interrupt: Callable[[], bool]) -> None:
        self._items, self._interrupt = items, interrupt
        self._requests: SimpleQueue[Callable[[], T] | None] = SimpleQueue()
        # Functions that return the item, or raise the error, of a request.
        self._answers: SimpleQueue[Callable[[], T]] = SimpleQueue()
        self._thread = Thread(target=as_caller(self._work), name=name, daemon=True)
        self._ended = Event()
        self._error: BaseException | None = None
        self._deadline: float | None = None

    def next(self, *within: AbstractContextManager[Any]) -> T:
        """Return the next item. Raises StopIteration after the last, and CancelledError after `stop`.

        The thread enters the context managers ``within`` while it reads.
        """
        if self._deadline is not None:
            raise CancelledError
        if self._thread.ident is None:
            self._thread.start()
        threads, queued = torch.get_num_threads(), current_queue()

        def read() -> T:
            # A new thread begins with its own number of threads, and kernels may round by it.
            if torch.get_num_threads() != threads:
                torch.set_num_threads(threads)
            with ExitStack() as stack:
                for context in (queued, *within):
                    stack.enter_context(context)
                return next(self._items)

        self._requests.put(read)
        return self._answers.get()()

    def stop(self) -> None:
        """Stop reading: a waiting `next` raises CancelledError, and `close` waits only for a short time."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _GRACE
            self._requests.put(None)
            self._answers.put(partial(_raise, CancelledError()))

    def close(self) -> None:
        """End ``items`` and the thread. Errors that ``items`` raises when it is closed are re-raised."""
        if self._thread.ident is None:
            self._items.close()
            return
        self._requests.put(None)
        if self._left_by(self._deadline) or (self._interrupt() and self._left_by(time.monotonic() + _GRACE)):
            self._thread.join()
            if self._error is not None:
                raise self._error
        else:
            tracing.take_from(self._thread.ident)

    def _left_by(self, deadline: float | None) -> bool:
        """Return whether ``items`` has ended before the deadline."""
        # A signal just before the wait begins does not end it.
        while not self._ended.wait(_GLANCE) and (deadline is None or time.monotonic() < deadline):
            pass
        return self._ended.is_set()

    def _work(self) -> None:
        while (read := self._requests.get()) is not None:
            try:
                self._answers.put(partial(_identity, read()))
            except BaseException as error:
                self._answers.put(partial(_raise, error))
            del read
        try:
            self._items.close()
        except BaseException as error:
            self._error = error
        self._ended.set()


def _identity(item: T) -> T:
    return item


def _raise(error: BaseException) -> Any:
    raise error


def length(loader: Iterable[Any]) -> int:
    """Return the number of minibatches of a loader with a length."""
    return len(loader)  # type: ignore[arg-type]


@contextmanager
def generators_kept(loader: Any) -> Iterator[None]:
    """Context manager: restore the generators that a loader, its samplers and its data set draw from."""
    undo = [change_back(generator) for generator in (*generators(loader), *other_generators(loader))]
    try:
        yield
    finally:
        for change in filter(None, undo):
            change()


# The position in a loader, and how another process continues from it.


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
    def at_start(epoch: int, random: Tensor | None, loader: Any) -> Position:
        """Return the position at the start of an epoch. The loader's generators may already be seeded."""
        states = generator_states(loader)
        return Position(epoch, 0, random, states, states, None)

    def at(self, count: int, loader: Any) -> Position:
        """Return the position after ``count`` minibatches of this epoch."""
        state = loader.state_dict() if _has_state_dict(loader) else None
        return replace(self, given=count, own=generator_states(loader), state=state)


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
    set_generators(loader, position.begun)
    has_state = position.state is not None and _has_state_dict(loader)
    if has_state:
        loader.load_state_dict(position.state)
    with reading(loader) as minibatches:
        for _ in range(0 if has_state else position.given):
            next(minibatches, None)
        torch.set_rng_state(present)
        set_generators(loader, position.own)
        yield minibatches
