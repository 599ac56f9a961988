"""Reading a loader so that whatever it started for that ends with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

# A thread that feeds a process which died with its queue full is never done.
_PATIENCE = 5.0


@contextmanager
def reading(loader: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """What the loader gives; afterwards the processes and threads that read for it have ended.

    A DataLoader by itself ends its workers when nobody holds its iterator any longer, which an error's traceback may,
    and does not await the threads that send to them. With ``persistent_workers`` they stay, as the user asked.
    """
    iterator = iter(loader)
    try:
        yield iterator
    finally:
        if isinstance(iterator, _MultiProcessingDataLoaderIter) and not iterator._persistent_workers:
            iterator._shutdown_workers()
            for queue in iterator._index_queues:
                feeder = getattr(queue, "_thread", None)
                if feeder is not None:
                    feeder.join(_PATIENCE)
