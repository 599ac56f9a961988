"""Inputs of an array: shared by all members, or one per member."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, overload

import torch
from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass(frozen=True, eq=False)
class StackedInput:
    """A tensor ``[B, *S]`` of which member b sees row b."""

    tensor: Tensor


def stacked(xs: Any) -> Any:
    """Mark an argument of a fused module as one value per member.

    Args:
        xs: a tensor ``[B, *S]``; a list or tuple of B values, one per member, whose tensors may differ in sizes,
            such as the number of samples or of classes; or a mapping, nested structure or dataclass known to torch's
            pytree whose tensors are ``[B, *S]``.

    Returns:
        The same structure with every tensor marked; pass it in place of the argument. Tensors of different sizes are a
        `Ragged`.

    Raises:
        ValueError: rows of different structures, dtypes, devices or numbers of dims, or a value without tensors.

    Example:
        >>> stacked([torch.zeros(3, 4), torch.zeros(5, 4)]).sizes  # a batch of 3 for member 0, of 5 for member 1
        (3, 5)
        >>> stacked([torch.zeros(8, 2), torch.zeros(8, 3)])  # targets for heads of 2 and of 3 outputs
        Ragged(2 members: float32 [8, 2], [8, 3])
    """
    if isinstance(xs, Ragged):
        return xs
    if isinstance(xs, Tensor):
        if xs.dim() == 0:
            raise ValueError("hf.stacked got a tensor without dims; give it one value per member, [B, ...]")
        return StackedInput(xs)
    if isinstance(xs, Sequence) and not isinstance(xs, str):
        return _stack_rows(list(xs))
    if isinstance(xs, Mapping) or not pytree.tree_structure(xs).is_leaf():
        return pytree.tree_map(stacked, xs)
    raise ValueError(f"hf.stacked got {type(xs).__name__}; give it a tensor [B, ...] or a list of B tensors")


def _stack_rows(rows: list[Any]) -> Any:
    if not rows:
        raise ValueError("hf.stacked got an empty list; give it one value per member")
    flat, specs = zip(*(pytree.tree_flatten(row) for row in rows), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError("hf.stacked got rows of different structures; every member needs the same")
    return pytree.tree_unflatten([_stack_leaf(leaves) for leaves in zip(*flat, strict=True)], specs[0])


def _stack_leaf(leaves: tuple[Any, ...]) -> Any:
    if not all(isinstance(leaf, Tensor) for leaf in leaves):
        if not any(isinstance(leaf, Tensor) for leaf in leaves) and all(leaf == leaves[0] for leaf in leaves):
            return leaves[0]
        kinds = ", ".join("a tensor" if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves)
        raise ValueError(f"hf.stacked got {kinds}; only tensors may differ between members. Give a tensor for each")
    if len({(leaf.shape, leaf.dtype, leaf.device) for leaf in leaves}) == 1:
        return StackedInput(torch.stack(leaves))
    if len({(leaf.dim(), leaf.dtype, leaf.device) for leaf in leaves}) > 1:
        shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype} {leaf.device}" for leaf in leaves)
        raise ValueError(
            f"hf.stacked got rows of different dtypes, devices or numbers of dims: {shapes}; only sizes may differ "
            "between members"
        )
    return Ragged(leaves)


def call_arguments(inputs: Any, keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments for ``inputs``: a tuple or list of arguments, a dict of keywords, or one value."""
    if isinstance(inputs, Tensor):
        return (inputs,), keywords
    if isinstance(inputs, Mapping):
        return (), {**inputs, **keywords}
    return tuple(inputs) if isinstance(inputs, list | tuple) else (inputs,), keywords


def entry_counts(values: Any) -> list[int]:
    """Return the number of members' entries in each stacked argument of ``values``, any nest."""
    leaves = pytree.tree_leaves(values, is_leaf=is_stacked)
    return [len(leaf.tensor if is_stacked(leaf) else leaf) for leaf in leaves if is_per_member(leaf)]


def is_per_member(leaf: Any) -> bool:
    return isinstance(leaf, StackedInput | Ragged)


def is_stacked(leaf: Any) -> bool:
    return isinstance(leaf, StackedInput)


def take_entries(value: Any, entries: Sequence[int]) -> Any:
    """``value``, any nest, with these entries of what is stacked in it."""
    if isinstance(value, Tensor):
        return value
    return pytree.tree_map(lambda leaf: _entries_of(leaf, entries), value, is_leaf=is_stacked)


def _entries_of(leaf: Any, entries: Sequence[int]) -> Any:
    if isinstance(leaf, Ragged):
        return stacked([leaf[entry] for entry in entries])
    if not isinstance(leaf, StackedInput):
        return leaf
    if list(entries) == list(range(entries[0], entries[0] + len(entries))):
        return StackedInput(leaf.tensor[entries[0] : entries[0] + len(entries)])
    return StackedInput(leaf.tensor[torch.tensor(entries, device=leaf.tensor.device)])


# One tensor per member, of sizes that differ: batches of different sizes, and what an array gives for them.


class Ragged:
    """B tensors, one per member, that cannot be stacked because their sizes differ.

    `hfusion.stacked` returns it for a list of batches of different sizes. A fused module and `hfusion.per_model` return
    it for outputs whose shapes differ between members. ``y[b]`` is the tensor of member b, with its autograd history.

    It is no tensor: arithmetic and functions of torch raise a TypeError. Apply functions per member, by
    ``hf.per_model(function)(y)``, ``y.map(function)``, or to ``y[b]``.

    Example:
        >>> import torch
        >>> y = Ragged([torch.zeros(3, 2), torch.zeros(5, 2)])
        >>> y
        Ragged(2 members: float32 [3, 2], [5, 2])
        >>> len(y), y[1].shape, y.sizes
        (2, torch.Size([5, 2]), (3, 5))
    """

    __slots__ = ("__weakref__", "_tensors")

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._tensors = tuple(tensors)
        if not self._tensors or not all(isinstance(tensor, Tensor) for tensor in self._tensors):
            raise ValueError(f"Ragged takes one tensor per member, got {list(map(type, self._tensors))}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """The first size of each member's tensor: its number of samples; 1 for a tensor without dims."""
        return tuple(tensor.shape[0] if tensor.dim() else 1 for tensor in self._tensors)

    def map(self, fn: Callable[[Tensor], Tensor]) -> Ragged:
        """Apply ``fn`` to each member's tensor, such as ``y.map(Tensor.detach)``."""
        return Ragged(map(fn, self._tensors))

    def __len__(self) -> int:
        return len(self._tensors)

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._tensors)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: int | slice) -> Tensor | Ragged:
        """Return the tensor of one member, or those of a slice of members. Raises IndexError."""
        if isinstance(index, slice):
            return Ragged(self._tensors[index])
        if not isinstance(index, int):
            raise TypeError(f"index {index!r} of a Ragged: give a member first, then index its tensor: y[b][...]")
        return self._tensors[index]

    def __repr__(self) -> str:
        dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in self._tensors}
        shapes = ", ".join(str(list(tensor.shape)) for tensor in self._tensors)
        return f"Ragged({len(self)} members: {'/'.join(sorted(dtypes))} {shapes})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Tensor | int | float | complex):
            _refuse("==")
        return self is other

    __hash__ = object.__hash__

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__") and hasattr(Tensor, name):
            raise AttributeError(f"a Ragged has no .{name}, as the sizes of its members differ; {_REMEDY}")
        raise AttributeError(f"'Ragged' object has no attribute {name!r}")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> NoReturn:
        _refuse(f"torch.{getattr(func, '__name__', func)}")


_REMEDY = "apply it per member: hf.per_model(function)(y), y.map(function), or y[b] for member b"


def _refuse(operation: str) -> NoReturn:
    raise TypeError(f"{operation} takes tensors, and a Ragged holds one of another size for each member; {_REMEDY}")
