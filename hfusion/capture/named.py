"""The tensors of a model by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of ``model`` by key; a tensor with two names comes twice."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def ties(named: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tied tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}
