"""Models of other packages: two members, trained for two steps of Adam and evaluated, equal those alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.alone import close
from tests.foreign.models import FOREIGN, Foreign

MEMBERS = 2

# Other packages warn of what is theirs.
pytestmark = [pytest.mark.foreign, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def _members(case: Foreign) -> list[nn.Module]:
    found = []
    for seed in range(MEMBERS):
        torch.manual_seed(seed)
        random.seed(seed)
        found.append(case.make())
    return found


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _row(outputs: Any, member: int) -> Any:
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[member], outputs)


def _compare(ours: Any, theirs: list[Any], what: str) -> None:
    leaves = zip(*map(pytree.tree_leaves, theirs), strict=True)
    for stack, rows in zip(pytree.tree_leaves(ours), leaves, strict=True):
        if isinstance(stack, Tensor):
            close(stack, rows, what)


@pytest.mark.parametrize("name", FOREIGN)
def test_trained_as_alone(name: str) -> None:
    case = FOREIGN[name]
    alone, fused = _members(case), hf.fuse(_members(case))
    ours = hf.optim.Adam(_trained(fused), lr=1e-2)
    theirs = [torch.optim.Adam(_trained(model), lr=1e-2) for model in alone]
    for step in range(2):
        batch = case.batch()
        outputs = fused(*batch.args, **batch.kwargs)
        expected = [model(*batch.args, **batch.kwargs) for model in alone]
        _compare(outputs, expected, f"step {step}: output")
        ours.zero_grad()
        torch.stack([case.loss(_row(outputs, member)) for member in range(MEMBERS)]).sum().backward()
        ours.step()
        for optimizer, output in zip(theirs, expected, strict=True):
            optimizer.zero_grad()
            case.loss(output).backward()
            optimizer.step()
        for key, stack in fused.state_dict().items():
            if isinstance(stack, Tensor):
                close(stack, [model.state_dict()[key] for model in alone], f"step {step}: {key}")
    fused.eval()
    batch = case.batch()
    with torch.no_grad():
        outputs = fused(*batch.args, **batch.kwargs)
        _compare(outputs, [model.eval()(*batch.args, **batch.kwargs) for model in alone], "eval")
