"""Worker processes of a `torch.utils.data.DataLoader`, which torch ends only when its iterator is freed."""

from __future__ import annotations

from typing import Any, TypeGuard

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter as WorkerIterator

# Seconds for the threads that send indices to workers: one whose queue is full when its worker dies never ends.
_PATIENCE = 5.0


def has_workers(iterator: object) -> TypeGuard[WorkerIterator]:
    """Return whether ``iterator`` is the iterator of a DataLoader with worker processes."""
    return isinstance(iterator, WorkerIterator)


def kept_iterator(loader: Any) -> WorkerIterator | None:
    """Return the iterator that a DataLoader with ``persistent_workers`` keeps; None if there is none."""
    iterator = getattr(loader, "_iterator", None)
    return iterator if has_workers(iterator) else None


def may_stay(iterator: WorkerIterator) -> bool:
    """Return whether the workers are persistent and all of them are alive."""
    return bool(iterator._persistent_workers) and all(worker.is_alive() for worker in iterator._workers)


def shut_down(loader: Any, iterator: WorkerIterator) -> None:
    """End the workers and the threads that feed them. The loader starts others when it is read again."""
    iterator._shutdown_workers()
    for queue in iterator._index_queues:
        feeder = getattr(queue, "_thread", None)
        if feeder is not None:
            feeder.join(_PATIENCE)
    if iterator._persistent_workers:
        # With dead workers, the loader could not be iterated again.
        loader._iterator = None


def kill_workers(iterator: WorkerIterator, patience: float) -> None:
    """Kill the workers, and wait ``patience`` seconds for each."""
    if iterator._worker_pids_set:
        # Otherwise torch reports their end as an error, wherever the main thread is.
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join(patience)
    # Wakes the reader immediately, not only at its next check of the workers.
    writer = getattr(iterator._worker_result_queue, "_writer", None)
    if writer is not None:
        writer.close()
