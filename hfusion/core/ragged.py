"""One tensor per member, of sizes that differ: batches of different sizes, and what an array gives for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, overload

from torch import Tensor

_OPERATORS = (
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
    *("neg", "abs", "invert", "lt", "le", "gt", "ge", "float", "int"),
)


class Ragged:
    """B tensors, one per member, that cannot be stacked because their sizes differ.

    `hfusion.stacked` returns it for a list of batches of different sizes. A fused module and `hfusion.per_model` return
    it for outputs whose shapes differ between members. ``y[b]`` is the tensor of member b, with its autograd history.

    It is no tensor: arithmetic and functions of torch raise a TypeError. Apply them per member, by
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

    def __reduce__(self) -> Any:
        return Ragged, (self._tensors,)

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


def _refusing(name: str) -> Callable[..., NoReturn]:
    def method(self: Ragged, *others: Any) -> NoReturn:
        _refuse(name)

    return method


for _name in _OPERATORS:
    for _method in (f"__{_name}__", f"__r{_name}__"):
        setattr(Ragged, _method, _refusing(_name))
