"""Each private name of torch in the table exists on the installed torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from tests.torch_private.private_names import PRIVATE_NAMES, PrivateNames

aten = torch.ops.aten


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def stepped() -> torch.optim.Optimizer:
    """An optimizer whose step a scheduler has seen."""
    opt = optimizer()
    torch.optim.lr_scheduler.StepLR(opt, 1)
    opt.step()
    return opt


def read_by_workers() -> Any:
    iterator = iter(DataLoader([1, 2], num_workers=1))
    assert len(list(iterator)) == 2
    return iterator


OWNERS: dict[str, Callable[[], Any]] = {
    "a Tensor": lambda: torch.zeros(1),
    "an UntypedStorage": lambda: torch.zeros(1).untyped_storage(),
    "a Generator": torch.Generator,
    "an autograd.Function": lambda: Doubled,
    "an Optimizer": optimizer,
    "the step of an optimizer": stepped,
    "a DataLoader": lambda: DataLoader([1]),
    "an iterator of a DataLoader": read_by_workers,
    "a Module": lambda: nn.Linear(2, 2),
    "a state dict": lambda: nn.Linear(2, 2).state_dict(),
    "a pruning method": lambda: next(iter(prune.identity(nn.Linear(2, 2), "weight")._forward_pre_hooks.values())),
    "an OptimizedModule": lambda: torch.compile(nn.Linear(2, 2)),
    "an OpOverload": lambda: aten.add.Tensor,
    "an OpOverloadPacket": lambda: aten.add,
}


def owner(path: str) -> Any:
    """The object that the table names: of a kind, or a module, or what follows its name."""
    if path in OWNERS:
        return OWNERS[path]()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(owner(parent), name)


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=lambda row: row.purpose)
def test_the_names_exist(row: PrivateNames) -> None:
    first, installed = (tuple(map(int, text.split(".")[:2])) for text in (row.tried.split()[0], torch.__version__))
    if installed < first:
        pytest.skip(f"tried from torch {row.tried.split()[0]} on")
    held: dict[str, Any] = {}
    missing = []
    for path, name in row.pairs():
        if path not in held:
            held[path] = owner(path)
        try:
            # Some modules are imported by their names only.
            present = hasattr(held[path], name) or importlib.import_module(f"{path}.{name}")
        except ModuleNotFoundError:
            present = False
        missing += [] if present else [f"{path}.{name}"]
    assert missing == []


def test_no_row_is_there_twice() -> None:
    assert len({row.purpose for row in PRIVATE_NAMES}) == len(PRIVATE_NAMES)
