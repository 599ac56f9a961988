"""Memory of a device under views that outlive it."""

from __future__ import annotations

import torch


class Block:
    """Memory that is given back and taken anew under the same views, as FSDP does with its flat parameters
    (https://docs.pytorch.org/docs/stable/fsdp.html): to make new views takes as long as to copy a small shard.

    Made when all views are, which are then all that see the memory.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._storage = storage
        self._size = storage.nbytes()
        self._users = self._count()

    def take(self) -> None:
        """Take memory again."""
        self._storage.resize_(self._size)

    def give(self) -> bool:
        """Give the memory back, unless others see it: it is theirs then, and the views cannot be used again."""
        if self._count() > self._users:
            return False
        self._storage.resize_(0)
        return True

    def _count(self) -> int:
        """How many tensors see the memory."""
        return int(torch._C._storage_Use_Count(self._storage._cdata))
