"""The steps of the fused optimizers on a CUDA device, in Triton: one launch for all tensors of a group.

The arithmetic is that of ``kernels.c``. Every kernel takes

  spots      int32 ``[programs, 3]``: which tensor, member and block of its elements each program updates
  sizes      int64 ``[tensors]``: elements of one member
  stacks     int64 ``[1 + buffers, tensors]``: addresses of the parameters, then of each state buffer;
             Triton's launcher has a variable ``params`` of its own
  grads      int64 ``[tensors]``: those of the gradients
  scalars    ``[tensors, number, members]``, in the order in which the kernel reads them
  LANES      how many elements lie together: addresses are multiples of so many, and so are sizes

What it takes of numbers is computed before it, by a kernel of a few threads: so no host computes powers of betas, and
both launches can be recorded. Those kernels take

  table      float64 ``[number, members]``: the hyper-parameters as the optimizer lists them, what a step adds to the
             counts, and the options that are flags
  counts     float32 ``[tensors, members]``: of the steps, which are counted there
  scalars    as above
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

REALS = {torch.float32: tl.float32, torch.float64: tl.float64}
"""What Triton calls the dtypes of the kernels."""


@triton.jit
def _spot(spots, sizes, BLOCK: tl.constexpr, LANES: tl.constexpr):
    """Which tensor and member a program updates, the places of its elements in the stack, and which there are."""
    row = spots + 3 * tl.program_id(0)
    tensor, member, block = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    # By it the compiler moves as many elements at once.
    size = tl.multiple_of(tl.load(sizes + tensor), LANES)
    within = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tensor, member, member.to(tl.int64) * size + within, within < size


@triton.jit
def _at(addresses, tensor, places, dtype: tl.constexpr, LANES: tl.constexpr):
    """Where the elements lie."""
    first = tl.load(addresses + tensor).to(tl.pointer_type(dtype))
    return tl.multiple_of(first, LANES * dtype.primitive_bitwidth // 8) + places


@triton.jit
def _root(value, dtype: tl.constexpr):
    return tl.sqrt_rn(value) if dtype == tl.float32 else tl.sqrt(value)


@triton.jit
def _over(value, by, dtype: tl.constexpr):
    return tl.div_rn(value, by) if dtype == tl.float32 else value / by


@triton.jit
def _decayed(grad, param, sign, decay):
    """The gradient with weight decay; without it, no product with 0, which would carry the NaN of a parameter."""
    step = sign * grad
    return tl.where(decay != 0, step + decay * param, step)


@triton.jit
def sgd(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, lr, decay, momentum, fresh, first, nesterov."""
    tensor, member, places, there = _spot(spots, sizes, BLOCK, LANES)
    mine = scalars + tensor * 7 * members + member
    sign, lr, decay = tl.load(mine), tl.load(mine + members), tl.load(mine + 2 * members)
    at = _at(stacks, tensor, places, dtype, LANES)
    param = tl.load(at, there)
    step = _decayed(tl.load(_at(grads, tensor, places, dtype, LANES), there), param, sign, decay)
    if BUFFERS:
        momentum, fresh = tl.load(mine + 3 * members), tl.load(mine + 4 * members)
        first, nesterov = tl.load(mine + 5 * members), tl.load(mine + 6 * members)
        buffer = _at(stacks + tensors, tensor, places, dtype, LANES)
        old = tl.load(buffer, there)
        mean = tl.where(first != 0, step, momentum * old + fresh * step)
        # Members without momentum keep what they have.
        tl.store(buffer, tl.where(momentum != 0, mean, old), there)
        step = tl.where(momentum != 0, tl.where(nesterov != 0, step + momentum * mean, mean), step)
    tl.store(at, param - lr * step, there)


@triton.jit
def adam(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, decay, shrink, near, toward, beta2, fresh, scale, eps, step; a third buffer is amsgrad's."""
    tensor, member, places, there = _spot(spots, sizes, BLOCK, LANES)
    mine = scalars + tensor * 10 * members + member
    sign, decay, shrink = tl.load(mine), tl.load(mine + members), tl.load(mine + 2 * members)
    near, toward = tl.load(mine + 3 * members), tl.load(mine + 4 * members)
    beta2, fresh, scale = tl.load(mine + 5 * members), tl.load(mine + 6 * members), tl.load(mine + 7 * members)
    eps, step = tl.load(mine + 8 * members), tl.load(mine + 9 * members)
    at = _at(stacks, tensor, places, dtype, LANES)
    mean_at = _at(stacks + tensors, tensor, places, dtype, LANES)
    square_at = _at(stacks + 2 * tensors, tensor, places, dtype, LANES)
    param = tl.load(at, there)
    grad = _decayed(tl.load(_at(grads, tensor, places, dtype, LANES), there), param, sign, decay)
    mean, square = tl.load(mean_at, there), tl.load(square_at, there)
    # torch.lerp: from the nearer end.
    mean = tl.where(near != 0, mean, grad) + toward * (grad - mean)
    square = beta2 * square + fresh * grad * grad
    tl.store(mean_at, mean, there)
    tl.store(square_at, square, there)
    if BUFFERS > 2:
        highest_at = _at(stacks + 3 * tensors, tensor, places, dtype, LANES)
        highest = tl.load(highest_at, there)
        # torch.maximum: a NaN on either side stays.
        square = tl.where((square > highest) | (square != square), square, highest)
        tl.store(highest_at, square, there)
    param = shrink * param - _over(step * mean, _root(square, dtype) * scale + eps, dtype)
    tl.store(at, param, there)


adamw = adam


@triton.jit
def adadelta(
    spots, sizes, tensors, members, stacks, grads, scalars,
    BUFFERS: tl.constexpr, dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Scalars: sign, lr, decay, rho, fresh, eps."""
    tensor, member, places, there = _spot(spots, sizes, BLOCK, LANES)
    mine = scalars + tensor * 6 * members + member
    sign, lr, decay = tl.load(mine), tl.load(mine + members), tl.load(mine + 2 * members)
    rho, fresh, eps = tl.load(mine + 3 * members), tl.load(mine + 4 * members), tl.load(mine + 5 * members)
    at = _at(stacks, tensor, places, dtype, LANES)
    square_at = _at(stacks + tensors, tensor, places, dtype, LANES)
    moved_at = _at(stacks + 2 * tensors, tensor, places, dtype, LANES)
    param = tl.load(at, there)
    grad = _decayed(tl.load(_at(grads, tensor, places, dtype, LANES), there), param, sign, decay)
    square, moved = tl.load(square_at, there), tl.load(moved_at, there)
    square = rho * square + fresh * grad * grad
    delta = _over(_root(moved + eps, dtype), _root(square + eps, dtype), dtype) * grad
    tl.store(square_at, square, there)
    tl.store(moved_at, rho * moved + fresh * delta * delta, there)
    tl.store(at, param - lr * delta, there)


@triton.jit
def _row(table, members, row, ROWS: tl.constexpr):
    """A row of the table for the members of a program."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    return tl.load(table + row * members + member, member < members, other=0.0)


@triton.jit
def _counted(table, counts, members, row, ROWS: tl.constexpr):
    """The number of this step for each member; ``row``: of what it adds."""
    member = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = counts + tl.program_id(0) * members + member
    found = tl.load(place, member < members, other=0.0) + _row(table, members, row, ROWS).to(tl.float32)
    tl.store(place, found, member < members)
    return found.to(tl.float64)


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
    near = 1 - beta1 < 0.5
    _give(scalars, members, 10, 0, 1 - 2 * _row(table, members, 7, ROWS), ROWS)
    _give(scalars, members, 10, 1, 0 * decay if DECOUPLED else decay, ROWS)
    _give(scalars, members, 10, 2, 1 - lr * decay if DECOUPLED else 1 + 0 * decay, ROWS)
    _give(scalars, members, 10, 3, tl.where(near, 1.0, 0.0), ROWS)
    _give(scalars, members, 10, 4, tl.where(near, 1 - beta1, -beta1), ROWS)
    _give(scalars, members, 10, 5, beta2, ROWS)
    _give(scalars, members, 10, 6, 1 - beta2, ROWS)
    _give(scalars, members, 10, 7, 1 / tl.sqrt(1 - _power(beta2, count)), ROWS)
    _give(scalars, members, 10, 8, _row(table, members, 3, ROWS), ROWS)
    _give(scalars, members, 10, 9, lr / (1 - _power(beta1, count)), ROWS)


@triton.jit
def adam_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """Hyper-parameters: lr, beta1, beta2, eps, decay; flags: amsgrad, maximize."""
    _adam_scalars(table, counts, scalars, members, False, ROWS)


@triton.jit
def adamw_scalars(table, counts, scalars, members, ROWS: tl.constexpr):
    """As those of adam."""
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
