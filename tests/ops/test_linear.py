from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.ops import linear
from tests.oracle import Case, check, t

aten = torch.ops.aten

CASES = [
    # Without elements, no size can be inferred.
    Case(aten.matmul.default, (t(5, 2, 0), t(0, 3)), members=(1, 3)),
    Case(aten.matmul.default, (t(2, 0, 3), t(3, 4)), members=(2,)),
    Case(aten.linear.default, (t(2, 0, 4), t(5, 4), t(5)), members=(2,)),
    Case(aten.linear.default, (t(3, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(3, 4), t(5, 4))),
    Case(aten.linear.default, (t(4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(4), t(5, 4))),
    Case(aten.linear.default, (t(2, 3, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(2, 3, 2, 4), t(5, 4))),
    Case(aten.linear.default, (t(3, 1), t(5, 1), t(5))),
    Case(aten.linear.default, (t(0, 4), t(5, 4), t(5))),
    Case(aten.linear.default, (t(3, 4), t(4))),
    # torch broadcasts a bias of another shape.
    *(Case(aten.linear.default, (t(3, 4), t(5, 4), t(*shape))) for shape in ((), (1,), (1, 5), (3, 5))),
    Case(aten.mm.default, (t(3, 4), t(4, 5))),
    Case(aten.bmm.default, (t(2, 3, 4), t(2, 4, 5))),
    Case(aten.mv.default, (t(3, 4), t(4))),
    Case(aten.dot.default, (t(4), t(4))),
    Case(aten.outer.default, (t(3), t(4))),
    *(
        Case(aten.matmul.default, (t(*a), t(*b)))
        for a in ((4,), (3, 4), (2, 3, 4), (2, 1, 3, 4))
        for b in ((4,), (4, 5), (2, 4, 5), (2, 2, 4, 5))
    ),
    Case(aten.addmm.default, (t(3, 5), t(3, 4), t(4, 5)), {"beta": 0.5, "alpha": 2}),
    Case(aten.addmm.default, (t(5), t(3, 4), t(4, 5))),
    Case(aten.addmm.default, (t(3, 1), t(3, 4), t(4, 5))),
    Case(aten.addmv.default, (t(3), t(3, 4), t(4)), {"beta": 0.5, "alpha": 2}),
    Case(aten.addmv.default, (t(1), t(3, 4), t(4))),
    Case(aten.baddbmm.default, (t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)), {"beta": 0.5, "alpha": 2}),
    Case(aten.baddbmm.default, (t(3, 1), t(2, 3, 4), t(2, 4, 5))),
    Case(aten.bilinear.default, (t(3, 4), t(3, 2), t(5, 4, 2), t(5))),
    Case(aten.bilinear.default, (t(2, 3, 4), t(2, 3, 2), t(5, 4, 2))),
    Case(aten.bilinear.default, (t(4), t(2), t(5, 4, 2), t(5))),
    Case(aten.einsum.default, ("ij,jk->ik", [t(3, 4), t(4, 5)])),
    Case(aten.einsum.default, ("bq, bk", [t(2, 4), t(2, 5)])),
    Case(aten.einsum.default, ("b...i,oi->b...o", [t(2, 3, 4), t(5, 4)])),
    Case(aten.einsum.default, ("...ij,...j", [t(2, 3, 4), t(4)])),
    Case(aten.einsum.default, ("ii->i", [t(3, 3)])),
    Case(aten.einsum.default, ("i,i->", [t(3), t(3)])),
    Case(aten.einsum.default, ("zij,zjk,zkl->zil", [t(2, 3, 4), t(2, 4, 5), t(2, 5, 2)])),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_linear(case: Case) -> None:
    check(case)


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_linear_with_its_own_backward(shape: tuple[int, ...], bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "OWN_BACKWARD_NUMEL", 0)
    check(Case(aten.linear.default, (t(*shape), t(5, 4), *([t(5)] if bias else []))))


def leaf(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def test_second_derivatives_of_the_own_backward() -> None:
    operands = (leaf(2, 3, 4), leaf(2, 5, 4), leaf(2, 5))
    assert torch.autograd.gradgradcheck(linear.TokenMajor.apply, operands)


def test_gradients_of_complex_operands_by_the_own_backward() -> None:
    operands = [torch.randn(s, dtype=torch.complex128, requires_grad=True) for s in ((2, 3, 4), (2, 5, 4), (2, 5))]
    assert torch.autograd.gradcheck(linear.TokenMajor.apply, operands)


def test_autocast_reaches_the_products() -> None:
    x, weight = torch.randn(2, 3, 200), torch.randn(2, 200, 200, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = linear.linear_stacked(x, weight, None)
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32


@pytest.mark.parametrize("norm", [1e-3, 0.04, 0.3, 1.0, 4.0])
def test_exponentials_of_matrices_are_the_members_to_the_bit(norm: float) -> None:
    """Torch takes another approximation for a batch of matrices than for one."""

    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            drawn = torch.randn(6, 6, dtype=torch.float64).tril(-1)
            self.w = nn.Parameter((drawn - drawn.mT) * (norm / drawn.abs().sum()))

        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.matrix_exp(self.w)

    models = [Turning() for _ in range(3)]
    actual = hf.fuse(models)(torch.eye(6, dtype=torch.float64))
    assert torch.equal(actual, torch.stack([torch.matrix_exp(model.w) for model in models]))
