"""The cases of the sub-benchmark ``shard``: arrays of large models, and adapters of one frozen base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.bench.cases import classified, tokens
from hfusion.bench.models import TransformerLM, frozen, lora, mlp


@dataclass(frozen=True)
class ShardCase:
    """Some members, one batch, and the parts of the need that are tried as budgets: 4 means a quarter.

    ``make_models()`` always gives the same weights. ``units(model)``: the modules that FSDP gathers one at a time.
    """

    name: str
    about: str
    make_models: Callable[[], list[nn.Module]]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    loss: Callable[..., Tensor] = F.cross_entropy
    parts: tuple[int, ...] = (1, 2, 4, 8)


def seeded(make_model: Callable[[], nn.Module], members: int) -> list[nn.Module]:
    """Members with weights of their own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [make_model() for _ in range(members)]


def adapters(members: int, width: int, layers: int, rank: int) -> list[nn.Module]:
    """Members that are adapters of one base, which is the same object in all."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = frozen(width, layers)
        return [lora(base, rank) for _ in range(members)]


def linears(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, nn.Linear)]


def children(model: nn.Module) -> list[nn.Module]:
    return list(model.children())


def blocks(model: nn.Module) -> list[nn.Module]:
    return list(model.get_submodule("blocks").children())


def _mlp(name: str, about: str, width: int, batch: int, parts: tuple[int, ...] = (1, 2, 4, 8)) -> ShardCase:
    make = partial(seeded, partial(mlp, *[width] * 21), 4)
    return ShardCase(name, about, make, partial(classified, batch, width), linears, parts=parts)


def _transformer(name: str, about: str, width: int, batch: int, parts: tuple[int, ...] = (1, 2, 4, 8)) -> ShardCase:
    make = partial(TransformerLM, vocabulary=64, width=width, layers=6, heads=4, length=32)
    return ShardCase(name, about, partial(seeded, make, 4), partial(tokens, batch, 32, 64), blocks, parts=parts)


def _lora(members: int) -> ShardCase:
    return ShardCase(
        f"lora x {members}",
        f"{members} adapters of rank 8 on one frozen base, 6 layers of 1024, batch 32",
        partial(adapters, members, 1024, 6, 8),
        partial(classified, 32, 1024),
        children,
        parts=(1, 2),
    )


CASES = (
    _mlp("mlp, batch 128", "4 MLPs of 20 layers of 256: more to compute than to move", 256, 128),
    _mlp("mlp, batch 16", "the same with less to compute", 256, 16),
    _transformer("transformer", "4 transformer LMs d=128, 6 layers, sequence 32, batch 4", 128, 4),
    _mlp("large mlp", "4 MLPs of 20 layers of 512, batch 128", 512, 128, (1, 4, 8)),
    _transformer("large transformer", "the transformer LMs with d=256, batch 8", 256, 8, (1, 8)),
    *map(_lora, (1, 4, 16)),
)
QUICK_CASES = (replace(CASES[0], parts=(1, 4)), *(replace(_lora(members), parts=(2,)) for members in (1, 4)))
# What an accelerator is bought for: more to compute for each byte that is moved.
LARGE_CASES = (
    _mlp("wide mlp, batch 128", "4 MLPs of 20 layers of 1024", 1024, 128, (1, 2, 8)),
    _mlp("wide mlp, batch 2048", "the same with more to compute", 1024, 2048, (1, 2, 8)),
    _transformer("wide transformer", "the transformer LMs with d=1024, batch 16", 1024, 16, (1, 2, 8)),
)
