"""Reading of the minibatches of an epoch, under a seed and on a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.core.errors import PlanError
from hfusion.device.backend import seed_in_use
from hfusion.device.generators import draws_kept
from hfusion.tasks.reading import generators, length, reading, restart_workers


@contextmanager
def seeded(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Context manager: seed torch and the loader's generators with ``seed``, and restore all of them at the end."""
    restart_workers(loader)
    states = [(generator, generator.get_state()) for generator in generators(loader)]
    with draws_kept():
        seed_in_use(seed)
        for generator, _ in states:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            for generator, state in states:
                generator.set_state(state)


def batches_on(role: str, loader: Iterable[Any], device: torch.device) -> Iterator[tuple[Any, Any]]:
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


def first_inputs(loader: Iterable[Any], device: torch.device) -> Any:
    """Return the inputs of the first minibatch, and restore the generators. Raises PlanError as `batches_on` does."""
    with seeded(loader, 0):
        for inputs, _ in batches_on("loader", loader, device):
            return inputs
    raise AssertionError("unreachable: a loader without minibatches is an error")
