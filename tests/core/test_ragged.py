"""Tensors of different sizes, one per member, and what may be done with them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

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
