"""Clipping the gradient norm of each member of an array."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows
from hfusion.device.backend import backend, is_recorded, sent
from hfusion.optim.gpu import addresses_on, library, tables_of
from hfusion.optim.group import check_gradient, common_members, membership_of
from hfusion.optim.hyper import HyperValue, member_vector

EACH_ALONE = ("cpu",)
"""Types of devices on which a call for each tensor costs nothing that one for all would save."""


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: HyperValue,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Clip each member's gradients in place, as torch.nn.utils.clip_grad_norm_ does for the member alone.

    ``max_norm``: one value or one per member, at least 0 (inf clips nothing). Returns the norms ``[B]``
    before clipping, on the device of the first gradient. Parameters without a gradient, such as a frozen
    shared base, do not count. Raises ValueError for parameters of no fused module and for a ``max_norm`` of
    the wrong number or range, RuntimeError for a norm that is not finite if ``error_if_nonfinite``, and
    FusionError for the gradient of a parameter that several members share: it is the sum over the members,
    and no member's own. A member that has not used a parameter has no gradient of it.
    """
    grads, limits = _gradients(parameters, "max_norm", max_norm, norm_type)
    if not grads:
        return torch.zeros(len(limits), device="cpu")
    return clip_stacks(grads, limits, float(norm_type), error_if_nonfinite)


@torch.no_grad()
def clip_stacks(
    grads: Sequence[Tensor], limits: Tensor, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Clip stacked gradients ``[B, *S]`` in place: each member's norm to its limit in ``limits [B]``; return norms."""
    first, members = grads[0].device, len(limits)
    together = on_accelerator(grads) if first.type not in EACH_ALONE and norm_type in ORDERS else []
    if together:
        norms = total_norm(torch.cat([stacks.norms(norm_type) for stacks in together]), norm_type)
    else:
        norms = total_norm([grad_norms(grad, members, norm_type).to(first) for grad in grads], norm_type)
    if error_if_nonfinite and not bool(norms.isfinite().all()):
        bad = {index: norm for index, norm in enumerate(norms.tolist()) if not math.isfinite(norm)}
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is not finite for members {bad} (member: norm); pass "
            "error_if_nonfinite=False to scale their gradients anyway"
        )
    factors = clip_factors(norms, limits)
    for stacks in together:
        stacks.scale(factors)
    for grad in grads if not together else ():
        scale(grad, factors)
    return norms


@torch.no_grad()
def clip_grad_value_(parameters: Tensor | Iterable[Tensor], clip_value: HyperValue) -> None:
    """Clamp each member's gradients in place, as torch.nn.utils.clip_grad_value_ does for the member alone.

    ``clip_value``: the largest magnitude, one value or one per member (inf clips nothing). Raises ValueError for
    parameters of no fused module and for a limit of the wrong number or range, and FusionError for the gradient of a
    parameter that several members share.
    """
    grads, limits = _gradients(parameters, "clip_value", clip_value)
    for grad in grads:
        bound = sent(limits.to(grad.dtype), grad.device).reshape(-1, *[1] * (grad.dim() - 1))
        torch.clamp(grad, -bound, bound, out=grad)


def grad_norms(grad: Tensor, members: int, norm_type: float = 2.0) -> Tensor:
    """Return the norms ``[B]`` of one stacked gradient ``[B, *S]``.

    Zero rows of members without a gradient do not count, in norms of negative order either.
    """
    norms: Tensor = torch.linalg.vector_norm(grad.reshape(members, -1), norm_type, dim=1)
    absent = absent_rows(grad)
    return norms if absent is None or norm_type >= 0 else norms.masked_fill(absent.to(norms.device), math.inf)


def overflowing(grads: Sequence[Tensor], members: int) -> Tensor:
    """Return which members have a value that is not finite, bool ``[members]`` on the CPU, by one wait per device.

    ``grads``: stacks ``[members, ...]``, or ``[1, ...]`` of what all members share.
    """
    largest: dict[torch.device, list[Tensor]] = {}
    for grad in map(Tensor.detach, grads):
        if grad.numel():
            numbers = torch.view_as_real(grad) if grad.is_complex() else grad
            # The largest magnitude is exact in any dtype, keeps a NaN, and unlike a sum never overflows.
            norms = torch.linalg.vector_norm(numbers.reshape(len(grad), -1), math.inf, dim=1)
            largest.setdefault(grad.device, []).append(norms.expand(members))
    bad = torch.zeros(members, dtype=torch.bool, device="cpu")
    for magnitudes in largest.values():
        bad |= torch.stack(magnitudes).isfinite().logical_not().any(0).cpu()
    return bad


def unscale(grads: Sequence[Tensor], scales: Tensor) -> None:
    """Divide gradients in place, each rounded once: stacks ``[B, ...]``, or ``[1, ...]``, by ``scales``, [B] or [1]."""
    inverse = scales.double().reciprocal().float()
    inverses = {device: sent(inverse, device) for device in dict.fromkeys(grad.device for grad in grads)}
    for grad in grads:
        grad.mul_(inverses[grad.device][: len(grad)].reshape(-1, *[1] * (grad.dim() - 1)))


def total_norm(norms: Tensor | Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """The norms ``[B]`` over all parameters, from those of each, ``[parameters, B]``."""
    stacked = norms if isinstance(norms, Tensor) else torch.stack(list(norms))
    norm: Tensor = torch.linalg.vector_norm(stacked, norm_type, dim=0)
    return norm


def clip_factors(norms: Tensor, limits: Tensor) -> Tensor:
    """Return the factors ``[B]`` by which to multiply the members' gradients, so that ``norms`` are within ``limits``.

    Rounds in the same places as torch: multiplies by a reciprocal, with limits in float32 if norms have half precision.
    """
    arithmetic = torch.promote_types(norms.dtype, torch.float32)
    factors = (norms + 1e-6).reciprocal() * sent(limits.to(arithmetic), norms.device)
    return factors.to(norms.dtype).clamp(max=1.0)


def scale(grad: Tensor, factors: Tensor) -> None:
    """Multiply a stacked gradient ``[B, *S]`` by ``factors [B]`` in place."""
    grad.mul_(factors.to(grad).reshape(-1, *[1] * (grad.dim() - 1)))


def _gradients(
    parameters: Tensor | Iterable[Tensor], name: str, limit: HyperValue, norm_type: float = 2.0
) -> tuple[list[Tensor], Tensor]:
    """Return the gradients as ``[B, ...]``, and the limit of each member. ``name``: of the argument ``limit``."""
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not params:
        raise ValueError("no parameters were given, so the number of members is unknown: pass fused.parameters()")
    members, grads = common_members(params), []
    for param, mark in zip(params, map(membership_of, params), strict=True):
        if norm_type < 0 and mark.padded:
            raise FusionError(
                f"parameter {mark.name!r} has zeros beside what a member trains, which a norm of order {norm_type} "
                "would count: give an order of at least 0"
            )
        if param.grad is None or not param.grad.numel():
            continue
        check_gradient(param, mark, param.grad)
        if not mark.stacked and members > 1:
            raise FusionError(
                f"parameter {mark.name!r} is one tensor for all {members} members and has a gradient, "
                "which is the sum over the members and has no norm per member: leave it out here, and clip "
                "it by itself with torch.nn.utils.clip_grad_norm_"
            )
        grads.append(param.grad if mark.stacked else param.grad.unsqueeze(0))
    limits: Tensor = member_vector(name, limit, members).as_subclass(Tensor)
    if not bool((limits >= 0).all()):
        raise ValueError(f"{name}={limits.tolist()}: every value must be at least 0")
    return grads, limits


# Norms and products of stacked gradients on an accelerator, in as many launches for many tensors as for few.

ORDERS = {1.0: 1, 2.0: 2, math.inf: 0}
"""Norms that the kernels compute, and what they call them."""


class StackedGradients:
    """Gradients ``[members, ...]`` of one dtype on one accelerator, in separate memory. Made by `on_accelerator`."""

    def __init__(self, grads: Sequence[Tensor]) -> None:
        self._grads, self._tables, self._device = grads, tables_of(grads), grads[0].device
        self._addresses = addresses_on(self._device, tuple(map(Tensor.data_ptr, grads)))

    def norms(self, norm_type: float) -> Tensor:
        """Return the norms ``[tensors, members]``, each rounded to the dtype of the gradients."""
        tables, addresses, kernels, dtype = self._tables, self._addresses, library(), self._grads[0].dtype
        norms = torch.empty(len(self._grads), len(self._grads[0]), dtype=dtype, device=self._device)
        arithmetic, order = torch.promote_types(dtype, torch.float32), ORDERS[norm_type]
        partials = torch.empty(tables.programs, dtype=arithmetic, device=self._device)
        with backend(self._device).current():
            tables.launch(kernels.partial_norms, addresses.wide, addresses.tensor, tables.firsts, partials, ORDER=order)
            row_norms = kernels.row_norms[tuple(norms.shape)]
            row_norms(tables.sizes, tables.firsts, partials, norms, norms.shape[1], ORDER=order, **tables.constants)
        return norms

    def scale(self, factors: Tensor) -> None:
        """Multiply by ``factors [members]``, rounded to the dtype of the gradients."""
        torch.autograd.graph.increment_version(self._grads)
        addresses = self._addresses
        with backend(self._device).current():
            self._tables.launch(library().scale_rows, addresses.wide, addresses.tensor, factors)


def on_accelerator(grads: Sequence[Tensor]) -> list[StackedGradients]:
    """Return the gradients by dtype; none without Triton, for dtypes that it lacks, or on several devices.

    Members must lie one behind the other, in any order of the other dims, and no two gradients in the same memory.
    None, too, while user code captures a graph of the device, which would repeat the copy of today's addresses.
    """
    kernels, device = library(), grads[0].device
    if isinstance(kernels, str) or torch.compiler.is_compiling() or not backend(device).fuses:
        return []
    apart = len({grad.data_ptr() for grad in grads}) == len(grads)
    alike = all(grad.device == device and grad.dtype in kernels.DTYPES and _rows_apart(grad) for grad in grads)
    if not (apart and alike) or is_recorded(device):
        return []
    dtypes = dict.fromkeys(grad.dtype for grad in grads)
    return [StackedGradients([grad for grad in grads if grad.dtype is dtype]) for dtype in dtypes]


def _rows_apart(grad: Tensor) -> bool:
    """Return whether the elements of each member lie together, without gaps, and the members in their order."""
    if grad.is_contiguous():
        return True
    order = sorted(range(grad.dim()), key=grad.stride, reverse=True)
    return (order[0] == 0 or len(grad) == 1) and grad.permute(order).is_contiguous()
