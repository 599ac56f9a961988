from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from hfusion.core.tree import leaves
from hfusion.runtime.copying import copy_now
from hfusion.runtime.cut_values import Bundle, detached, restore, spill, tracked

CPU = torch.device("cpu")


def spilled(values: dict[str, Any]) -> Bundle:
    bundle, moves = spill(values, None, pinned=False)
    copy_now(moves)
    return bundle


def restored(bundle: Bundle, names: list[str]) -> dict[str, Any]:
    values, moves = restore(bundle, names, CPU)
    copy_now(moves)
    return values


BASE = torch.arange(24.0).view(4, 6)


TENSORS = {
    "contiguous": BASE,
    "transposed": BASE.T,
    "offset": BASE[1:, 2:4],
    "expanded": BASE[:1].expand(5, 6),
    "channels last": torch.arange(48.0).view(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    "empty": torch.empty(0, 3),
    "one number": torch.tensor(3),
    "bool": BASE > 3,
    "half": BASE.bfloat16(),
    "complex": torch.complex(BASE, BASE),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_with_its_strides(kind: str) -> None:
    tensor = TENSORS[kind]
    result = restored(spilled({"x": tensor}), ["x"])["x"]
    assert torch.equal(result, tensor)
    assert (result.dtype, result.shape, result.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert result.storage_offset() == tensor.storage_offset()
    assert not tensor.numel() or result.data_ptr() != tensor.data_ptr()


def test_tensors_of_one_storage_share_it_again_and_move_once() -> None:
    values = {"x": BASE, "rows": (BASE[1], BASE[2:]), "other": torch.ones(3)}
    bundle = spilled(values)
    assert sum(bundle.sizes) == BASE.nbytes + 12
    result = restored(bundle, ["rows", "x"])
    assert list(result) == ["rows", "x"]
    result["x"].zero_()
    assert not any(row.any() for row in result["rows"])
    assert BASE.any()
    assert len({tensor.untyped_storage().data_ptr() for tensor in leaves([result["x"], result["rows"]], Tensor)}) == 1


def test_empty_storages_are_no_shared_storage() -> None:
    values = {"a": torch.empty(0), "b": torch.empty(0, 2), "c": torch.ones(2)}
    result = restored(spilled(values), ["a", "b", "c"])
    assert [tensor.shape for tensor in result.values()] == [(0,), (0, 2), (2,)]
    assert torch.equal(result["c"], torch.ones(2))


def test_nests_numbers_and_need_of_gradients() -> None:
    leaf = torch.ones(2, requires_grad=True)
    values = {"nest": [1, (leaf, None), "a", BASE], "number": 2.5}
    bundle = spilled(values)
    result = restored(bundle, ["nest", "number"])
    assert result["number"] == 2.5
    number, (inner, nothing), word, plain = result["nest"]
    assert (number, nothing, word) == (1, None, "a")
    assert inner.requires_grad
    assert inner.is_leaf
    assert not plain.requires_grad
    assert isinstance(result["nest"], list)
    assert isinstance(result["nest"][1], tuple)


def test_the_bundle_is_a_copy() -> None:
    tensor = torch.ones(3)
    bundle = spilled({"x": tensor})
    tensor.zero_()
    first = restored(bundle, ["x"])["x"]
    first.fill_(7)
    assert restored(bundle, ["x"])["x"].tolist() == [1, 1, 1]


def test_torchs_named_tuples_keep_their_class() -> None:
    value = torch.ones(3, 2).max(0)
    result = restored(spilled({"x": value}), ["x"])["x"]
    assert type(result) is torch.return_types.max
    assert torch.equal(result[0], value[0])


def test_detached_values_are_new_leaves_that_need_what_they_needed() -> None:
    weight = torch.ones(2, requires_grad=True)
    values = {"x": [weight * 2, BASE], "n": 3, "y": weight}
    result = detached(values)
    assert result["n"] == 3
    assert all(leaf.is_leaf for leaf in leaves(result, Tensor))
    tensors = tracked(result)
    assert list(tensors) == ["x #0", "y #0"] == list(tracked(values))
    assert tensors["x #0"].data_ptr() == values["x"][0].data_ptr()
    assert tensors["y #0"] is not weight


def test_values_of_one_form_take_the_place_of_those_before() -> None:
    first = spilled({"x": BASE.T, "n": 1})
    again, moves = spill({"x": (BASE * 2).T, "n": 1}, first, pinned=False)
    copy_now(moves)
    assert again is first
    assert torch.equal(restored(first, ["x"])["x"], (BASE * 2).T)


@pytest.mark.parametrize(
    "values",
    [
        {"x": BASE, "n": 1},
        {"x": BASE.T, "n": 2},
        {"x": BASE.double().T, "n": 1},
        {"x": BASE[:, :3].clone().T, "n": 1},
        {"x": BASE.clone().requires_grad_().T, "n": 1},
        {"y": BASE.T, "n": 1},
    ],
    ids=["strides", "number", "dtype", "size", "gradient", "name"],
)
def test_values_of_another_form_do_not(values: dict[str, Any]) -> None:
    first = spilled({"x": BASE.T, "n": 1})
    other, moves = spill(values, first, pinned=False)
    copy_now(moves)
    assert other is not first
    assert torch.equal(restored(first, ["x"])["x"], BASE.T)
    assert restored(other, list(values))["n"] == values["n"]


def test_numbers_that_are_equal_may_be_others() -> None:
    first = spilled({"x": BASE, "n": 0.0})
    other, _ = spill({"x": BASE, "n": -0.0}, first, pinned=False)
    assert math.copysign(1.0, other.values["n"]) == -1.0
