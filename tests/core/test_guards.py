"""Assumptions of a trace about sizes, checked on numbers and on another trace's symbols."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from hfusion.capture.export import capture
from hfusion.core.guards import Assumptions, Guards, fixed, open_dims


class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).sum(1) + (y if y.shape[0] > 4 else y * 2).mean(0)


@pytest.mark.parametrize(
    ("shapes", "holds"),
    [
        ([(3, 8), (6, 4)], True),
        ([(2, 10), (7, 5)], True),
        ([(2, 9), (7, 5)], False),
        ([(2, 10), (7, 4)], False),
        ([(2, 10), (3, 5)], False),
        ([(1, 10), (7, 5)], False),
        ([(2, 10), (0, 5)], False),
    ],
)
def test_sizes(shapes: list[tuple[int, ...]], holds: bool) -> None:
    captured = capture(Halves(), (torch.ones(3, 8), torch.ones(6, 4)), {}, dims=[{1}, {1}])
    assert captured.guards(shapes) is holds
    assert isinstance(captured.guards, Guards)
    assumed = captured.guards.assumptions()
    assert assumed(shapes) is holds
    # They are plain values.
    assert Assumptions(*ast.literal_eval(repr((assumed.sizes, assumed.code)))) == assumed


def symbolic(*sizes: int) -> Tensor:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context: object = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
    return mode.from_tensor(torch.ones(sizes), symbolic_context=context, source=ConstantSource("x"))  # type: ignore[arg-type]


def test_a_question_to_symbols_is_noted_there() -> None:
    inner, outer = symbolic(4, 6), symbolic(4, 6)
    assert inner.shape[0] < inner.shape[1]
    assert Guards((inner,)).hold([tuple(outer.shape)])
    assert Guards((outer,)).hold([(5, 7)])
    assert not Guards((outer,)).hold([(7, 5)])


def test_a_size_that_a_trace_has_fixed_is_not_open() -> None:
    x = symbolic(4, 6)
    assert open_dims(x) == {0, 1}
    assert int(x.shape[1]) == 6
    assert open_dims(x) == {0}
    assert fixed(x.shape[1]) == 6
    assert not Guards((x,)).hold([(4, 7)])
    assert Guards((x, 3)).hold([(9, 6), ()])
