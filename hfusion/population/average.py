"""The weighted mean of members: of their parameters and buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hfusion.array.module import FusedModule
from hfusion.core.membership import member_rows
from hfusion.population.best import marked_tensors


def checked_weights(weights: Tensor | Sequence[float] | None, rows: Sequence[int]) -> dict[int, float]:
    """Return each row's share of a mean, without shares of 0; they sum to 1. Raises ValueError for invalid weights."""
    if not rows:
        raise ValueError("average of no rows: give at least one member")
    if weights is None:
        return dict.fromkeys(rows, 1 / len(rows))
    values = torch.as_tensor(weights, device="cpu").detach().to("cpu", torch.float64)
    if values.shape != (len(rows),) or not bool((values >= 0).all()) or not 0 < float(values.sum()) < torch.inf:
        raise ValueError(
            f"weights {values.tolist()} for the average of rows {list(rows)}: give one for each, at least 0, with a "
            "sum above 0"
        )
    shares = (values / values.sum()).tolist()
    return {row: share for row, share in zip(rows, shares, strict=True) if share > 0}


@torch.no_grad()
def mean_tensors(fused: FusedModule, shares: dict[int, float]) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield key, stack and mean ``[*shape]`` of each tensor over the rows in ``shares``, which have the same tensors.

    Integer tensors, such as BatchNorm's count of batches, are not averaged but copied from the last row, as
    `torch.optim.swa_utils.AveragedModel` copies the buffers of its latest model.
    """
    rows = list(shares)
    share = torch.tensor(list(shares.values()), dtype=torch.float64, device="cpu")
    for name, tensor, mark in marked_tensors(fused):
        stack = member_rows(tensor, mark)
        if not stack.is_floating_point() and not stack.is_complex():
            yield name, stack, stack[rows[-1]].clone()
            continue
        values = stack if rows == list(range(len(stack))) else stack[torch.tensor(rows, device=stack.device)]
        yield name, stack, weighted_mean(values, share)


def weighted_mean(values: Tensor, shares: Tensor) -> Tensor:
    """Return the mean over the first dim, weighted by ``shares``. Half precision is averaged in float32."""
    wide = values.float() if values.dtype.itemsize < 4 else values
    mean: Tensor = torch.tensordot(shares.to(wide), wide, 1)
    return mean.to(values.dtype)


def check_alike(held: Mapping[int, Mapping[str, Tensor]]) -> None:
    """Raise a ValueError unless all members have tensors of the same keys and shapes."""
    (first, first_tensors), *others = held.items()
    for row, row_tensors in others:
        for name in dict.fromkeys([*first_tensors, *row_tensors]):
            if (
                name not in row_tensors
                or name not in first_tensors
                or row_tensors[name].shape != first_tensors[name].shape
            ):
                shapes = [
                    list(member_tensors[name].shape) if name in member_tensors else "none"
                    for member_tensors in (first_tensors, row_tensors)
                ]
                raise ValueError(
                    f"average of members of different shapes: {name} is {shapes[0]} in row {first} and {shapes[1]} in "
                    f"row {row}. Average members of one shape, by rows="
                )
