"""What a loader started to be read has ended when it is read no more."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from hfusion.reading import reading

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
