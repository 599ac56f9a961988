"""Members that do not take a step: their rows of parameters, state and step counts stay as they are.

Every kernel steps all members of a stack. Rows of members that must not step are restored afterwards, which is exact
for every kernel, and costs nothing if all members step. Under torch.amp.GradScaler, members whose gradients overflow
skip the step; source: https://docs.pytorch.org/docs/stable/amp.html#torch.amp.GradScaler
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows
from hfusion.optim.device_numbers import sent
from hfusion.optim.group import State, membership_of

SkippedRows = dict[Tensor, Tensor]
"""For each parameter the members that do not step: bool ``[B]``, or ``[]`` for a parameter that all members share."""


def without_gradient(params: Iterable[Tensor]) -> SkippedRows:
    """The members for which a parameter that has a gradient was not used, and so would have none alone."""
    skipped = {}
    for param in params:
        rows = absent_rows(param.grad) if param.grad is not None else None
        if rows is not None:
            skipped[param] = rows
    return skipped


def of_members(params: Iterable[Tensor], members: Tensor) -> SkippedRows:
    """Return ``members``, bool ``[B]``, for each of their parameters; those that all members share are left out."""
    marks = {param: membership_of(param) for param in params}
    return {param: members if mark.stacked else members.reshape(()) for param, mark in marks.items() if mark.is_own}


def together(*several: SkippedRows) -> SkippedRows:
    """Return the union: the members that are skipped by at least one of ``several``."""
    union: SkippedRows = {}
    for skipped in several:
        for param, rows in skipped.items():
            union[param] = union[param] | rows if param in union else rows
    return union


@contextmanager
def restore_skipped(skipped: SkippedRows, state: Mapping[Tensor, State]) -> Iterator[None]:
    """Context manager: restore the ``skipped`` rows of parameters and ``state`` after the step inside."""
    saved = [(tensor, rows, tensor[rows]) for tensor, rows in _rows(skipped, state)]
    yield
    for tensor, rows, values in saved:
        tensor[rows] = values


def _rows(skipped: SkippedRows, state: Mapping[Tensor, State]) -> Sequence[tuple[Tensor, Tensor]]:
    pairs = []
    device_rows: dict[tuple[int, torch.device], Tensor] = {}
    for param, members in skipped.items():
        # If no member is skipped, nothing is copied. A tensor without a member dim is handled as a stack of one row.
        rows = members.reshape(-1).nonzero().reshape(-1)
        if len(rows):
            for tensor in (param.detach(), *state.get(param, {}).values()):
                stack = tensor if members.dim() else tensor.unsqueeze(0)
                key = id(members), tensor.device
                if key not in device_rows:
                    device_rows[key] = sent(rows, tensor.device)
                pairs.append((stack, device_rows[key]))
    return pairs


@torch.no_grad()
def divide(params: Sequence[Tensor], scale: Tensor) -> None:
    """Divide the gradients in place as ``GradScaler.unscale_`` does."""
    inverse = scale.double().reciprocal().float()
    for param in params:
        assert param.grad is not None
        param.grad.mul_(inverse.to(param.grad.device))


@torch.no_grad()
def overflown(params: Sequence[Tensor], members: int) -> SkippedRows:
    """Return what must not step: members with a non-finite gradient, in all parameters, and shared parameters with one.

    Raises FusionError if all gradients are finite.
    """
    bad = torch.zeros(members, dtype=torch.bool, device="cpu")
    shared_overflows: SkippedRows = {}
    for param in params:
        assert param.grad is not None
        finite = param.grad.isfinite()
        if membership_of(param).stacked:
            bad |= ~finite.reshape(members, -1).all(1).cpu()
        elif not finite.all():
            shared_overflows[param] = torch.ones((), dtype=torch.bool, device="cpu")
    if not bad.any() and not shared_overflows:
        raise FusionError(
            "the GradScaler found gradients that are not finite, and there are none left: they were changed between "
            "scaler.unscale_ and scaler.step (clip_grad_value_, nan_to_num_), so that the members they belong to are "
            "unknown; clip with hf.optim.clip_grad_norm_, or change the gradients before scaler.unscale_"
        )
    return together(shared_overflows, of_members(params, bad))
