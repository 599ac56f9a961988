"""Loaders: threads and processes that they start end, and each task draws as if it were alone."""

from __future__ import annotations

import multiprocessing
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from hfusion.tasks.reading import Reader, end_workers, reading
from tests.trained import Dropping, Way, assert_same, batches, fused, machine, plain, planned, task

# Threads and processes that a loader started end when it is no longer read.
# From Python 3.12 on fork warns where there are threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


class Numbers(Dataset[int]):
    """Numbers of which one cannot be read."""

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
        with nothing_left(), reading(loader) as batches:
            assert [next(batches).tolist() for _ in range(count)] == [[2 * i, 2 * i + 1] for i in range(count)]
            assert count < 4 or next(batches, None) is None


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
    """They ignore the signals that ask them to end."""
    loader = DataLoader(Hanging(), 1, num_workers=2, persistent_workers=persistent)
    iterators: list[Any] = []

    def items() -> Generator[int, None, None]:
        with reading(loader) as iterator:
            iterators.append(iterator)
            yield from iterator

    number_reader = Reader(items(), "reads", lambda: end_workers(iterators[0]))
    with nothing_left():
        assert number_reader.next().item() == 0  # type: ignore[attr-defined]
        stopper = threading.Timer(0.1, number_reader.stop)
        stopper.start()
        with pytest.raises(CancelledError):
            number_reader.next()
        stopper.join()
        with suppress(RuntimeError):
            number_reader.close()
    assert loader._iterator is None


# Each task draws as if it were alone.
X, Y = (torch.cat(parts) for parts in zip(*batches(torch.float64, 3), strict=True))


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws for every item, as ``draw`` does."""

    def __init__(self, draw: Callable[[int], Tensor]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Long enough for the other tasks to draw meanwhile.
        time.sleep(1e-4)
        return X[index] + self.draw(index), Y[index]


def noise(index: int) -> Tensor:
    return torch.randn(6, dtype=torch.float64)


def seeded(index: int) -> Tensor:
    torch.manual_seed(index)
    return noise(index)


ALL = TensorDataset(X, Y)

LOADERS: dict[str, Callable[[], Any]] = {
    "shuffled": lambda: DataLoader(ALL, 5, shuffle=True),
    "own generator": lambda: DataLoader(ALL, 5, shuffle=True, generator=torch.Generator().manual_seed(4)),
    "drawing": lambda: DataLoader(Noisy(noise), 5, shuffle=True),
    "seeding": lambda: DataLoader(Noisy(seeded), 5, shuffle=True),
    "workers": lambda: DataLoader(Noisy(noise), 5, shuffle=True, num_workers=1),
}


def test_each_task_draws_as_if_alone() -> None:
    """Bit for bit, at once on several devices, with dropout in all of them."""
    arrays = [fused(Dropping) for _ in LOADERS]
    expected = [plain(array, Way(), make()) for array, make in zip(arrays, LOADERS.values(), strict=True)]
    tasks = [
        task(array, Way(), make(), name.replace(" ", "-"))
        for array, (name, make) in zip(arrays, LOADERS.items(), strict=True)
    ]
    on, count = machine(4), len(tasks)
    plan = planned(tasks, on, [2] * count, [index % 2 == 0 for index in range(count)])
    before = torch.get_rng_state()
    assert_same(arrays, tasks, expected, on, plan)
    assert torch.equal(torch.get_rng_state(), before)
