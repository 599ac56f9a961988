"""What is done to the gradients of each member between backward and step: clipping, and scaling of losses."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfusion.core.errors import CheckpointError, FusionError
from hfusion.core.gradient_usage import absent_rows
from hfusion.core.member_table import MemberTable, copied, kept_rows, rows_of
from hfusion.core.membership import member_rows
from hfusion.device.backend import backend, is_recorded, sent
from hfusion.optim.gpu import addresses_on, library, tables_of
from hfusion.optim.group import check_gradient, common_members, membership_of
from hfusion.optim.hyper import HyperValue, member_vector, plain

if TYPE_CHECKING:
    from hfusion.optim.base import FusedOptimizer

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
    # Of gradients of one dtype, they are together already: a copy would be one launch more.
    each = [stacks.norms(norm_type) for stacks in together]
    each = each or [torch.stack([grad_norms(grad, members, norm_type).to(first) for grad in grads])]
    norms: Tensor = torch.linalg.vector_norm(each[0] if len(each) == 1 else torch.cat(each), norm_type, dim=0)
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


def all_finite(tensors: list[Tensor]) -> bool:
    """Return whether all values are finite. Also False if one call cannot tell, for tensors of different dtypes,
    devices or layouts, or if squares overflow.
    """
    kinds = {(tensor.dtype, tensor.device, tensor.layout) for tensor in tensors}
    if len(kinds) > 1 or tensors[0].layout is not torch.strided or not all(tensor.numel() for tensor in tensors):
        return False
    # Computing the largest magnitude would take five times as long.
    return math.isfinite(float(torch.stack(torch._foreach_norm(tensors, 2)).sum()))


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
        if float(norm_type) < 0 and mark.padded:
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


# A loss scaler: each member has its own scale, and skips only the steps in which it overflows.


class GradScaler:
    """``torch.amp.GradScaler`` with a scale for each member of an array.

    It scales losses ``[B]`` before their sum, and has the methods of torch's without the getters and setters of its
    factors and its interval. ``init_scale``, ``growth_factor``, ``backoff_factor``, ``growth_interval``: one value, or
    one per member. Raises ValueError for factors that torch refuses. ``device`` is accepted as in torch and has no
    effect: losses and gradients are scaled on their own device.
    Source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler

    Example:
        >>> import hfusion as hf, torch
        >>> fused = hf.build(lambda: torch.nn.Linear(2, 1), seeds=[0, 1])
        >>> opt, scaler = hf.optim.SGD(fused.parameters(), lr=0.1), hf.optim.GradScaler(init_scale=[8.0, 16.0])
        >>> losses = fused(torch.ones(3, 2)).square().mean(dim=(1, 2))
        >>> scaler.scale(losses).sum().backward()
        >>> scaler.step(opt)
        >>> scaler.update()
        >>> scaler.get_scale()
        tensor([ 8., 16.])
    """

    def __init__(
        self,
        device: str | torch.device | None = None,
        init_scale: HyperValue = 2.0**16,
        growth_factor: HyperValue = 2.0,
        backoff_factor: HyperValue = 0.5,
        growth_interval: HyperValue = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(device, str | torch.device | None):
            raise TypeError(f"device={device!r} is no device: give the scale as init_scale={device!r}")
        self._enabled = enabled
        given = {"scale": init_scale, "growth_factor": growth_factor, "backoff_factor": backoff_factor}
        given["growth_interval"] = growth_interval
        self._arguments = {n: torch.as_tensor(v, dtype=torch.float32, device="cpu") for n, v in given.items()}
        arguments = self._arguments.items()
        grow, back = self._arguments["growth_factor"], self._arguments["backoff_factor"]
        if enabled and not bool((grow > 1).all()):
            raise ValueError(f"growth_factor={growth_factor}: it must be above 1")
        if enabled and not bool(((back > 0) & (back < 1)).all()):
            raise ValueError(f"backoff_factor={backoff_factor}: it must be above 0 and below 1")
        # The initial values for members that join; None if those of the first members differed.
        self.initial_values = {n: float(v.max()) if len(v.unique()) == 1 else None for n, v in arguments}
        # The members' scales and counts, live; without columns before the first use.
        self.table = MemberTable(0)
        if (members := max(map(Tensor.numel, self._arguments.values()))) > 1:
            # Each member's own: they follow its row also before the first use.
            self.begin(members)
        # The members that overflowed in this iteration, for each optimizer that was unscaled.
        self._overflowed_members: dict[int, Tensor] = {}
        self._stepped: set[int] = set()

    def is_enabled(self) -> bool:
        return self._enabled

    def get_scale(self) -> Tensor:
        """The scales ``[B]``; ``[1]`` before the first use of a scaler that has one value for all."""
        if not self._enabled:
            return torch.ones(1, device="cpu")
        return (self.table if self.table.rows else self._arguments)["scale"].reshape(-1).clone()

    def scale(self, losses: Any) -> Any:
        """Multiply losses ``[B, ...]``, or a list or tuple of such, by the members' scales."""
        if not self._enabled:
            return losses
        if isinstance(losses, list | tuple):
            return type(losses)(self.scale(loss) for loss in losses)
        if isinstance(losses, Tensor) and losses.dim() == 0:
            raise ValueError(
                "scale() takes the losses of all members, [B], got a tensor without dims. Scale them before their sum: "
                "scaler.scale(losses).sum()"
            )
        self.begin(len(losses))
        scales = sent(self.table["scale"], losses.device)
        return losses * scales.reshape(-1, *[1] * (losses.dim() - 1))

    @torch.no_grad()
    def unscale_(self, optimizer: FusedOptimizer) -> Tensor:
        """Divide the gradients by the scales in place. Returns which members have a gradient that is not finite: bool
        ``[B]``.

        Raises:
            RuntimeError: called twice since `update`.
            FusionError: all members share a trained parameter, whose gradient sums losses of different scales.
        """
        if not self._enabled:
            return torch.zeros(optimizer.members, dtype=torch.bool, device="cpu")
        if id(optimizer) in self._overflowed_members:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update()")
        self.begin(optimizer.members)
        scales = self.table["scale"]
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        shared = next((mark for mark in map(membership_of, trained) if not mark.stacked), None)
        if shared is not None and bool((scales != scales[0]).any()):
            raise FusionError(
                f"parameter {shared.name!r} is one tensor for all {shared.members} members, and their losses have "
                "different scales; freeze it, or use torch.amp.GradScaler"
            )
        grads = [member_rows(param.grad, membership_of(param)) for param in trained]
        bad = overflowing(grads, len(scales))
        unscale(grads, scales)
        self._overflowed_members[id(optimizer)] = bad
        return bad.clone()

    def step(self, optimizer: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
        """Call ``optimizer.step()`` for the members whose gradients are all finite; unscale them first if necessary.

        Raises:
            RuntimeError: called twice since `update`, or with a closure, whose gradients would be scaled.
        """
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if any(value is not None for value in (*args, *kwargs.values())):
            raise RuntimeError("step() of a GradScaler takes no closure, whose gradients are scaled: call it before")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() has already been called on this optimizer since the last update()")
        if id(optimizer) not in self._overflowed_members:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        with optimizer.holding(self._overflowed_members[id(optimizer)]):
            return optimizer.step(*args, **kwargs)

    def update(self, new_scale: HyperValue | None = None, *, resting: Tensor | None = None) -> None:
        """Lower the scale of members that have just overflowed, and raise that of members that have not for long.

        Args:
            resting: bool ``[B]``, the members that made no step, whose scales and counts stay.

        Raises:
            RuntimeError: no optimizer was unscaled since the last update.
        """
        if not self._enabled:
            return
        values = self.table
        if not values.rows or (new_scale is None and not self._overflowed_members):
            raise RuntimeError("no gradients were unscaled before update(): call step first")
        if new_scale is not None:
            values["scale"] = plain(member_vector("new_scale", new_scale, values.rows)).float()
        else:
            bad = torch.stack(list(self._overflowed_members.values())).any(0)
            tracker = torch.where(bad, 0, values["tracker"] + 1)
            full = tracker == values["growth_interval"]
            grown = values["scale"] * values["growth_factor"]
            raised = torch.where(full & grown.isfinite(), grown, values["scale"])
            scale = torch.where(bad, values["scale"] * values["backoff_factor"], raised)
            still = torch.zeros_like(bad) if resting is None else resting
            values["scale"] = torch.where(still, values["scale"], scale)
            values["tracker"] = torch.where(still, values["tracker"], torch.where(full, 0, tracker))
        self.forget()

    def forget(self) -> None:
        """Discard what was unscaled since the last `update`, after an error."""
        self._overflowed_members, self._stepped = {}, set()

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the scales of members ``rows`` only, in this order."""
        if self.table.rows:
            self.table.arrange(kept_rows(rows, self.table.rows))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Give members ``dst`` the scales of ``src``."""
        if self.table.rows:
            self.table.arrange(copied(src, dst, self.table.rows))

    def append(self, count: int = 1) -> None:
        """Add ``count`` members with the initial scale. Raises ValueError if initial scales differ."""
        if members := self.table.rows:
            # Raises an error before anything changes.
            self.restart([])
            self.table.arrange([*range(members), *[0] * count])
            self.restart(range(members, members + count))

    def restart(self, rows: int | Sequence[int]) -> None:
        """Restart members ``rows``; see `append`."""
        if self.table.rows:
            for name, value in self.initial_values.items():
                if value is None:
                    label = "init_scale" if name == "scale" else name
                    raise ValueError(
                        f"{label} of the GradScaler differs between the members: none is known for new ones"
                    )
            places = rows_of(rows, self.table.rows)
            for name, value in {**self.initial_values, "tracker": 0.0}.items():
                self.table[name][places] = value

    def state_dict(self) -> dict[str, Any]:
        """The scales and counts of the members, as tensors ``[B]``; empty before the first use."""
        return {name: value.clone() for name, value in self.table.columns.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore ``state_dict``. Raises CheckpointError if it is not the state of a scaler."""
        expected = {*self._arguments, "tracker"}
        shapes = {tuple(getattr(value, "shape", ())) for value in state_dict.values()}
        if state_dict and (set(state_dict) != expected or len(shapes) != 1 or len(next(iter(shapes))) != 1):
            raise CheckpointError(
                f"the state is not one of a GradScaler of members: it holds {sorted(state_dict)} of shapes "
                f"{sorted(shapes)}, and {sorted(expected)} of shape [B] are needed"
            )
        columns = {name: value.clone() for name, value in state_dict.items()}
        self.table = MemberTable(len(columns["scale"]) if columns else 0, columns)

    def begin(self, members: int) -> None:
        """Create a scale for each of ``members``. Raises ValueError if there are already scales for another number."""
        if not self._enabled:
            return
        if not self.table.rows:
            columns = {n: plain(member_vector(n, v, members)).float() for n, v in self._arguments.items()}
            self.table = MemberTable(members, {**columns, "tracker": torch.zeros(members, device="cpu")})
        if self.table.rows != members:
            raise ValueError(
                f"the GradScaler has scales of {self.table.rows} members, the array has {members}: what was "
                "done to the fused module by keep or append must be done to it, too"
            )

    def of_rows(self, rows: Sequence[int]) -> GradScaler:
        """Return a scaler of members ``rows``; this one is not changed."""
        part = copy.copy(self)
        part.forget()
        part.initial_values = dict(self.initial_values)
        part.table = self.table.take(rows)
        return part
