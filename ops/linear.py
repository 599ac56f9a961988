"""Dense layers and products of matrices. Weights are stacked ``[B, O, I]``, biases ``[B, O]``."""

from __future__ import annotations

import string
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.core.layout import Layout, lift
from hfusion.ops.lowering import Efficiency
from hfusion.ops.rule import Answer, Call, Operand, RuleTable, Site, Value, always_loop, loop, scalars_alike, table
from hfusion.ops.saved import FACTORS
from hfusion.torch_private.dispatch_modes import in_transform

aten = torch.ops.aten

STACKED = Layout.STACKED

# Fits to forward and backward of single layers, one core of a Xeon (AVX-512), 4 and 16 members.
# On a GPU as in ops/conv.py: one call 0.2 to 0.5 ms, in a loop 0.08 to 0.17 ms for each.
GEMM = Efficiency(13, arithmetic=0.87, gpu=Efficiency(18))
LOOP = Efficiency(9, arithmetic=0.8, gpu=Efficiency(10))

# Weights [B, O, I] of at least this many elements pay for a Python autograd node that spares the copy of
# their gradient into the weight's own order.
OWN_BACKWARD_NUMEL = 1 << 15


def linear(site: Site, input: Value, weight: Value, bias: Value | None) -> Answer:
    if weight.rank != 2 or (bias is not None and bias.shape != weight.shape[:1]):
        return None
    if weight.shared and (bias is None or bias.shared):
        if input.layout is Layout.LISTED:
            return loop(site, {"input": input, "weight": weight, "bias": bias}, LOOP)
        return site.call(
            F.linear, (input.to(STACKED), weight, bias), STACKED, "one GEMM, shared weight", efficiency=GEMM
        )
    x = input if input.shared else input.to(STACKED)
    if weight.shared and bias is not None:
        operands = (x, weight, bias.to(STACKED, input.rank))
        return site.call(linear_own_bias, operands, STACKED, "one GEMM, shared weight", efficiency=GEMM)
    b = None if bias is None else bias.to(STACKED)
    if input.shared:
        return site.call(
            linear_shared_input, (x, weight.to(STACKED), b), STACKED, "one GEMM, shared input", efficiency=GEMM
        )
    batched = site.call(linear_stacked, (x, weight.to(STACKED), b), STACKED, "baddbmm", efficiency=GEMM)
    # The loop is no faster, but takes what is listed as it is.
    return batched, loop(site, {"input": input, "weight": weight, "bias": bias}, LOOP)


def linear_own_bias(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """``x [*, I]`` or ``[B, *, I]``, ``weight [O, I]``, ``bias [B, 1, ..., O]`` -> ``[B, *, O]``."""
    return F.linear(x, weight) + bias


def linear_shared_input(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [*, I]``, ``weight [B, O, I]``, ``bias [B, O]`` -> ``[B, *, O]``, a view of one product."""
    members, outputs, inputs = weight.shape
    flat = weight.reshape(-1, inputs)
    if x.dim() != 2:
        y = F.linear(x, flat, None if bias is None else bias.reshape(-1))
        return y.view(*x.shape[:-1], members, outputs).movedim(-2, 0)
    # Feature-major: the next layer's product reads it, and its gradient, without a copy.
    y = torch.mm(flat, x.t()) if bias is None else torch.addmm(bias.reshape(-1, 1), flat, x.t())
    return y.view(members, outputs, -1).mT


def linear_stacked(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [B, *, I]``, ``weight [B, O, I]``, ``bias [B, O]`` -> ``[B, *, O]``, in the memory order of ``x``.

    Of the two ways to write the product the one is taken that reads and writes in that order: feature-major
    ``[B, I, N]`` where a shared input began so, else token-major.
    """
    if x.dim() != 3:
        members, outputs, inputs = weight.shape
        return linear_stacked(x.reshape(members, -1, inputs), weight, bias).reshape(*x.shape[:-1], outputs)
    if x.stride(1) == 1 and x.shape[2] > 1:
        if bias is None:
            return torch.bmm(weight, x.mT).mT
        return torch.baddbmm(bias.unsqueeze(2), weight, x.mT).mT
    if _own_backward(weight):
        y: Tensor = TokenMajor.apply(x, weight, bias)  # type: ignore[no-untyped-call]
        return y
    return _token_major(x, weight, bias)


def _own_backward(weight: Tensor) -> bool:
    """True if `TokenMajor` can be used and is faster than torch's own backward.

    Autocast must see the products themselves, to cast their gradients back; so must the transforms of torch.func.
    """
    return (
        weight.numel() >= OWN_BACKWARD_NUMEL
        and weight.requires_grad
        and torch.is_grad_enabled()
        and not torch.is_autocast_enabled(weight.device.type)
        and not in_transform()
    )


def _token_major(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None:
        return torch.bmm(x, weight.mT)
    return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)


class TokenMajor(torch.autograd.Function):
    """``x [B, N, I]``, ``weight [B, O, I]``, ``bias [B, O]`` -> ``[B, N, O]``.

    Autograd's own gradient of the transposed weight is ``[B, I, O]``; accumulating it costs a transposition.
    The backward is made of differentiable operators, so higher derivatives work.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _token_major(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad
        return (
            torch.bmm(grad, weight.conj()) if needs_grad[0] else None,
            torch.bmm(grad.mT, x.conj()) if needs_grad[1] else None,
            grad.sum(1) if needs_grad[2] else None,
        )


def matmul(site: Site, **factors: Value) -> Call:
    """`torch.matmul` of every combination of ranks; mm, bmm, mv and dot are special cases."""
    self, other = factors.values()
    if self.rank > 2 and other.rank == 2 and not other.shared:
        if self.shared:
            return site.call(
                matmul_shared_rows, (self, other.to(STACKED)), STACKED, "one GEMM, shared input", saves=FACTORS
            )
        return site.call(matmul_rows, (self.to(STACKED), other.to(STACKED)), STACKED, "bmm", saves=FACTORS)
    rank = max(self.rank, other.rank, 2)
    a = self if self.shared else self.to(STACKED, rank=rank)
    b = other if other.shared else other.to(STACKED, rank=rank - 1 if other.rank == 1 else rank)
    row = self.rank == 1 and not self.shared
    column = other.rank == 1 and not other.shared
    if not row and not column:
        return site.call(torch.matmul, (a, b), STACKED, "bmm")
    return site.call(matmul_vectors, (a, b, row, column), STACKED, "bmm")


def matmul_rows(a: Tensor, b: Tensor) -> Tensor:
    """``a [B, *, K]``, ``b [B, K, E]`` -> ``[B, *, E]``; `torch.matmul` would copy ``b`` for every leading index."""
    y = torch.bmm(a.reshape(a.shape[0], -1, a.shape[-1]), b)
    return y.view(*a.shape[:-1], b.shape[-1])


def matmul_shared_rows(a: Tensor, b: Tensor) -> Tensor:
    """``a [*, K]``, ``b [B, K, E]`` -> ``[B, *, E]``, a view of one product."""
    members, inner, columns = b.shape
    y = torch.mm(a.reshape(-1, inner), b.movedim(0, 1).reshape(inner, members * columns))
    return y.view(*a.shape[:-1], members, columns).movedim(-2, 0)


def matmul_vectors(a: Tensor, b: Tensor, row: bool, column: bool) -> Tensor:
    """`torch.matmul`, ``a [B, ..., 1, K]`` or ``b [B, ..., K]`` holding one vector of each member."""
    y = torch.matmul(a, b.unsqueeze(-1) if column else b)
    y = y.squeeze(-1) if column else y
    if not row:
        return y
    # The row's dim of size 1 comes last where ``b``, a vector, took the columns' dim away.
    return y.squeeze(-1 if column or b.dim() == 1 else -2)


def outer(site: Site, self: Value, vec2: Value) -> Call:
    return site.call(outer_product, (self.to(STACKED), vec2.to(STACKED)), STACKED, "mul")


def outer_product(a: Tensor, b: Tensor) -> Tensor:
    """``a [B, N]``, ``b [B, M]`` -> ``[B, N, M]``."""
    return a.unsqueeze(-1) * b.unsqueeze(-2)


@scalars_alike
def addmm(site: Site, self: Value, mat1: Value, mat2: Value, beta: Any, alpha: Any) -> Call:
    operands = (self.to(STACKED, rank=2), mat1.to(STACKED), mat2.to(STACKED))
    return site.call(torch.baddbmm, operands, STACKED, "baddbmm", {"beta": beta, "alpha": alpha})


@scalars_alike
def addmv(site: Site, self: Value, mat: Value, vec: Value, beta: Any, alpha: Any) -> Call:
    operands = (self.to(STACKED, rank=1), mat.to(STACKED), vec.to(STACKED), beta, alpha)
    return site.call(addmv_stacked, operands, STACKED, "baddbmm")


def addmv_stacked(x: Tensor, mat: Tensor, vec: Tensor, beta: Any, alpha: Any) -> Tensor:
    """``x [B, N]`` or ``[B, 1]``, ``mat [B, N, K]``, ``vec [B, K]`` -> ``[B, N]``."""
    return torch.baddbmm(x.unsqueeze(-1), mat, vec.unsqueeze(-1), beta=beta, alpha=alpha).squeeze(-1)


@scalars_alike
def baddbmm(site: Site, self: Value, batch1: Value, batch2: Value, beta: Any, alpha: Any) -> Call:
    operands = (self.to(STACKED, rank=3), batch1.to(STACKED), batch2.to(STACKED), beta, alpha)
    return site.call(baddbmm_folded, operands, STACKED, "baddbmm")


def baddbmm_folded(x: Tensor, a: Tensor, b: Tensor, beta: Any, alpha: Any) -> Tensor:
    """``x`` broadcastable to ``[B, N, P, Q]``, ``a [B, N, P, K]``, ``b [B, N, K, Q]`` -> ``[B, N, P, Q]``."""
    shape = (*a.shape[:-1], b.shape[-1])
    flat = x.expand(*shape[:2], *x.shape[2:]).flatten(0, 1)
    return torch.baddbmm(flat, a.flatten(0, 1), b.flatten(0, 1), beta=beta, alpha=alpha).view(shape)


def bilinear(site: Site, input1: Value, input2: Value, weight: Value, bias: Value | None) -> Call:
    operands = [v.to(STACKED) for v in (input1, input2, weight)]
    return site.call(bilinear_stacked, (*operands, None if bias is None else bias.to(STACKED)), STACKED, "einsum")


def bilinear_stacked(x1: Tensor, x2: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x1 [B, *, I]``, ``x2 [B, *, J]``, ``weight [B, O, I, J]``, ``bias [B, O]`` -> ``[B, *, O]``."""
    y = torch.einsum("z...i,zoij,z...j->z...o", x1, weight, x2)
    return y if bias is None else y + lift(bias, x1.dim() - 1)


def einsum(site: Site, equation: str, tensors: list[Value], path: Any) -> Call | None:
    fused = _einsum_of_array(equation, [v.shared for v in tensors])
    if fused is None:
        return None
    operands: list[Value | Operand] = [v if v.shared else v.to(STACKED) for v in tensors]
    return site.call(torch.ops.aten.einsum.default, (fused, operands), STACKED, f"einsum {fused}", {"path": path})


def _einsum_of_array(equation: str, shared: list[bool]) -> str | None:
    """The equation with a letter for the members in front; ``None`` if no letter is free."""
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    free = [letter for letter in string.ascii_letters if letter not in equation]
    if not free:
        return None
    if not arrow:
        letters = inputs.replace(",", "").replace(".", "")
        output = "..." if "." in inputs else ""
        output += "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    terms = inputs.split(",")
    terms = [term if is_shared else free[0] + term for term, is_shared in zip(terms, shared, strict=True)]
    return f"{','.join(terms)}->{free[0]}{output}"


RULES: RuleTable = {
    aten.linear.default: linear,
    aten.addmm.default: addmm,
    aten.addmv.default: addmv,
    aten.baddbmm.default: baddbmm,
    aten.outer.default: outer,
    aten.einsum.default: einsum,
    aten.bilinear.default: bilinear,
    **table((aten.matmul.default, aten.mm.default, aten.bmm.default, aten.mv.default, aten.dot.default), matmul),
    # torch approximates a single matrix and a batch differently, by up to 1e-11 (2.13).
    **table((aten.matrix_exp.default, aten.linalg_matrix_exp.default), always_loop),
}
