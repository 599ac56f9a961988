"""hf.stacked marks tensors in every nest, and nothing else."""

from __future__ import annotations

import torch

import hfusion as hf
from hfusion.core.calls import StackedInput, is_stacked


def test_a_tensor_is_marked_as_it_is() -> None:
    x = torch.ones(3, 2)
    assert hf.stacked(x).tensor is x


def test_a_list_is_one_row_per_member() -> None:
    marked = hf.stacked([torch.full((2,), float(b)) for b in range(3)])
    assert torch.equal(marked.tensor, torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))


def test_rows_may_be_nests() -> None:
    marked = hf.stacked([{"x": torch.full((2,), float(b)), "n": 5, "t": (torch.ones(1),)} for b in range(3)])
    assert marked["x"].tensor.shape == (3, 2)
    assert marked["n"] == 5
    assert is_stacked(marked["t"][0])


def test_a_mapping_of_stacks() -> None:
    marked = hf.stacked({"x": torch.ones(3, 2), "y": torch.ones(3)})
    assert all(isinstance(value, StackedInput) for value in marked.values())
