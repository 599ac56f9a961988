"""One kernel call for members that differ in learning rate and weight decay only.

Every optimizer here subtracts ``lr * u`` where ``u`` knows nothing of ``lr``. The kernel runs once over the
whole stacks, with a learning rate of 1 and zeros in the place of the parameters, which leaves ``-u``; one
more pass adds ``lr * -u`` with each member's own rate. The result is that of the rows up to rounding. Small
stacks gain, where calls row by row cost more than the arithmetic; large ones lose by the additional pass
through memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfusion.optim.rows import Row, RowPlan, Traits
from hfusion.optim.settings import Settings

# Measured on a CPU, in ns: a kernel call, and the additional pass over an element.
_CALL = 1000
_ELEMENT = 0.27
# The zeros stay in the processor's cache.
_MAX_ELEMENTS = 1 << 22


def unit_pays(params: Sequence[Tensor], runs: int, traits: Traits) -> bool:
    """Whether one step for all members is cheaper than ``runs`` calls with rows of the stacks ``params``."""
    elements = sum(param.numel() for param in params)
    saved = (runs - 1) * (_CALL + traits.tensor_ns * len(params))
    return elements <= _MAX_ELEMENTS and saved > _ELEMENT * elements


class UnitPlan:
    """The single row of some stacks whose parameters are replaced by the directions of the step.

    ``stacks``: the parameters, then each state buffer; each a list of contiguous tensors ``[B, *shape]``.
    """

    def __init__(self, stacks: Sequence[list[Tensor]], traits: Traits) -> None:
        self._params = stacks[0]
        self._directions = [torch.zeros_like(param) for param in self._params]
        self._plan = RowPlan([self._directions, *stacks[1:]], [len(self._params[0])], traits.tensor_ns)
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
        (rows,) = self._plan.load(grads)
        directions, *buffers = (stack[0] for stack in self._plan.rows)
        return Row(directions, rows, buffers, number, step)

    def store(self) -> None:
        """Move the parameters, each member by its own rate."""
        self._plan.store()
        torch._foreach_addcmul_(self._params, self._directions, self._rates)

    def _write(self, settings: Settings) -> None:
        rates, decays = (torch.tensor(settings.columns[index], dtype=torch.float64) for index in (0, -1))
        # The kernel negates the gradient if it maximizes.
        sign = -1.0 if settings.maximize else 1.0
        for vector, values in zip(self._vectors, (rates, sign * decays, 1 - rates * decays), strict=True):
            vector.copy_(values)
        self._settings = settings
