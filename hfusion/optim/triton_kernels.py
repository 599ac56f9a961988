"""The steps of the fused optimizers on a CUDA device, in Triton: one launch for all tensors of a group.

They compute what ``kernels.c`` does, in the order of torch's operations. Half precision is computed in float32 and
rounded where torch's optimizers round, after each of their operations: the bits are those of the members alone. Every
kernel takes

  spots      int32 ``[programs, 3]``: which tensor, member and block of its elements each program updates
  sizes      int64 ``[tensors]``: elements of one member
  stacks     int64 ``[1 + buffers, tensors]``: addresses of the parameters, then of each state buffer;
             Triton's launcher has a variable ``params`` of its own
  grads      int64 ``[tensors]``: those of the gradients
  scalars    ``[tensors, number, members]``, in the order in which the kernel reads them, in the dtype of the arithmetic
  LANES      how many elements lie together: addresses are multiples of so many, and so are sizes

What it takes of numbers is computed before it, by a kernel of a few threads: so no host computes powers of betas, and
both launches can be recorded. Those kernels take

  table      float64 ``[number, members]``: the hyper-parameters as the optimizer lists them, what a step adds to the
             counts, and the options that are flags
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

SCALARS = {"sgd": 7, "adam": 10, "adamw": 10, "adadelta": 6}
"""Numbers of each tensor and member that a kernel reads."""

DTYPES = {
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}
"""What Triton calls the dtypes of parameters."""


@triton.jit
def _spot(spots, sizes, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Return the tensor and member that a program updates, the offsets of its elements in the stack, and their mask."""
    row = spots + 3 * tl.program_id(0)
    tensor, member, block = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    # By it the compiler moves as many elements at once.
    size = tl.multiple_of(tl.load(sizes + tensor), LANES)
    within = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, member, member.to(tl.int64) * size + within, within < size


@triton.jit
def _at(addresses, tensor, offsets, dtype: tl.constexpr, LANES: tl.constexpr):
    """Return the addresses of the elements."""
    first = tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(first, LANES * dtype.primitive_bitwidth // 8) + offsets


@triton.jit
def _load(addresses, tensor, offsets, mask, dtype: tl.constexpr, LANES: tl.constexpr):
    """The elements, in the dtype of the arithmetic."""
    value = tl.load(_at(addresses, tensor, offsets, dtype, LANES), mask)
    return value.to(tl.float32) if dtype.primitive_bitwidth == 16 else value


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    """The result of one of torch's operations: half precision is computed in float32."""
    return value.to(dtype).to(tl.float32) if dtype.primitive_bitwidth == 16 else value


@triton.jit
def _root(value, dtype: tl.constexpr):
    return _rounded(tl.sqrt(value) if dtype == tl.float64 else tl.sqrt_rn(value), dtype)


@triton.jit
def _over(value, by, dtype: tl.constexpr):
    """Not rounded to half precision: torch's addcdiv is not, either."""
    return value / by if dtype == tl.float64 else tl.div_rn(value, by)


@triton.jit
def _plus(value, factor, other, dtype: tl.constexpr):
    """``value + factor * other`` as one operation: torch's add, addcmul, addcdiv and lerp for half precision."""
    if dtype.primitive_bitwidth == 16:
        # As in torch's kernels for CUDA, the product is not rounded.
        return _rounded(tl.fma(factor, other, value), dtype)
    return value + factor * other


@triton.jit
def _decayed(grad, param, sign, decay, dtype: tl.constexpr):
    """The gradient with weight decay; without it, no product with 0, which would carry the NaN of a parameter."""
    step = sign * grad
    return tl.where(decay != 0, _plus(step, decay, param, dtype), step)


@triton.jit
def sgd(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, lr, decay, momentum, fresh, first, nesterov."""
    tensor, member, offsets, mask = _spot(spots, sizes, BLOCK, LANES)
    base = scalars + tensor * 7 * members + member
    sign, lr, decay = tl.load(base), tl.load(base + members), tl.load(base + 2 * members)
    at = _at(stacks, tensor, offsets, dtype, LANES)
    param = _load(stacks, tensor, offsets, mask, dtype, LANES)
    step = _decayed(_load(grads, tensor, offsets, mask, dtype, LANES), param, sign, decay, dtype)
    if BUFFERS:
        momentum, fresh = tl.load(base + 3 * members), tl.load(base + 4 * members)
        first, nesterov = tl.load(base + 5 * members), tl.load(base + 6 * members)
        buffer = _at(stacks + tensors, tensor, offsets, dtype, LANES)
        old = _load(stacks + tensors, tensor, offsets, mask, dtype, LANES)
        mean = tl.where(first != 0, step, _plus(_rounded(momentum * old, dtype), fresh, step, dtype))
        # Members without momentum keep what they have.
        tl.store(buffer, tl.where(momentum != 0, mean, old), mask)
        ahead = tl.where(nesterov != 0, _plus(step, momentum, mean, dtype), mean)
        step = tl.where(momentum != 0, ahead, step)
    tl.store(at, _plus(param, -lr, step, dtype), mask)


@triton.jit
def adam(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, decay, shrink, near, toward, beta2, fresh, correction, eps, step; a third buffer is amsgrad's."""
    tensor, member, offsets, mask = _spot(spots, sizes, BLOCK, LANES)
    base = scalars + tensor * 10 * members + member
    sign, decay, shrink = tl.load(base), tl.load(base + members), tl.load(base + 2 * members)
    near, toward = tl.load(base + 3 * members), tl.load(base + 4 * members)
    beta2, fresh, correction = tl.load(base + 5 * members), tl.load(base + 6 * members), tl.load(base + 7 * members)
    eps, step = tl.load(base + 8 * members), tl.load(base + 9 * members)
    at = _at(stacks, tensor, offsets, dtype, LANES)
    mean_at = _at(stacks + tensors, tensor, offsets, dtype, LANES)
    square_at = _at(stacks + 2 * tensors, tensor, offsets, dtype, LANES)
    param = _load(stacks, tensor, offsets, mask, dtype, LANES)
    grad = _decayed(_load(grads, tensor, offsets, mask, dtype, LANES), param, sign, decay, dtype)
    mean = _load(stacks + tensors, tensor, offsets, mask, dtype, LANES)
    square = _load(stacks + 2 * tensors, tensor, offsets, mask, dtype, LANES)
    # torch.lerp: from the nearer end.
    mean = _plus(tl.where(near != 0, mean, grad), toward, grad - mean, dtype)
    square = _plus(_rounded(beta2 * square, dtype), fresh, grad * grad, dtype)
    tl.store(mean_at, mean, mask)
    tl.store(square_at, square, mask)
    if BUFFERS > 2:
        highest_at = _at(stacks + 3 * tensors, tensor, offsets, dtype, LANES)
        highest = _load(stacks + 3 * tensors, tensor, offsets, mask, dtype, LANES)
        # torch.maximum: a NaN on either side stays.
        square = tl.where((square > highest) | (square != square), square, highest)
        tl.store(highest_at, square, mask)
    root = _rounded(_over(_root(square, dtype), correction, dtype), dtype)
    step = _plus(_rounded(shrink * param, dtype), -step, _over(mean, _rounded(root + eps, dtype), dtype), dtype)
    tl.store(at, step, mask)


adamw = adam


@triton.jit
def adadelta(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, lr, decay, rho, fresh, eps."""
    tensor, member, offsets, mask = _spot(spots, sizes, BLOCK, LANES)
    base = scalars + tensor * 6 * members + member
    sign, lr, decay = tl.load(base), tl.load(base + members), tl.load(base + 2 * members)
    rho, fresh, eps = tl.load(base + 3 * members), tl.load(base + 4 * members), tl.load(base + 5 * members)
    at = _at(stacks, tensor, offsets, dtype, LANES)
    square_at = _at(stacks + tensors, tensor, offsets, dtype, LANES)
    moved_at = _at(stacks + 2 * tensors, tensor, offsets, dtype, LANES)
    param = _load(stacks, tensor, offsets, mask, dtype, LANES)
    grad = _decayed(_load(grads, tensor, offsets, mask, dtype, LANES), param, sign, decay, dtype)
    square = _load(stacks + tensors, tensor, offsets, mask, dtype, LANES)
    moved = _load(stacks + 2 * tensors, tensor, offsets, mask, dtype, LANES)
    square = _plus(_rounded(rho * square, dtype), fresh, grad * grad, dtype)
    ratio = _over(_root(_rounded(moved + eps, dtype), dtype), _root(_rounded(square + eps, dtype), dtype), dtype)
    delta = _rounded(_rounded(ratio, dtype) * grad, dtype)
    tl.store(square_at, square, mask)
    tl.store(moved_at, _plus(_rounded(rho * moved, dtype), fresh, delta * delta, dtype), mask)
    tl.store(at, _plus(param, -lr, delta, dtype), mask)


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
    tensor, member, offsets, mask = _spot(spots, sizes, BLOCK, LANES)
    value = tl.abs(tl.where(mask, _load(grads, tensor, offsets, mask, dtype, LANES), 0.0))
    joined = _joined(value * value if ORDER == 2 else value, ORDER)
    blocks = (tl.load(sizes + tensor) + BLOCK - 1) // BLOCK
    index = tl.load(firsts + tensor) + member.to(tl.int64) * blocks + tl.load(spots + 3 * tl.program_id(0) + 2)
    tl.store(partials + index, joined.to(partials.dtype.element_ty))


@triton.jit
def row_norms(
    which, sizes, firsts, partials, norms, members,
    ORDER: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The norms of the rows of the tensors ``which``, int32, rounded to ``dtype`` as torch rounds each of them."""
    tensor, member = tl.load(which + tl.program_id(0)), tl.program_id(1)
    blocks = (tl.load(sizes + tensor) + BLOCK - 1) // BLOCK
    row = partials + tl.load(firsts + tensor) + member * blocks
    total = tl.full([BLOCK], 0.0, partials.dtype.element_ty)
    for first in range(0, blocks, BLOCK):
        within = first + tl.arange(0, BLOCK)
        value = tl.load(row + within, within < blocks, other=0.0)
        total = tl.where((value > total) | (value != value), value, total) if ORDER == 0 else total + value
    norm = _joined(total, ORDER)
    if ORDER == 2:
        norm = tl.sqrt(norm) if partials.dtype.element_ty == tl.float64 else tl.sqrt_rn(norm)
    tl.store(norms + tensor * members + member, norm.to(dtype).to(norms.dtype.element_ty))


@triton.jit
def scale_rows(
    spots, sizes, grads, factors,
    dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Multiply every row by its member's factor, which is rounded to ``dtype`` before, as torch's clipping does."""
    tensor, member, offsets, mask = _spot(spots, sizes, BLOCK, LANES)
    factor = tl.load(factors + member).to(dtype)
    if dtype.primitive_bitwidth == 16:
        factor = factor.to(tl.float32)
    value = _load(grads, tensor, offsets, mask, dtype, LANES) * factor
    tl.store(_at(grads, tensor, offsets, dtype, LANES), value, mask)


@triton.jit
def _row(table, members, row, ROWS: tl.constexpr):
    """A row of the table for the members of a program."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    return tl.load(table + row * members + member, member < members, other=0.0)


@triton.jit
def _counted(table, counts, members, row, ROWS: tl.constexpr):
    """The number of this step for each member; ``row``: of what it adds."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    pointer = counts + tl.program_id(0) * members + member
    count = tl.load(pointer, member < members, other=0.0) + _row(table, members, row, ROWS).to(tl.float32)
    tl.store(pointer, count, member < members)
    return count.to(tl.float64)


@triton.jit
def _give(scalars, members, NUMBERS: tl.constexpr, number: tl.constexpr, value, ROWS: tl.constexpr):
    """Write one of the scalars."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    row = tl.program_id(0) * NUMBERS + number
    tl.store(scalars + row * members + member, value.to(scalars.dtype.element_ty), member < members)


@triton.jit
def _power(base, count):
    return tl.where(base > 0, tl.exp(count * tl.log(tl.where(base > 0, base, 1.0))), 0.0)


@triton.jit
def sgd_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """Hyper-parameters: lr, momentum, dampening, decay; flags: nesterov, maximize."""
    count = _counted(table, counts, members, 4, ROWS)
    _give(scalars, members, 7, 0, 1 - 2 * _row(table, members, 6, ROWS), ROWS)
    _give(scalars, members, 7, 1, _row(table, members, 0, ROWS), ROWS)
    _give(scalars, members, 7, 2, _row(table, members, 3, ROWS), ROWS)
    _give(scalars, members, 7, 3, _row(table, members, 1, ROWS), ROWS)
    _give(scalars, members, 7, 4, 1 - _row(table, members, 2, ROWS), ROWS)
    _give(scalars, members, 7, 5, tl.where(count == 1, 1.0, 0.0), ROWS)
    _give(scalars, members, 7, 6, _row(table, members, 5, ROWS), ROWS)


@triton.jit
def _adam_scalars(table, counts, scalars, members, DECOUPLED: tl.constexpr, ROWS: tl.constexpr):
    count = _counted(table, counts, members, 5, ROWS)
    lr, decay = _row(table, members, 0, ROWS), _row(table, members, 4, ROWS)
    beta1, beta2 = _row(table, members, 1, ROWS), _row(table, members, 2, ROWS)
    # torch.lerp takes its weight, and what is left of 1, in the dtype of the arithmetic.
    weight = (1 - beta1).to(scalars.dtype.element_ty)
    near = weight < 0.5
    _give(scalars, members, 10, 0, 1 - 2 * _row(table, members, 7, ROWS), ROWS)
    _give(scalars, members, 10, 1, 0 * decay if DECOUPLED else decay, ROWS)
    _give(scalars, members, 10, 2, 1 - lr * decay if DECOUPLED else 1 + 0 * decay, ROWS)
    _give(scalars, members, 10, 3, tl.where(near, 1.0, 0.0), ROWS)
    _give(scalars, members, 10, 4, tl.where(near, weight, weight - 1), ROWS)
    _give(scalars, members, 10, 5, beta2, ROWS)
    _give(scalars, members, 10, 6, 1 - beta2, ROWS)
    _give(scalars, members, 10, 7, tl.sqrt(1 - _power(beta2, count)), ROWS)
    _give(scalars, members, 10, 8, _row(table, members, 3, ROWS), ROWS)
    _give(scalars, members, 10, 9, lr / (1 - _power(beta1, count)), ROWS)


@triton.jit
def adam_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """Hyper-parameters: lr, beta1, beta2, eps, decay; flags: amsgrad, maximize."""
    _adam_scalars(table, counts, scalars, members, False, ROWS)


@triton.jit
def adamw_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """Return the scalars of AdamW, in the order of those of Adam."""
    _adam_scalars(table, counts, scalars, members, True, ROWS)


@triton.jit
def adadelta_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """Hyper-parameters: lr, rho, eps, decay; flags: maximize."""
    _counted(table, counts, members, 4, ROWS)
    rho = _row(table, members, 1, ROWS)
    _give(scalars, members, 6, 0, 1 - 2 * _row(table, members, 5, ROWS), ROWS)
    _give(scalars, members, 6, 1, _row(table, members, 0, ROWS), ROWS)
    _give(scalars, members, 6, 2, _row(table, members, 3, ROWS), ROWS)
    _give(scalars, members, 6, 3, rho, ROWS)
    _give(scalars, members, 6, 4, 1 - rho, ROWS)
    _give(scalars, members, 6, 5, _row(table, members, 2, ROWS), ROWS)
