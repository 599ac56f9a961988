"""The minibatches of a sweep: one loader for all trials, or a function that makes loaders from values of the space."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.errors import PlanError
from hfusion.device.backend import draws_kept, seed_in_use
from hfusion.tasks.reading import generators, generators_kept, length, reading, restart_workers


class Loaders:
    """Returns the loader for values of the space. Trials with equal values share a loader.

    Args:
        loader: minibatches that can be read again for every epoch, or a function that returns them.
        seed: the function is called after ``torch.manual_seed(seed)``.
    """

    def __init__(self, loader: Iterable[Any] | Callable[..., Iterable[Any]], seed: int = 0) -> None:
        self._source: Any = loader
        # None if the loader itself was given.
        self.function = None if isinstance(loader, Iterable) or not callable(loader) else loader
        self._seed = seed
        self._created_loaders: list[tuple[Mapping[str, Any], Iterable[Any]]] = []

    def loader(self, values: Mapping[str, Any]) -> Iterable[Any]:
        """Return the loader for these arguments of the function. Raises PlanError if it returns no loader."""
        if self.function is None:
            return self._source  # type: ignore[no-any-return]
        for cached_values, loader in self._created_loaders:
            if same_values(cached_values, values):
                return loader
        with draws_kept():
            torch.manual_seed(self._seed)
            created: Any = self.function(**values)
        if not isinstance(created, Iterable) or isinstance(created, Iterator):
            arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise PlanError(
                f"loader({arguments}) gave {type(created).__name__}: return minibatches that can be read again for "
                "every epoch, such as a DataLoader"
            )
        self._created_loaders.append((dict(values), created))
        return created

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


# Reading of the minibatches of an epoch, under a seed and on a device.


@contextmanager
def seeded(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Context manager: seed torch and the loader's generators with ``seed``, and restore all of them at the end."""
    restart_workers(loader)
    with draws_kept(), generators_kept(loader):
        seed_in_use(seed)
        for generator in generators(loader):
            generator.manual_seed(seed)
        yield


def batches_on(role: str, loader: Iterable[Any], device: torch.device) -> Generator[tuple[Any, Any]]:
    """Yield the minibatches of a loader on a device. Raises PlanError if there are none, or one is not a pair."""
    count = 0
    with reading(loader) as batches:
        for count, batch in enumerate(batches, 1):  # noqa: B007
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                raise PlanError(
                    f"a minibatch of the {role} must be a pair (inputs, target), got {type(batch).__name__}. Inputs "
                    "are a tensor, a tuple of arguments or a dict of keyword arguments."
                )
            yield _on(batch[0], device), _on(batch[1], device)
    if not count:
        raise PlanError(f"the {role} gave no minibatch: give one that can be read again for every epoch")


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def minibatches(loader: Iterable[Any]) -> int:
    """Return the number of minibatches; a loader without a length is read, and its generators are restored."""
    try:
        return length(loader)
    except TypeError:
        with seeded(loader, 0), reading(loader) as batches:
            return sum(1 for _ in batches)


def first_inputs(loader: Iterable[Any]) -> tuple[Any, float]:
    """Return a copy of the inputs of the first minibatch on the CPU, and the seconds in which another one is read.

    Generators are restored. Raises PlanError as `batches_on` does.
    """
    with seeded(loader, 0), closing(batches_on("loader", loader, torch.device("cpu"))) as batches:
        # A copy, so that a forward that writes into its inputs does not change the loader's data.
        inputs = copy.deepcopy(next(batches)[0])
        began = time.perf_counter()
        next(batches, None)
        return inputs, time.perf_counter() - began
