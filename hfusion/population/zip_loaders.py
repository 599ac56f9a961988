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

    Epochs begin together. Within an epoch, members with full batches step together. Those whose last batch is smaller
    wait until no full one is left; then the smaller batches are one minibatch, `Ragged` if they differ in size. No
    sample is left out, and members that have finished do not step.

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
    return _rounds(loaders, counts, numbers)


def _rounds(
    loaders: Sequence[Iterable[Any]], counts: Sequence[int], numbers: Sequence[int]
) -> Iterator[tuple[Any, Any, list[int]]]:
    for epoch in range(max(counts, default=0)):
        members = zip(loaders, counts, numbers, strict=True)
        live = {row: _pairs(loader, row, epoch) for loader, count, row in members if epoch < count}
        batches: dict[int, Any] = {}  # of each member, the one that it steps with next
        full: dict[Any, tuple[int, ...]] = {}
        while live:
            groups: dict[Any, dict[int, tuple[int, ...]]] = {}
            for row, loader in list(live.items()):
                batches[row] = batches.get(row) or next(loader, None)
                if batches[row] is None:
                    del live[row], batches[row]
                    continue
                kind, sizes = _shapes(batches[row])
                groups.setdefault(kind, {})[row] = sizes
                full[kind] = max(full.get(kind, sizes), sizes)
            for kind, group in groups.items():
                rows = [row for row, sizes in group.items() if sizes == full[kind]] or list(group)
                inputs, targets = zip(*(batches.pop(row) for row in rows), strict=True)
                yield stacked(list(inputs)), stacked(list(targets)), rows


def _pairs(loader: Iterable[Any], row: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of one epoch of a member. Raises ValueError if there is none, or one is no pair."""
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


def _shapes(batch: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the kind of a batch, equal for those that differ in their number of samples only, and its first sizes."""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = tuple((x.shape[1:], x.dim(), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (spec, kinds), tuple(x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim())
