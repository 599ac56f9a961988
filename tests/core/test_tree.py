from __future__ import annotations

import torch
from torch import Tensor

from hfusion.core.tree import contains, leaves, map_leaves


def test_leaves_and_change_go_through_nests_in_order() -> None:
    a, b, c = (torch.tensor(k) for k in range(3))
    nest = [a, (b, 5), [[c]]]
    assert [int(leaf) for leaf in leaves(nest, Tensor)] == [0, 1, 2]
    assert map_leaves(nest, Tensor, int) == [0, (1, 5), [[2]]]
    assert map_leaves(nest, int, str) == [a, (b, "5"), [[c]]]


def test_mappings_and_several_kinds() -> None:
    nest = {"x": (1, 2.5), "y": [{"z": "three"}]}
    assert list(leaves(nest, (float, str))) == [2.5, "three"]
    assert map_leaves(nest, str, len) == {"x": (1, 2.5), "y": [{"z": 5}]}
    assert contains(nest, str)
    assert not contains(nest, bytes)
    # What it asks for is found even if it counts as false.
    assert contains([torch.zeros(2)], Tensor)
