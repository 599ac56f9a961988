"""A check of the sub-benchmark ``contact``, its outcome, and how values are compared in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from typing import Any

import torch
from torch import Tensor

from hfusion.bench.workload import Disagreement, check_agreement


class ContactStatus(StrEnum):
    """The status of a check that has ended."""

    OK = "ok"
    # The values are not those of the members alone.
    WRONG = "wrong"
    # The values are right, but something else is not as it should be; or an error was raised, or the process died.
    FAILED = "failed"
    TIMEOUT = "timeout"
    # It ran through on a device that computes nothing, so that no value means anything.
    NOT_COMPUTED = "not computed"
    SKIPPED = "skipped"

    @property
    def is_fault(self) -> bool:
        return self in (ContactStatus.WRONG, ContactStatus.FAILED, ContactStatus.TIMEOUT)


class Need(Enum):
    """The kind of device that a check cannot do without; the value is the reason where it is missing."""

    NOTHING = ""
    CUDA = "needs a CUDA device"


@dataclass(frozen=True)
class CheckResult:
    """The outcome of a check.

    Attributes:
        status: OK, or the kind of fault.
        reason: the fault, or why the check was left out; empty for neither.
        summary: the figures shown in the table.
        values: all figures, for the line of JSON.
    """

    status: ContactStatus = ContactStatus.OK
    reason: str = ""
    summary: str = ""
    values: Mapping[str, Any] = field(default_factory=dict)

    def unless_fault(self, reason: str) -> CheckResult:
        """Return this result, as ``FAILED`` for ``reason`` if there is one and no worse fault."""
        if not reason or self.status.is_fault:
            return self
        return replace(self, status=ContactStatus.FAILED, reason=reason)


@dataclass(frozen=True)
class ContactItem:
    """A check with a unique name. Its function can be pickled: it runs in another process.

    Attributes:
        name: the kind of check, then its subject.
        run: makes the check on a device.
        need: the kind of device that it needs.
        limit: seconds until its process is killed.
        exclusive: whether it is timed, so that nothing else may run at the same time.
    """

    name: str
    run: Callable[[torch.device], CheckResult]
    need: Need = Need.NOTHING
    limit: float = 120.0
    exclusive: bool = False

    def missing(self, device: torch.device) -> str:
        """Return the requirement of the check that ``device`` does not meet; empty if it meets all."""
        return self.need.value if self.need is Need.CUDA and device.type != "cuda" else ""


def computes(device: torch.device) -> bool:
    """Return whether kernels of ``device`` compute anything; whole numbers are exact in every precision."""
    numbers = torch.arange(16.0).view(4, 4)
    on_device = numbers.to(device)
    return torch.equal((on_device @ on_device + on_device).cpu(), numbers @ numbers + numbers)


def difference(expected: Tensor, actual: Tensor) -> float:
    """Return the largest difference of two tensors over the largest magnitude of ``expected``.

    NaN equals NaN; a number that should be NaN, or is NaN and should not be, differs infinitely.
    """
    expected, actual = expected.detach().cpu().double(), actual.detach().cpu().double()
    if expected.shape != actual.shape:
        return torch.inf
    equal = (actual == expected) | (actual.isnan() & expected.isnan())
    if equal.all():
        return 0.0
    gap = (actual - expected)[~equal].abs().nan_to_num(torch.inf, posinf=torch.inf).max()
    scale = expected[expected.isfinite()].abs().amax() if expected.isfinite().any() else torch.zeros(())
    return float(gap / scale.clamp_min(torch.finfo(torch.float64).tiny))


def compare(
    device: torch.device, differences: Mapping[str, float], tolerance: float, summary: str, **values: Any
) -> CheckResult:
    """Return ``WRONG`` if a difference exceeds ``tolerance``, ``NOT_COMPUTED`` if ``device`` computes nothing.

    The largest difference is added to ``summary``.
    """
    if not computes(device):
        return CheckResult(ContactStatus.NOT_COMPUTED, summary=summary, values=values)
    figures = {"differences": dict(differences), "tolerance": tolerance, **values}
    name, largest = max(differences.items(), key=lambda pair: pair[1])
    result = CheckResult(summary=f"difference {largest:.1e} of {tolerance:.0e}; {summary}", values=figures)
    if largest <= tolerance:
        return result
    reason = f"{name}: difference {largest:.1e}, tolerated {tolerance:.0e}"
    return replace(result, status=ContactStatus.WRONG, reason=reason)


def compare_losses(
    device: torch.device, expected: Tensor, losses: Mapping[str, Tensor], tolerance: float, summary: str, **values: Any
) -> CheckResult:
    """Compare losses ``[steps, B]`` with those of the members alone, as `compare` does with differences."""
    differences = {name: difference(expected, actual) for name, actual in losses.items()}
    # Its tolerance is of each loss, which is stricter than that of the largest.
    result = compare(device, differences, tolerance, summary, **values)
    if result.status is ContactStatus.NOT_COMPUTED:
        return result
    try:
        for name, actual in losses.items():
            check_agreement(name, expected, actual, tolerance)
    except Disagreement as error:
        return replace(result, status=ContactStatus.WRONG, reason=str(error))
    return result
