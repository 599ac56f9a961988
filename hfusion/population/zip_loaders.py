"""Combine one loader per member into the minibatches of an array."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.calls import stacked


def zip_loaders(
    loaders: Sequence[Iterable[Any]], *, epochs: int | Sequence[int] = 1, rows: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any, list[int]]]:
    """Yield ``(inputs, target, rows)`` for `Population.step`, until each member has had its epochs.

    In each round every loader gives one batch. Batches of one shape form one minibatch, so a member whose last batch is
    smaller steps separately. No sample is padded or left out, and members that have finished do not step.

    Args:
        loaders: one per member, each yielding batches ``(inputs, target)``; their lengths may differ.
        epochs: the number of passes over each loader, one number or one per loader; 0 leaves a member out.
        rows: the row of each loader's member; by default 0, 1, ...

    Raises:
        ValueError: epochs or rows differ in number from loaders, a loader has no batch, or a batch is not a pair.

    Example:
        >>> import torch
        >>> loaders = [[(torch.zeros(4, 2), torch.zeros(4))] * 2, [(torch.ones(4, 2), torch.ones(4))]]
        >>> [rows for _, _, rows in zip_loaders(loaders)]
        [[0, 1], [0]]
    """
    counts = [epochs] * len(loaders) if isinstance(epochs, int) else list(epochs)
    numbers = list(range(len(loaders))) if rows is None else list(rows)
    for name, values in (("epochs", counts), ("rows", numbers)):
        if len(values) != len(loaders):
            raise ValueError(f"{name} has {len(values)} values for {len(loaders)} loaders: give one for each")
    if wrong := [count for count in counts if count < 0]:
        raise ValueError(f"epochs={wrong[0]}: a loader is gone through 0 times or more")
    return _rounds([_epochs(*pair) for pair in zip(loaders, counts, numbers, strict=True)], numbers)


def _rounds(streams: list[Iterator[Any]], numbers: list[int]) -> Iterator[tuple[Any, Any, list[int]]]:
    live = dict(zip(numbers, streams, strict=True))
    while live:
        groups: dict[Any, dict[int, Any]] = {}
        for row, stream in list(live.items()):
            batch = next(stream, None)
            if batch is None:
                del live[row]
            else:
                groups.setdefault(_shapes(batch), {})[row] = batch
        for batches in groups.values():
            inputs, targets = zip(*batches.values(), strict=True)
            yield stacked(list(inputs)), stacked(list(targets)), list(batches)


def _epochs(loader: Iterable[Any], count: int, row: int) -> Iterator[Any]:
    """The batches of all epochs of one member."""
    for epoch in range(count):
        empty = True
        for batch in loader:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                raise ValueError(
                    f"the loader of row {row} gave {type(batch).__name__}: give pairs (inputs, target); several "
                    "inputs are a tuple"
                )
            empty = False
            yield tuple(batch)
        if empty:
            raise ValueError(
                f"the loader of row {row} gave no batch in epoch {epoch}: leave it out by epochs=0; an iterator serves "
                "one epoch"
            )


def _shapes(batch: Any) -> Any:
    """Equal for batches that can be stacked."""
    leaves, spec = pytree.tree_flatten(batch)
    return spec, tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
