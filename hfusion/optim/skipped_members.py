"""Members that do not take a step: their rows of parameters, state and step counts stay as they are.

Every kernel steps all members of a stack. Rows of members that must not step are restored afterwards, which is exact
for every kernel, and costs nothing if all members step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

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
