"""The input of every contender, and its result."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from hfusion.bench.cases import FuseCase

# bfloat16 keeps 8 bits, and contenders round at different places.
WITH_AMP = 5e-2
# Of what members share; theirs count from 0.
BASE_SEED = 1 << 20


class Unavailable(Exception):
    """This contender cannot run this workload; the message is the reason, shown in its cell."""


def error_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Disagreement(Exception):
    """A contender computes other losses than members trained one by one; its time would mean nothing."""


def _nothing() -> None:
    return None


@dataclass(frozen=True)
class Workload:
    """``members`` models of ``case``, each with its own seed and its own learning rate.

    ``amp``: forward and loss run under autocast to this dtype. ``one_rate``: all members have the rate of the first.
    """

    case: FuseCase
    members: int
    device: torch.device
    amp: torch.dtype | None = None
    one_rate: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """One learning rate per member, from 3e-4 up to 3e-3 in equal ratios."""
        if self.one_rate:
            return (3e-4,) * self.members
        steps = max(self.members - 1, 1)
        return tuple(3e-4 * 10 ** (member / steps) for member in range(self.members))

    @property
    def tolerance(self) -> float:
        """The relative difference of a loss that still counts as agreement."""
        return self.case.tolerance if self.amp is None else max(self.case.tolerance, WITH_AMP)

    def models(self, chosen: Iterable[int] | None = None) -> list[nn.Module]:
        """New models of the ``chosen`` members, or of all, in training mode; always the same weights.

        The base that they share, if the case has one, is one object in all models of a call.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(BASE_SEED)
            base = () if self.case.make_base is None else (self.case.make_base(),)
            return [self._model(member, *base) for member in (range(self.members) if chosen is None else chosen)]

    def functional(self) -> Workload:
        """The same with models whose forward takes derivatives by torch.func, if it takes any."""
        make_model = self.case.make_functional or self.case.make_model
        return replace(self, case=replace(self.case, make_model=make_model))

    def _model(self, member: int, *base: object) -> nn.Module:
        torch.manual_seed(member)
        return self.case.make_model(*base).to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward and loss: autocast with ``amp``, else none."""
        return nullcontext() if self.amp is None else torch.autocast(self.device.type, dtype=self.amp)

    def batch(self) -> tuple[Tensor, Tensor]:
        """The inputs and the target that all members share."""
        inputs, target = self.case.make_batch()
        return inputs.to(self.device), target.to(self.device)


@dataclass(frozen=True)
class Running:
    """A contender that is ready to train.

    ``step`` does one whole training step of all members (zero gradients, forward, loss, backward, Adam) and
    returns the members' losses; ``close`` frees what it holds; ``cores`` it keeps busy when torch runs one
    thread; ``note`` says what it does differently from the others.
    """

    step: Callable[[], Tensor | Sequence[Tensor]]
    close: Callable[[], None] = _nothing
    cores: int = 1
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A way to train many models. ``start`` raises Unavailable when it cannot; ``one_rate``: with one for all only."""

    name: str
    about: str
    start: Callable[[Workload], Running]
    one_rate: bool = False


def losses(running: Running, steps: int) -> Tensor:
    """Train for ``steps`` steps; the losses [steps, B] as float64 on the CPU."""
    rows = []
    for _ in range(steps):
        row = running.step()
        rows.append(row if isinstance(row, Tensor) else torch.stack(list(row)))
    return torch.stack([row.detach().cpu().double() for row in rows])


def check_agreement(name: str, expected: Tensor, actual: Tensor, tolerance: float) -> None:
    """Compare losses [steps, B] of contender ``name`` with those of the serial loop.

    Raises Disagreement with the first step and member whose relative difference is above ``tolerance``, or
    not a number.
    """
    if expected.shape != actual.shape:
        raise Disagreement(f"{name}: losses [steps, B] of shape {[*actual.shape]}, serial {[*expected.shape]}")
    difference = (actual - expected).abs() / expected.abs().clamp_min(1e-12)
    wrong = ~(difference <= tolerance)
    if not wrong.any():
        return
    step, member = (int(i) for i in wrong.nonzero()[0])
    raise Disagreement(
        f"{name}: member {member} has loss {actual[step, member]:.6g} at step {step}, "
        f"trained alone {expected[step, member]:.6g} "
        f"(relative difference {difference[step, member]:.1e}, tolerated {tolerance:.0e})"
    )
