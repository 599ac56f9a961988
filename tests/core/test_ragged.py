"""Tensors of different sizes, one per member, and what may be done with them."""

from __future__ import annotations

import copy
import operator
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import hfusion as hf
from hfusion.core.ragged import Ragged


def ragged(*sizes: int) -> Ragged:
    return Ragged([torch.arange(size * 2.0).view(size, 2) for size in sizes])


def test_it_is_a_sequence_of_the_members_tensors() -> None:
    y = ragged(3, 1)
    assert len(y) == 2
    assert y.sizes == (3, 1)
    assert [tensor.shape[0] for tensor in y] == [3, 1]
    assert y[-1] is y[1]
    assert y[:1].sizes == (3,)
    assert repr(y) == "Ragged(2 members: float32 [3, 2], [1, 2])"
    assert y.map(torch.Tensor.double)[0].dtype == torch.float64
    with pytest.raises(IndexError):
        y[2]
    with pytest.raises(TypeError, match="give a member first"):
        y[0, 1]  # type: ignore[call-overload]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_hold_the_same(copied: Any) -> None:
    y = ragged(3, 1)
    again = copied(y)
    assert again is not y
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))


OPERATIONS: dict[str, Any] = {
    "+": lambda y: y + 1,
    "tensor +": lambda y: torch.ones(2) + y,
    "number *": lambda y: 2 * y,
    "-": operator.neg,
    "<": lambda y: y < 1,
    "==": lambda y: y == torch.ones(2),
    "!=": lambda y: y != 0,
    "@": lambda y: y @ torch.ones(2),
    "torch.relu": torch.relu,
    "cross_entropy": lambda y: F.cross_entropy(y, y),
    "float": float,
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_arithmetic_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match="per_model"):
        OPERATIONS[name](ragged(3, 1))


def test_attributes_of_tensors_are_refused_by_name() -> None:
    with pytest.raises(AttributeError, match=r"no \.mean.*per_model"):
        ragged(3, 1).mean()
    assert not hasattr(ragged(3, 1), "shape")
    assert not hasattr(ragged(3, 1), "unknown")


def test_stacked_gives_it_for_batches_of_different_sizes() -> None:
    xs = [torch.zeros(3, 2), torch.zeros(5, 2)]
    assert isinstance(hf.stacked(xs), Ragged)
    assert hf.stacked(hf.stacked(xs)).sizes == (3, 5)
    nested = hf.stacked([{"x": x, "mask": (x[:, 0], 1)} for x in xs])
    assert nested["x"].sizes == nested["mask"][0].sizes == (3, 5)
    assert nested["mask"][1] == 1
    widths = hf.stacked([torch.zeros(3, 2), torch.zeros(3, 4)])
    assert isinstance(widths, Ragged)
    assert [list(tensor.shape) for tensor in widths] == [[3, 2], [3, 4]]


WRONG = {
    "another rank": [torch.zeros(3, 2), torch.zeros(5)],
    "dtype": [torch.zeros(3), torch.zeros(5, dtype=torch.int64)],
}


@pytest.mark.parametrize("name", WRONG)
def test_only_sizes_may_differ(name: str) -> None:
    xs: list[Tensor] = WRONG[name]
    with pytest.raises(ValueError, match="only sizes may differ"):
        hf.stacked(xs)


@pytest.mark.parametrize("tensors", [[], [1.0]])
def test_it_holds_tensors(tensors: Any) -> None:
    with pytest.raises(ValueError, match="one tensor per member"):
        Ragged(tensors)
