"""Which sizes the members' own code gives for other sizes of its inputs, told by runs with a few of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.capture.own_code import Follows, Result
from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.capture.intercept import Island
    from hfusion.capture.recorded import RecordedCall


def other_sizes(
    args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Sequence[Collection[int]]
) -> list[list[tuple[Any, Any]]]:
    """For each size that varies by ``dims`` of the leaves, the call with half of it, and with one more."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    pairs = list(zip_longest(leaves, dims, fillvalue=()))
    sizes = sorted({leaf.shape[d] for leaf, found in pairs if isinstance(leaf, Tensor) for d in found} - {0, 1})
    return [
        [
            pytree.tree_unflatten([_resized(leaf, found, size, other) for leaf, found in pairs], spec)
            for other in ((size + 1) // 2, size + 1)
        ]
        for size in sizes
    ]


def _resized(leaf: Any, dims: Collection[int], size: int, other: int) -> Any:
    """A tensor with ``other`` entries in those of ``dims`` that have ``size``; the first come again at the end."""
    if not isinstance(leaf, Tensor):
        return leaf
    found = leaf.detach()
    for dim in dims:
        if leaf.shape[dim] == size:
            found = found.index_select(dim, torch.arange(other, device=leaf.device) % size)
    return found.clone().requires_grad_(leaf.requires_grad)


def foretold(
    island: Island, call: RecordedCall, others: Sequence[RecordedCall] | None, numbers: Sequence[int]
) -> tuple[Any, ...]:
    """The flat results of a call: tensors as `Result`, whose sizes may follow those of its inputs.

    Args:
        others: the same call with other sizes; None if none is known.
        numbers: of the flat arguments, the numbers that a size may follow, too.

    Raises:
        FusionError: a size, or a number among the results, follows none of them.
    """
    results = pytree.tree_leaves(call.output)
    if island.path == "" and island.method == "forward" and others != ():
        return tuple(_result(leaf, leaf.shape, free=True) if isinstance(leaf, Tensor) else leaf for leaf in results)
    if others is None:
        raise FusionError(f"{island} can only run in a loop over members, and takes no sizes but those of one call")
    rows = list(zip(results, *(pytree.tree_leaves(other.output) for other in others), strict=True))
    sources = list(_sources(call, others, numbers))
    found = []
    for leaf, *same in rows:
        if isinstance(leaf, Tensor):
            shapes = list(zip(leaf.shape, *(other.shape for other in same), strict=True))
            found.append(_result(leaf, [_followed(island, sizes, sources) for sizes in shapes]))
        elif any(other != leaf for other in same):
            raise FusionError(f"{island} can only run in a loop over members, and gives numbers that follow from sizes")
        else:
            found.append(leaf)
    return tuple(found)


@dataclass(frozen=True)
class _Size:
    """A size of an input, by place and dim as of `Follows`, in all calls."""

    place: int
    dim: int
    values: tuple[int, ...]


def _sources(call: RecordedCall, others: Sequence[RecordedCall], numbers: Sequence[int]) -> Iterator[_Size]:
    flat = [pytree.tree_leaves((one.args, one.kwargs)) for one in (call, *others)]
    tensors = [[leaf for leaf in leaves if isinstance(leaf, Tensor)] for leaves in flat]
    for place, inputs in enumerate(zip(*tensors, strict=True)):
        for dim in range(inputs[0].dim()):
            yield _Size(place, dim, tuple(x.shape[dim] for x in inputs))
    for k, position in enumerate(numbers):
        yield _Size(-1 - k, 0, tuple(leaves[position] for leaves in flat))


def _followed(island: Island, sizes: tuple[int, ...], sources: Sequence[_Size]) -> int | Follows:
    if len(set(sizes)) == 1:
        return sizes[0]
    for source in sources:
        more = {size - value for size, value in zip(sizes, source.values, strict=True)}
        if len(more) == 1:
            return Follows(source.place, source.dim, more.pop())
    raise FusionError(
        f"{island} can only run in a loop over members, and gives sizes that follow none of its inputs ({sizes} in "
        "calls of other sizes)"
    )


def _result(leaf: Tensor, shape: Sequence[Any], free: bool = False) -> Result:
    return Result(tuple(shape), leaf.dtype, leaf.device, free)
