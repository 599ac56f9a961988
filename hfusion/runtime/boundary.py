"""The values that cross the cuts of a minibatch: kept on the device, and copied to the host until the backward.

Later minibatches reuse the host memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.tree import leaves, map_leaves
from hfusion.device.backend import backend
from hfusion.runtime.copying import Move, copy_now
from hfusion.runtime.cut_values import Bundle, detached, restore, spill


class BoundaryStore:
    """Stores the values that parts exchange. One thread may load values for a shard while another computes.

    ``pinned``: use page-locked host memory. ``resident``: keep all values on the device until the task leaves it.
    """

    def __init__(self, *, pinned: bool, resident: bool) -> None:
        self._pinned = pinned
        self._resident = resident
        self._inputs: Mapping[str, Any] = {}
        self._makers: Mapping[str, int] = {}
        self._values: dict[str, Any] = {}
        self._fresh: dict[int, dict[str, Any]] = {}
        self._bundles: dict[int, Bundle] = {}
        self._entries: dict[int, dict[str, Any]] = {}
        # Host memory of earlier minibatches for reuse, by the part that computed the values.
        self._old: dict[int, Bundle] = {}

    def start_minibatch(self, inputs: Mapping[str, Any], makers: Mapping[str, int]) -> None:
        """Begin a minibatch. ``inputs``: its inputs; ``makers``: the part, by index, that computes each other value."""
        self._inputs, self._makers = inputs, makers

    def take(self, names: Sequence[str], device: torch.device) -> dict[str, Any]:
        """Return the values ``names`` on the device, as new autograd leaves."""
        values, moves = self._find(names, device)
        copy_now(moves)
        return detached(values)

    def load(self, shard: int, names: Sequence[str], device: torch.device) -> list[Move]:
        """Allocate the values ``names`` for the backward of ``shard``. Return the copies that fill them."""
        computed_names = [name for name in names if name not in self._inputs]
        self._entries[shard], moves = self._find(computed_names, device)
        return moves

    def entry(self, shard: int, names: Sequence[str], device: torch.device) -> dict[str, Any]:
        """Return the values ``names`` as new leaves: those that `load` prepared for a backward, if it was called."""
        loaded = self._entries.pop(shard, None)
        if loaded is None:
            return self.take(names, device)
        for tensor in leaves(loaded, Tensor):
            backend(device).share(tensor)
        # Inputs are copied here and not by `load`: memory belongs to the queue in which it was allocated.
        return detached({name: loaded[name] if name in loaded else self._of_batch(name, device) for name in names})

    def keep(self, shard: int, outputs: Mapping[str, Any], later: frozenset[str]) -> None:
        """Store the outputs of ``shard``. ``later``: names that later parts take, which stay on the device."""
        results = detached(outputs)
        if results and not self._resident:
            self._fresh[shard] = results
        values = {**self._values, **results}
        self._values = {name: value for name, value in values.items() if name in later or self._resident}

    def put_away(self, shard: int) -> list[Move]:
        """Return the copies to the host when a shard leaves the device."""
        # Values loaded for a backward are unused if another task runs first.
        self._entries.pop(shard, None)
        fresh = self._fresh.pop(shard, None)
        return [] if fresh is None else self._spill(shard, fresh)

    def leave(self) -> list[Move]:
        """Return the copies to the host when the task leaves the device."""
        moves: list[Move] = []
        for maker in {self._makers[name] for name in self._values} - self._bundles.keys():
            moves += self._spill(maker, {n: value for n, value in self._values.items() if self._makers[n] == maker})
        self._values = {}
        return moves

    def clean(self, shard: int) -> None:
        """Forget the values that ``shard`` computed. Their host memory is kept for reuse."""
        self._entries.pop(shard, None)
        if shard in self._bundles:
            self._old[shard] = self._bundles.pop(shard)
        self._values = {name: value for name, value in self._values.items() if self._makers.get(name) != shard}

    def _spill(self, maker: int, values: Mapping[str, Any]) -> list[Move]:
        self._bundles[maker], moves = spill(values, self._old.pop(maker, None), pinned=self._pinned)
        return moves

    def _find(self, names: Sequence[str], device: torch.device) -> tuple[dict[str, Any], list[Move]]:
        """Return the values ``names`` on the device, and the copies that must be made before they are used."""
        # Read once: a unit may replace it while the next one is loaded.
        values = self._values
        results: dict[str, Any] = {}
        missing: dict[int, list[str]] = {}
        moves: list[Move] = []
        for name in names:
            if name in self._inputs:
                results[name] = self._of_batch(name, device)
            elif name in values:
                results[name] = values[name]
            else:
                missing.setdefault(self._makers[name], []).append(name)
        for maker, missing_names in missing.items():
            restored, copies = restore(self._bundles[maker], missing_names, device)
            results |= restored
            moves += copies
        return {name: results[name] for name in names}, moves

    def _of_batch(self, name: str, device: torch.device) -> Any:
        """Return an input of the minibatch on the device."""
        return map_leaves(self._inputs[name], Tensor, lambda tensor: tensor.to(device, non_blocking=True))
