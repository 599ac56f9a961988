"""The steps of the fused optimizers on a CUDA device, in Triton: one launch for all tensors of a group.

What follows are the parts of kernels that `hfusion.optim.gpu` writes from formulas. Half precision is
computed in float32 and rounded where torch's optimizers round, after each of their operations: the bits are those of
the members alone. Every generated ``update`` takes

  spots      int32 ``[programs, 3]``: which tensor, member and block of its elements each program updates
  sizes      int64 ``[tensors]``: elements of one member
  stacks     int64 ``[1 + states, tensors]``: addresses of the parameters, then of each state;
             Triton's launcher has a variable ``params`` of its own
  grads      int64 ``[tensors]``: those of the gradients
  scalars    ``[tensors, number, members]``, in the order in which the kernel reads them, in the dtype of the arithmetic
  LANES      how many elements lie together: addresses are multiples of so many, and so are sizes

What it takes of numbers is computed before it, by a kernel of a few threads: so no host computes powers of betas, and
both launches can be recorded. This ``prepare`` takes

  table      float64 ``[number, members]``: the hyper-parameters as the optimizer lists them, and what a step adds to
             the counts
  counts     float32 ``[tensors, members]``: of the steps, which are counted there
  scalars    as above

Gradients are clipped by kernels that take spots, sizes and grads as above, and

  firsts     int64 ``[tensors]``: where in ``partials`` the blocks of a tensor begin, those of its first member first
  partials   of each block of each row, in the widest dtype of the arithmetic
  norms      ``[tensors, members]``
"""

# Triton reads annotations, and knows its own only.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024
"""Elements of one program."""

ROWS = 128
"""Members of one program that computes scalars."""

DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32, torch.float64: tl.float64}
"""What Triton calls the dtypes of parameters."""


@triton.jit
def spot(spots, sizes, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Return the tensor and member that a program updates, the offsets of its elements in the stack, and their mask."""
    row = spots + 3 * tl.program_id(0)
    tensor, member, block = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    # By it the compiler moves as many elements at once.
    size = tl.multiple_of(tl.load(sizes + tensor), LANES)
    within = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, member, member.to(tl.int64) * size + within, within < size


@triton.jit
def address(addresses, tensor, offsets, dtype: tl.constexpr, LANES: tl.constexpr):
    """Return the addresses of the elements."""
    first = tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(first, LANES * dtype.primitive_bitwidth // 8) + offsets


@triton.jit
def loaded(pointers, mask, dtype: tl.constexpr):
    """Return the elements in the dtype of the arithmetic."""
    value = tl.load(pointers, mask)
    return value.to(tl.float32) if dtype.primitive_bitwidth == 16 else value


@triton.jit
def rounded(value, dtype: tl.constexpr):
    """Return the result of one of torch's operations: half precision is computed in float32."""
    return value.to(dtype).to(tl.float32) if dtype.primitive_bitwidth == 16 else value


# The operators of formulas.


@triton.jit
def abs(a, dtype: tl.constexpr):
    return tl.abs(a)


@triton.jit
def sign(a, dtype: tl.constexpr):
    return tl.where(a > 0, 1.0, tl.where(a < 0, -1.0, 0.0))


@triton.jit
def sqrt(a, dtype: tl.constexpr):
    return tl.sqrt(a) if dtype == tl.float64 else tl.sqrt_rn(a)


@triton.jit
def div(a, b, dtype: tl.constexpr):
    return a / b if dtype == tl.float64 else tl.div_rn(a, b)


# A number of each member has no faster division.
div_by = div


@triton.jit
def rsqrt(a, dtype: tl.constexpr):
    return div(1.0, sqrt(a, dtype), dtype)


@triton.jit
def pow(base, exponent, dtype: tl.constexpr):
    """Return a power of a number that is not negative."""
    base += 0 * exponent
    return tl.where(base > 0, tl.exp(exponent * tl.log(tl.where(base > 0, base, 1.0))), 0.0)


@triton.jit
def maximum(a, b, dtype: tl.constexpr):
    """Return the larger one; a NaN on either side stays."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def minimum(a, b, dtype: tl.constexpr):
    """Return the smaller one; a NaN on either side stays."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def where(condition, a, b, dtype: tl.constexpr):
    return tl.where(condition, a, b)


@triton.jit
def add(x, y, alpha, dtype: tl.constexpr):
    """Return ``x + alpha * y``."""
    # As in torch's kernels for CUDA, which do not round the product of half precision.
    return tl.fma(alpha, y, x) if dtype.primitive_bitwidth == 16 else x + alpha * y


@triton.jit
def addcmul(x, a, b, value, dtype: tl.constexpr):
    return add(x, a * b, value, dtype)


@triton.jit
def addcdiv(x, a, b, value, dtype: tl.constexpr):
    return add(x, div(a, b, dtype), value, dtype)


@triton.jit
def lerp(a, b, weight, dtype: tl.constexpr):
    """Interpolate from the nearer end, as torch does."""
    near = tl.abs(weight) < 0.5
    return add(tl.where(near, a, b), b - a, tl.where(near, weight, weight - 1), dtype)


@triton.jit
def _joined(value, ORDER: tl.constexpr):
    """The sum, or for ``ORDER`` 0 the largest: a NaN anywhere is the largest."""
    if ORDER == 0:
        return tl.where(tl.sum((value != value).to(tl.int32)) > 0, float("nan"), tl.max(value))
    return tl.sum(value)


@triton.jit
def partial_norms(
    spots, sizes, grads, firsts, partials,
    ORDER: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Of each block, what norms of ``ORDER`` 1, 2 or infinity, which is 0 here, are computed from."""
    tensor, member, offsets, mask = spot(spots, sizes, BLOCK, LANES)
    value = tl.abs(tl.where(mask, loaded(address(grads, tensor, offsets, dtype, LANES), mask, dtype), 0.0))
    joined = _joined(value * value if ORDER == 2 else value, ORDER)
    blocks = (tl.load(sizes + tensor) + BLOCK - 1) // BLOCK
    index = tl.load(firsts + tensor) + member.to(tl.int64) * blocks + tl.load(spots + 3 * tl.program_id(0) + 2)
    tl.store(partials + index, joined.to(partials.dtype.element_ty))


@triton.jit
def row_norms(
    sizes, firsts, partials, norms, members,
    ORDER: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norms of the rows of each tensor, rounded to ``dtype`` as torch rounds each of them."""
    tensor, member = tl.program_id(0), tl.program_id(1)
    blocks = (tl.load(sizes + tensor) + BLOCK - 1) // BLOCK
    row = partials + tl.load(firsts + tensor) + member * blocks
    total = tl.full([BLOCK], 0.0, partials.dtype.element_ty)
    for first in range(0, blocks, BLOCK):
        within = first + tl.arange(0, BLOCK)
        value = tl.load(row + within, within < blocks, other=0.0)
        total = tl.where((value > total) | (value != value), value, total) if ORDER == 0 else total + value
    norm = _joined(total, ORDER)
    if ORDER == 2:
        norm = sqrt(norm, partials.dtype.element_ty)
    tl.store(norms + tensor * members + member, norm.to(dtype))


@triton.jit
def scale_rows(
    spots, sizes, grads, factors,
    dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Multiply every row by its member's factor, which is rounded to ``dtype`` before, as torch's clipping does."""
    tensor, member, offsets, mask = spot(spots, sizes, BLOCK, LANES)
    factor = rounded(tl.load(factors + member).to(dtype), dtype)
    value = loaded(address(grads, tensor, offsets, dtype, LANES), mask, dtype) * factor
    tl.store(address(grads, tensor, offsets, dtype, LANES), value, mask)


@triton.jit
def counted(counts, advance, mask):
    """Count a step of each member, and return its number. ``advance``: where it is what a member's count grows by."""
    count = tl.load(counts, mask, other=0.0) + tl.load(advance, mask, other=0.0).to(tl.float32)
    tl.store(counts, count, mask)
    return count.to(tl.float64)
