"""The minibatches of a sweep: one loader for all trials, or a function that makes loaders from values of the space."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.errors import PlanError
from hfusion.device.generators import draws_kept


class Loaders:
    """Returns the loader for values of the space. Trials with equal values share a loader.

    Args:
        loader: minibatches that can be read again for every epoch, or a function that returns them.
        seed: the function is called after ``torch.manual_seed(seed)``.
    """

    def __init__(self, loader: Iterable[Any] | Callable[..., Iterable[Any]], seed: int = 0) -> None:
        self._source, self._seed = loader, seed
        self._created_loaders: list[tuple[Mapping[str, Any], Iterable[Any]]] = []

    @property
    def function(self) -> Callable[..., Iterable[Any]] | None:
        """The function that makes loaders; None if the loader itself was given."""
        source: Any = self._source
        return None if isinstance(source, Iterable) or not callable(source) else source

    @property
    def created_loaders(self) -> list[Any]:
        """The loaders created so far, or the given one."""
        return [loader for _, loader in self._created_loaders] if self.function is not None else [self._source]

    def loader(self, values: Mapping[str, Any]) -> Iterable[Any]:
        """Return the loader for these arguments of the function. Raises PlanError if it returns no loader."""
        function = self.function
        if function is None:
            return cast("Iterable[Any]", self._source)
        for cached_values, loader in self._created_loaders:
            if same_values(cached_values, values):
                return loader
        with draws_kept():
            torch.manual_seed(self._seed)
            created: Any = function(**values)
        if not isinstance(created, Iterable) or isinstance(created, Iterator):
            arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise PlanError(
                f"loader({arguments}) gave {type(created).__name__}: return minibatches that can be read again for "
                "every epoch, such as a DataLoader"
            )
        loader = created
        self._created_loaders.append((dict(values), loader))
        return loader

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, which create their own loaders."""
        return {**vars(self), "_created_loaders": []}


def same_values(first: Any, second: Any) -> bool:
    """Return whether two nested values are equal, including types and tensors."""
    leaves, spec = pytree.tree_flatten(first)
    others, other_spec = pytree.tree_flatten(second)
    return spec == other_spec and all(map(_equal_leaves, leaves, others))


def _equal_leaves(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.dtype == second.dtype and torch.equal(first, second)
    return first is second or (type(first) is type(second) and bool(first == second))
