"""What a loader started to be read has ended when it is read no more."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hfusion.tasks.reading import Reader, end_workers, reading

# From Python 3.12 on fork warns where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Numbers(Dataset[int]):
    """Of which one cannot be read."""

    def __init__(self, unreadable: int) -> None:
        self.unreadable = unreadable

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        if index == self.unreadable:
            raise OSError("gone")
        return index


@contextmanager
def nothing_left() -> Iterator[None]:
    threads, processes = set(threading.enumerate()), set(multiprocessing.active_children())
    yield
    assert set(threading.enumerate()) <= threads
    assert set(multiprocessing.active_children()) <= processes


@pytest.mark.parametrize("count", [1, 4])
def test_reading_part_or_all(count: int) -> None:
    """Often enough for a thread that is not awaited to be seen."""
    loader = DataLoader(Numbers(9), 2, num_workers=1)
    for _ in range(3):
        with nothing_left(), reading(loader) as given:
            assert [next(given).tolist() for _ in range(count)] == [[2 * i, 2 * i + 1] for i in range(count)]
            assert count < 4 or next(given, None) is None


def test_an_error_that_is_kept_keeps_no_process() -> None:
    loader = DataLoader(Numbers(3), 2, num_workers=2)
    with nothing_left(), pytest.raises(OSError, match="gone") as told, reading(loader) as given:
        list(given)
    assert told.value.__traceback__ is not None


def test_persistent_workers_stay() -> None:
    loader = DataLoader(Numbers(9), 2, num_workers=1, persistent_workers=True)
    before = set(multiprocessing.active_children())
    with reading(loader) as given:
        next(given)
    (worker,) = set(multiprocessing.active_children()) - before
    with nothing_left(), reading(loader) as given:
        assert len(list(given)) == 4
        assert worker.is_alive()
    loader._iterator._shutdown_workers()


def test_any_iterable() -> None:
    generator = torch.Generator()
    loader = DataLoader(Numbers(9), 4, shuffle=True, generator=generator.manual_seed(1))
    expected = [batch.tolist() for batch in loader]
    generator.manual_seed(1)
    with reading(loader) as given:
        assert [batch.tolist() for batch in given] == expected
    once = iter([1, 2])
    with suppress(KeyError), reading(once) as given:
        assert given is once
        raise KeyError


def counted(events: list[str]) -> Generator[int, None, None]:
    try:
        yield from range(3)
    finally:
        events.append(threading.current_thread().name)


def reader(items: Generator[int, None, None]) -> Reader[int]:
    return Reader(items, "reads", lambda: False)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_reader_gives_what_is_there_and_ends_it_in_its_own_thread(count: int) -> None:
    events: list[str] = []
    one = reader(counted(events))
    with nothing_left():
        assert [one.next() for _ in range(count)] == list(range(count))
        if count == 3:
            with pytest.raises(StopIteration):
                one.next()
        one.close()
    assert events == (["reads"] if count else [])


def test_errors_come_to_who_asks() -> None:
    def items() -> Generator[int, None, None]:
        try:
            yield 1
            raise OSError("gone")
        finally:
            raise ValueError("at the end")

    one, other = reader(items()), reader(items())
    with nothing_left():
        assert one.next() == other.next() == 1
        with pytest.raises(ValueError, match="at the end") as told:
            one.next()
        assert isinstance(told.value.__context__, OSError)
        one.close()
        with pytest.raises(ValueError, match="at the end"):
            other.close()


def test_a_reader_has_the_number_of_threads_of_who_asks() -> None:
    one = reader(torch.get_num_threads() for _ in range(2))
    try:
        torch.set_num_threads(3)
        assert one.next() == 3
    finally:
        torch.set_num_threads(1)
    assert one.next() == 1
    one.close()


def test_who_waits_for_a_reader_that_is_stopped_gives_up() -> None:
    """The thread ends when what it waits for comes, and closes what it read."""
    answers, asked, events = threading.Event(), threading.Event(), []

    def items() -> Generator[int, None, None]:
        try:
            asked.set()
            answers.wait()
            yield 1
        finally:
            events.append("closed")

    one = reader(items())

    def stop() -> None:
        asked.wait()
        one.stop()

    with nothing_left():
        stopper = threading.Thread(target=stop)
        stopper.start()
        with pytest.raises(CancelledError):
            one.next()
        with pytest.raises(CancelledError):
            one.next()
        stopper.join()
        one.close()
        thread = one._thread
        assert thread is not None
        assert thread.daemon
        assert not events
        answers.set()
        thread.join()
    assert events == ["closed"]


class Hanging(Dataset[int]):
    """Its second number never comes."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if index:
            threading.Event().wait()
        return index


@pytest.mark.parametrize("persistent", [False, True])
def test_workers_that_hang_are_ended(persistent: bool) -> None:
    """They ignore what asks them to end."""
    loader = DataLoader(Hanging(), 1, num_workers=2, persistent_workers=persistent)
    found: list[Any] = []

    def items() -> Generator[int, None, None]:
        with reading(loader) as given:
            found.append(given)
            yield from given

    one = Reader(items(), "reads", lambda: end_workers(found[0]))
    with nothing_left():
        assert one.next().item() == 0  # type: ignore[attr-defined]
        stopper = threading.Timer(0.1, one.stop)
        stopper.start()
        with pytest.raises(CancelledError):
            one.next()
        stopper.join()
        with suppress(RuntimeError):
            one.close()
    assert loader._iterator is None


def test_at_ctrl_c_workers_are_not_asked() -> None:
    loader = DataLoader(Hanging(), 1, num_workers=2)

    def interrupted() -> None:
        with reading(loader) as given:
            next(given)
            raise KeyboardInterrupt

    with nothing_left(), pytest.raises(KeyboardInterrupt):
        interrupted()
