"""Values of programs: sizes that are assumed, ragged stacks, seeds of members, keys of what a function reads."""

from __future__ import annotations

import ast
import copy
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.fingerprint import read_state
from hfusion.core.guards import Assumptions, Guards, fixed, open_dims
from hfusion.core.layout import shared_to_stacked
from hfusion.core.member_random import MemberSeeds
from hfusion.core.ragged import Ragged
from tests.forwards.outside import READS


# The fingerprint of the state that a function reads changes with each value that it reads.
@pytest.mark.parametrize("kind", READS)
def test_another_value_gives_another_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    put(1.0)
    before = read_state(read)
    put(0.5)
    # None: more than can be compared, so that nothing is reused.
    assert before is None or read_state(read) != before
    put(1.0)
    assert read_state(read) == before


# Assumptions of a trace about sizes, checked on numbers and on another trace's symbols.
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


# A value that all members share becomes one value for each of them.
@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_half_precision_complex_numbers_get_the_sum_of_gradients() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64, requires_grad=True)
    stack = shared_to_stacked(x.to(torch.complex32), 3)
    assert torch.equal(stack.to(torch.complex64), x.detach().expand(3, 2))
    grad = torch.tensor([[1, 1j], [2, 2j], [3, 3j]], dtype=torch.complex64)
    stack.backward(grad.to(torch.complex32))
    assert x.grad is not None
    assert torch.equal(x.grad, grad.sum(0))


# Tensors of different sizes, one per member, and what may be done with them.
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


# Random numbers from seeds of the members: theirs alone, and as random as they should be.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeds(members: int) -> torch.Tensor:
    return torch.empty(members, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0))


def hashed(x: int) -> int:
    """As its source has it."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def test_the_numbers_are_hashes() -> None:
    seed = (0x1234567 << 32) + 0x89ABCDEF
    low = hashed((0x89ABCDEF + 0x9E3779B9) & 0xFFFFFFFF)
    high = hashed(0x1234567 ^ low)
    single = MemberSeeds(torch.tensor([seed])).uniform((1, 2, 3), torch.float32)
    wide = MemberSeeds(torch.tensor([seed])).uniform((1, 2, 3), torch.float64)
    for index in range(6):
        number = hashed((index + low) & 0xFFFFFFFF)
        first, second = hashed(number ^ high), hashed(number ^ hashed(high ^ 0x9E3779B9))
        assert single.flatten()[index].item() == (first >> 8) * 2.0**-24
        assert wide.flatten()[index].item() == (first >> 5) * 2.0**-27 + (second >> 6) * 2.0**-53


@DTYPES
def test_the_numbers_of_a_member_are_its_own(dtype: torch.dtype) -> None:
    whole, row = MemberSeeds(seeds(5)), MemberSeeds(seeds(5)[3:4])
    for shape in ((2, 3), (7,)):
        draws = whole.uniform((5, *shape), dtype), row.uniform((1, *shape), dtype)
        assert torch.equal(draws[0][3:4], draws[1])
        assert draws[0].dtype is dtype
    assert not torch.equal(whole.uniform((5, 4), dtype), whole.uniform((5, 4), dtype))
    assert len(whole.uniform((5, 99), dtype)[:, 0].unique()) == 5


@DTYPES
def test_normal(dtype: torch.dtype) -> None:
    values = MemberSeeds(seeds(4)).normal((4, 1 << 14), dtype).double()
    assert torch.isfinite(values).all()
    assert values.mean().item() == pytest.approx(0, abs=5 / math.sqrt(values.numel()))
    assert values.var().item() == pytest.approx(1, abs=0.05)
    assert (values**4).mean().item() == pytest.approx(3, abs=0.2)
