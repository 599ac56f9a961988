from __future__ import annotations

from typing import Any

import pytest
import torch

from hfusion.core.layout import Layout
from hfusion.ops.conv import channels_last, product, product_each, side_by_side
from hfusion.ops.rule import call_per_member
from tests.oracle import Case, check, draws, lowerings, member_graph, t

aten = torch.ops.aten
# Of operators that are called by themselves, torch's warnings reach Python from 2.15 on.
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

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


@pytest.mark.parametrize("case", CONVOLUTIONS + TRANSPOSED + WITHOUT_BATCH, ids=str)
def test_convolution(case: Case) -> None:
    check(case)


@pytest.mark.parametrize(
    ("case", "functions"),
    [
        (CONVOLUTIONS[0], [side_by_side, call_per_member]),
        (CONVOLUTIONS[2], [product, side_by_side, product_each]),
        (CONVOLUTIONS[6], [side_by_side, channels_last]),
        (CONVOLUTIONS[10], [side_by_side, channels_last, product]),
        (CONVOLUTIONS[11], [side_by_side, channels_last]),
        (TRANSPOSED[4], [side_by_side, channels_last]),
    ],
    ids=lambda value: str(value) if isinstance(value, Case) else " ".join(f.__name__ for f in value),
)
def test_lowerings_of_a_convolution(case: Case, functions: list[Any]) -> None:
    graphs = lowerings(member_graph(case, [torch.zeros(d.shape) for d in draws(case.args)]), [Layout.STACKED] * 3, 2)
    assert [next(n.meta["lowering"].fn for n in g.graph.nodes if "choice" in n.meta) for g in graphs] == functions


@pytest.mark.parametrize("shared", [True, False], ids=["dense", "grouped"])
@pytest.mark.parametrize(
    ("kernel", "image", "order"),
    [((3, 3), (6, 7), torch.channels_last), ((2, 3, 2), (4, 5, 6), torch.channels_last_3d)],
)
@pytest.mark.parametrize("channels", [1, 4])
def test_one_convolution_of_all_members_is_in_channels_last(
    shared: bool, kernel: tuple[int, ...], image: tuple[int, ...], order: torch.memory_format, channels: int
) -> None:
    convolve = torch.ops.aten.conv2d.default if len(image) == 2 else torch.ops.aten.conv3d.default
    weight = torch.randn(3, 2, channels, *kernel)
    x = torch.randn(5, channels if shared else 3 * channels, *image)
    output = side_by_side(convolve, x, weight, None, False, groups=1 if shared else 3)
    assert output.is_contiguous(memory_format=order)
    assert not output.is_contiguous()
