"""The arguments of a call of an array, flat and hashable."""

from __future__ import annotations

import enum
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.calls import Ragged, StackedInput, is_stacked
from hfusion.core.layout import Listed
from hfusion.core.memory import memory_order
from hfusion.core.program import describe_value
from hfusion.core.tree import know_dataclasses
from hfusion.torch_private.dispatch_modes import FakeTensor

# Types of arguments besides tensors: values that cannot change while a program that depends on them is cached.
_NUMBERS = (str, int, float, complex, bytes, enum.Enum, types.NoneType)

_NAMES = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format)

BATCHED = (Tensor, StackedInput)
_TENSORS = (*BATCHED, Ragged)

_LEAVES = (*_TENSORS, Listed, *_NUMBERS, *_NAMES)


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flat: tensors, `StackedInput`, `Ragged` and plain values, and how they were nested."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        if not kwargs and all(isinstance(a, _TENSORS) for a in args):
            return Arguments(args, len(args))
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_stacked)
        if not all(isinstance(leaf, _LEAVES) for leaf in leaves):
            know_dataclasses(leaves)
            leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_stacked)
        for leaf in leaves:
            if not isinstance(leaf, _LEAVES):
                raise ValueError(
                    "arguments must be tensors, numbers, strings, None, and nests of these that torch.utils._pytree "
                    f"knows, got {type(leaf).__name__}"
                )
        return Arguments(tuple(leaves), spec)

    @property
    def key(self) -> Any:
        """A hashable key; calls with the same key run the same program."""
        return (self.spec, self.ties, *map(_leaf_key, self.leaves))

    @property
    def loose_key(self) -> Any:
        """The `key` without sizes: calls with the same loose key may share a capture."""
        return (self.spec, self.ties, *[_leaf_key(leaf, sized=False) for leaf in self.leaves])

    @property
    def ties(self) -> tuple[int, ...]:
        """For each tensor the first one that is the same object, as in self-attention; empty if all are different."""
        numbers = [id(leaf) for leaf in self.leaves if isinstance(leaf, Tensor)]
        return tuple(map(numbers.index, numbers)) if len(set(numbers)) < len(numbers) else ()

    @property
    def numberless_key(self) -> Any:
        """The `loose_key` without the values of numbers."""
        keys = [type(leaf) if type(leaf) in (int, float) else _leaf_key(leaf, sized=False) for leaf in self.leaves]
        return (self.spec, *keys)

    def args_and_kwargs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments as the array takes them."""
        if isinstance(self.spec, int):
            return self.leaves, {}
        args, kwargs = pytree.tree_unflatten(self.leaves, self.spec)
        return args, kwargs

    def of_member(self, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments of member ``member``."""
        rows = [row_of_leaf(leaf, member) for leaf in self.leaves]
        if isinstance(self.spec, int):
            return tuple(rows), {}
        args, kwargs = pytree.tree_unflatten(rows, self.spec)
        return args, kwargs

    @property
    def memory_orders(self) -> tuple[Any, ...]:
        """The memory order of each leaf's dims as a member sees it, hashable and independent of sizes.

        None for contiguous tensors and other values; strides if no order of the dims is contiguous.
        """
        rows = [row_of_leaf(leaf, 0) for leaf in self.leaves]
        return tuple([None if not isinstance(row, Tensor) else _memory_order(row) for row in rows])

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the leaves as a member sees them; empty for values that are no tensors."""
        return [_shape(leaf) for leaf in self.leaves]

    def mapped(self, fn: Callable[[Tensor], Tensor]) -> Arguments:
        """Return the arguments with ``fn`` applied to every tensor, and to the stack of a stacked one."""
        return Arguments(tuple(map_leaf(leaf, fn) for leaf in self.leaves), self.spec)

    @property
    def ragged(self) -> list[Ragged]:
        """The leaves whose sizes differ between members."""
        return [leaf for leaf in self.leaves if isinstance(leaf, Ragged)]

    @property
    def obstacle(self) -> str:
        """Why no program takes the arguments, such as a sparse tensor or a function; empty if one does."""
        for leaf in self.values:
            if isinstance(leaf, Tensor) and leaf.layout is not torch.strided:
                return f"an argument is a tensor of layout {leaf.layout}, which no program takes; give to_dense()"
            if isinstance(leaf, Listed):
                return f"members have different values in an argument, {leaf[0]!r} and others, and no tensor of them"
            if isinstance(leaf, (complex, bytes, *_NAMES)):
                return f"an argument is {leaf!r}, and torch.export takes no {type(leaf).__name__}"
        return ""

    @property
    def values(self) -> list[Any]:
        """The arguments in the form that the program takes: tensors, with stacked ones unwrapped."""
        return [leaf.tensor if isinstance(leaf, StackedInput) else leaf for leaf in self.leaves]


def _memory_order(tensor: Tensor) -> Any:
    if tensor.layout is not torch.strided or tensor.is_contiguous():
        return None
    return memory_order(tensor) or tensor.stride()


def row_of_leaf(leaf: Any, member: int) -> Any:
    """Return one member's part of a leaf."""
    if isinstance(leaf, Ragged | Listed):
        return leaf[member]
    return leaf.tensor[member] if is_stacked(leaf) else leaf


def map_leaf(leaf: Any, fn: Callable[[Tensor], Tensor]) -> Any:
    """Return a leaf with ``fn`` applied to its tensors."""
    if is_stacked(leaf):
        return StackedInput(fn(leaf.tensor))
    if isinstance(leaf, Ragged):
        return leaf.map(fn)
    return fn(leaf) if isinstance(leaf, Tensor) else leaf


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, StackedInput):
        return tuple(leaf.tensor.shape[1:])
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else ()


def _leaf_key(leaf: Any, sized: bool = True) -> Any:
    tensor = leaf.tensor if isinstance(leaf, StackedInput) else leaf
    if isinstance(tensor, Tensor):
        # Forward may ask for the class, and that of a trace stands for a plain tensor.
        kind = Tensor if isinstance(leaf, FakeTensor) else type(leaf)
        return (tensor.shape if sized else tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad, kind)
    # Members' different values are in no program.
    return Listed if isinstance(leaf, Listed) else (type(leaf), leaf)


def is_tensors(leaf: Any) -> bool:
    """Return whether a leaf is a tensor or holds tensors."""
    return isinstance(leaf, _TENSORS)


def describe_leaf(leaf: Any) -> str:
    """Describe a leaf: ``f32[32,64]``, ``stacked f32[4,32,64]``; ``stacked f32[*,64]`` if sizes differ."""
    if isinstance(leaf, Ragged):
        kind = describe_value(leaf[0], None, 0).partition("[")[0]
        if len({tensor.dim() for tensor in leaf}) > 1:
            return f"stacked {kind}[...]"
        sizes = zip(*(tensor.shape for tensor in leaf), strict=True)
        return (
            f"stacked {kind}[{','.join(str(dim_sizes[0]) if len({*dim_sizes}) == 1 else '*' for dim_sizes in sizes)}]"
        )
    return f"stacked {describe_value(leaf.tensor, None, 0)}" if is_stacked(leaf) else describe_value(leaf, None, 0)
