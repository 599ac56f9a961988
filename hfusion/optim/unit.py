"""One kernel call for members that differ in learning rate and weight decay only.

Every optimizer here subtracts ``lr * u`` where ``u`` knows nothing of ``lr``. The kernel runs once over the
whole stacks, with a learning rate of 1 and zeros in the place of the parameters, which leaves ``-u``; one
more pass adds ``lr * -u`` with each member's own rate. The result is that of the rows up to rounding. Small
stacks gain, which cost a row more than their arithmetic; large ones lose by the additional pass through
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfusion.optim.rows import Row, Traits
from hfusion.optim.settings import Settings

# Measured on a CPU, in ns: a kernel call, the additional pass over an element, and what it costs to make one
# step for all members at all.
_CALL = 3000
_ELEMENT = 0.18
_UNIT = 12000
# The zeros stay in the processor's cache.
_MAX_ELEMENTS = 1 << 22


def unit_places(params: Sequence[Tensor], runs: int, traits: Traits) -> list[int]:
    """Places of the stacks in ``params`` for which one step for all members beats ``runs`` rows."""
    sizes = [param.numel() for param in params]
    others = runs - 1

    def gain(places: list[int]) -> float:
        calls = _CALL * others if len(places) == len(sizes) else 0
        return calls + sum(traits.tensor_ns * others - _ELEMENT * sizes[place] for place in places)

    every = list(range(len(sizes)))
    small = [place for place in every if traits.tensor_ns * others > _ELEMENT * sizes[place]]
    fitting = [places for places in (small, every) if sum(sizes[place] for place in places) <= _MAX_ELEMENTS]
    best = max(fitting, key=gain, default=[])
    return best if gain(best) > _UNIT else []


class UnitPlan:
    """The single row of some stacks whose parameters are replaced by the directions of the step.

    ``stacks``: the parameters, then each state buffer; each a list of contiguous tensors ``[B, *shape]``.
    """

    def __init__(self, stacks: Sequence[list[Tensor]], traits: Traits) -> None:
        self._params, *self._buffers = stacks
        self._directions = [torch.zeros_like(param) for param in self._params]
        self._decoupled = traits.decoupled
        self._settings: Settings | None = None
        first = self._params[0]
        self._vectors = [first.new_zeros(len(first)) for _ in range(3)]
        self._rates, self._decays, self._shrinks = (
            [vector.view(-1, *[1] * (param.dim() - 1)) for param in self._params] for vector in self._vectors
        )

    def load(self, grads: list[Tensor], settings: Settings, number: float, step: Tensor) -> Row:
        """The row for step ``number``; weight decay, which the kernel cannot see, is applied here."""
        if settings is not self._settings:
            self._write(settings)
        if any(settings.columns[-1]):
            if self._decoupled:
                torch._foreach_mul_(self._params, self._shrinks)
            else:
                grads = [*torch._foreach_addcmul(grads, self._params, self._decays)]
        torch._foreach_zero_(self._directions)
        return Row(self._directions, grads, self._buffers, number, step)

    def store(self) -> None:
        """Move the parameters, each member by its own rate."""
        torch._foreach_addcmul_(self._params, self._directions, self._rates)

    def _write(self, settings: Settings) -> None:
        rates, decays = (torch.tensor(settings.columns[index], dtype=torch.float64) for index in (0, -1))
        # The kernel negates the gradient if it maximizes.
        sign = -1.0 if settings.maximize else 1.0
        for vector, values in zip(self._vectors, (rates, sign * decays, 1 - rates * decays), strict=True):
            vector.copy_(values)
        self._settings = settings
