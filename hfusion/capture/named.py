"""The tensors of a model by name."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from hfusion.core.memory import is_plain, overlap


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of ``model`` by key; a tensor with two names comes twice."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def is_array(module: nn.Module) -> bool:
    """Return whether ``module`` is an array, which a model may hold as any other submodule."""
    return hasattr(type(module), "fingerprint")


def holder_of(model: nn.Module, key: str) -> tuple[Any, str, str]:
    """Return where ``model`` holds its tensor ``key``: the dict of a submodule, and the name in it; and the key."""
    path, _, name = key.rpartition(".")
    module = model.get_submodule(path)
    return (module._parameters if name in module._parameters else module._buffers), name, key


def ties(named: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tied tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}


def overlaps(named: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """Pairs of names whose tensors are two, and have memory in common."""
    held: dict[Any, dict[str, Tensor]] = {}
    for name, tensor in named.items():
        if is_plain(tensor) and tensor.numel() and not tensor.is_meta:
            held.setdefault((tensor.device, tensor.untyped_storage().data_ptr()), {})[name] = tensor
    for group in held.values():
        for (key, a), (other_key, b) in itertools.combinations(group.items(), 2):
            if a is not b and overlap(a, b):
                yield key, other_key
