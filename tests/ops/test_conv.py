from __future__ import annotations

import dataclasses

import pytest
import torch

from hfusion.ops import conv
from tests.oracle import Case, check, t

aten = torch.ops.aten

X1, X2, X3 = t(2, 4, 9), t(2, 4, 6, 7), t(2, 4, 4, 5, 4)

CONVOLUTIONS = [
    Case(aten.conv1d.default, (X1, t(6, 4, 3), t(6))),
    Case(aten.conv1d.default, (X1, t(6, 2, 3), t(6), [2], [1], [2], 2)),
    Case(aten.conv1d.default, (X1, t(6, 4, 1), t(6))),
    Case(aten.conv1d.default, (X1, t(6, 4, 1), None)),
    Case(aten.conv1d.default, (X1, t(6, 4, 1), t(6), [2])),
    Case(aten.conv1d.padding, (X1, t(6, 4, 4), t(6), [1], "same")),
    Case(aten.conv2d.default, (X2, t(6, 4, 3, 3), t(6))),
    Case(aten.conv2d.default, (t(2, 1, 6, 6), t(5, 1, 3, 3), t(5), [1, 1], [1, 1])),
    Case(aten.conv2d.default, (X2, t(8, 2, 3, 3), t(8), [2, 2], [1, 1], [1, 1], 2)),
    Case(aten.conv2d.default, (X2, t(4, 1, 3, 2), None, [1, 2], [2, 1], [2, 1], 4)),
    Case(aten.conv2d.default, (X2, t(6, 4, 1, 1), t(6))),
    Case(aten.conv2d.default, (X2, t(6, 4, 1, 1), None, [2, 2])),
    Case(aten.conv2d.default, (X2, t(6, 4, 1, 1), None, [1], [1])),
    Case(aten.conv2d.padding, (X2, t(6, 4, 2, 3), t(6), [1, 1], "same", [1, 2])),
    Case(aten.conv2d.padding, (X2, t(6, 2, 2, 3), t(6), [2, 1], "valid", [1, 1], 2)),
    Case(aten.conv3d.default, (X3, t(6, 4, 2, 3, 2), t(6))),
    Case(aten.conv3d.default, (X3, t(6, 2, 2, 3, 2), t(6), [2, 1, 1], [1, 1, 0], [1, 2, 1], 2)),
    Case(aten.conv3d.default, (X3, t(6, 4, 1, 1, 1), t(6))),
    Case(aten.conv3d.padding, (X3, t(6, 4, 2, 3, 2), None, [1, 1, 1], "same")),
]

TRANSPOSED = [
    Case(aten.conv_transpose1d.default, (X1, t(4, 6, 3), t(6))),
    Case(aten.conv_transpose1d.default, (X1, t(4, 3, 3), t(6), [2], [1], [1], 2, [2])),
    Case(aten.conv_transpose2d.input, (X2, t(4, 6, 3, 3), t(6))),
    Case(aten.conv_transpose2d.input, (X2, t(4, 3, 3, 2), t(6), [2, 2], [1, 0], [1, 0], 2, [1, 2])),
    Case(aten.conv_transpose2d.input, (X2, t(4, 6, 1, 1), None)),
    Case(aten.conv_transpose3d.input, (X3, t(4, 3, 2, 3, 2), t(3), [1, 2, 1], [1, 0, 0])),
]

WITHOUT_BATCH = [
    Case(aten.conv1d.default, (t(4, 9), t(6, 4, 3), t(6))),
    Case(aten.conv2d.default, (t(4, 6, 7), t(6, 2, 3, 3), t(6), [2, 2], [1, 1], [1, 1], 2)),
    Case(aten.conv2d.default, (t(4, 6, 7), t(6, 4, 3, 3), None)),
    Case(aten.conv2d.padding, (t(4, 6, 7), t(6, 4, 3, 3), t(6), [1, 1], "same")),
    Case(aten.conv3d.default, (t(4, 4, 5, 4), t(6, 4, 2, 2, 2), t(6))),
    Case(aten.conv_transpose2d.input, (t(4, 6, 7), t(4, 6, 3, 3), t(6), [2, 2])),
    Case(aten.conv_transpose2d.input, (t(4, 6, 7), t(4, 3, 3, 3), t(6), [2, 2], [1, 1], [1, 1], 2)),
]


@pytest.mark.parametrize("way", list(conv.Way))
@pytest.mark.parametrize("case", CONVOLUTIONS + TRANSPOSED, ids=str)
def test_convolution_in_every_way(case: Case, way: conv.Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def fixed(facts: conv.Facts) -> conv.Way:
        return conv.Way.PACKED if way is conv.Way.PRODUCT and not facts.pointwise else way

    monkeypatch.setattr(conv, "choose", fixed)
    check(dataclasses.replace(case, members=(1, 3)))


@pytest.mark.parametrize("case", CONVOLUTIONS + TRANSPOSED + WITHOUT_BATCH, ids=str)
def test_convolution(case: Case) -> None:
    check(case)
