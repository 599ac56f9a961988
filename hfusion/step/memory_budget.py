"""Choose how many members a training step computes at a time, so that its memory stays within a budget."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from hfusion.array.module import FusedModule
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import Ragged, StackedInput
from hfusion.core.errors import FusionError, PlanError
from hfusion.core.program import Program
from hfusion.core.text import readable
from hfusion.device.calibrate import Rates, standard_rates
from hfusion.device.machine import parse_bytes
from hfusion.optim import FusedOptimizer
from hfusion.passes.cost.cost import line, symbol_sizes
from hfusion.passes.cost.flops import SymbolSizes
from hfusion.passes.partition.segments import Segments

# Tensors per parameter that an unknown optimizer is assumed to keep, as Adam does.
_STATE_STACKS = 2
# Memory of a loss in units of the outputs' size: saved tensors, and gradients of the outputs.
_LOSS = 2


@dataclass(frozen=True)
class MemoryPlan:
    """The plan of a step that computes ``size`` of its ``members`` at a time.

    Attributes:
        peak: estimated bytes at the peak of a step.
        budget: bytes that the step may take.
    """

    members: int
    size: int
    peak: int
    budget: int

    @property
    def block(self) -> int | None:
        """The number of members of a block; None where all are computed together."""
        return None if self.size >= self.members else self.size

    def __str__(self) -> str:
        whole = "all members at a time" if self.block is None else f"{self.size} of {self.members} at a time"
        return f"{whole}, at an estimated peak of {readable(self.peak)} of memory={readable(self.budget)}"


class MemoryBudget:
    """Bytes that a training step of ``fused`` may take: weights, gradients, optimizer state and activations.

    Attributes:
        held: additional bytes that count, such as gradients of earlier calls.
    """

    def __init__(self, memory: str | int, fused: FusedModule, optimizer: Optimizer) -> None:
        self.bytes = parse_bytes(memory)
        self.held = 0
        self._fused, self._optimizer = fused, optimizer
        self._plans: dict[Any, MemoryPlan] = {}
        # The sizes by kind of call: calls with fewer samples keep them, so that they can share a program.
        self._sizes: dict[Any, int] = {}

    def plan(self, inputs: Arguments) -> MemoryPlan:
        """Return the plan of calls like this one, capturing the program of all members if there is none.

        Raises:
            PlanError: the step of one member at a time takes more than the budget.
            FusionError: there is no program of all members.
        """
        fused, largest, members = self._fused, _largest(inputs), len(self._fused)
        compiled = fused.compiled(largest)
        state = state_bytes(fused, self._optimizer) + self.held
        key = compiled.origin, largest.key, members, state
        if key not in self._plans:
            shared = sorted(fused._array.comparison.shared & compiled.written)
            if shared:
                raise FusionError(
                    f"all members of a fused {fused._original} share {shared[0]}, which forward writes to, and "
                    "memory= computes them in blocks: give each member a tensor of its own, or no memory="
                )
            kind = largest.loose_key, members
            sizes = symbol_sizes(compiled.program, largest.shapes)
            # Blocks are as even as they can be.
            even = sorted({-(-members // blocks) for blocks in range(1, members + 1)})
            most = self._sizes.get(kind, members)
            peaks = {n: state + block_bytes(compiled.program, n, sizes) for n in even if n <= most}
            if peaks[1] > self.bytes:
                raise PlanError(
                    f"a training step of {members} members of {fused._original} takes an estimated "
                    f"{readable(peaks[1])} with one member at a time: {readable(state)} for weights, gradients and the "
                    f"optimizer's state of all, {readable(peaks[1] - state)} for what one member computes. "
                    f"memory={readable(self.bytes)} is less; give more memory, fewer samples, or fewer members"
                )
            size = self._sizes[kind] = max(n for n, peak in peaks.items() if peak <= self.bytes)
            self._plans[key] = MemoryPlan(members, size, peaks[size], self.bytes)
        return self._plans[key]


def least_bytes(fused: FusedModule, optimizer: Optimizer, inputs: Arguments) -> int:
    """Estimate the peak of a step that computes one member at a time, as the loop over the models does."""
    program = fused.compiled(inputs).program
    return state_bytes(fused, optimizer) + block_bytes(program, 1, symbol_sizes(program, inputs.shapes))


def state_bytes(module: nn.Module, optimizer: Optimizer) -> int:
    """Bytes of weights, buffers, gradients and optimizer state."""
    stacks = optimizer.state_stacks if isinstance(optimizer, FusedOptimizer) else _STATE_STACKS
    trained = sum(param.nbytes for param in module.parameters() if param.requires_grad)
    held = sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
    return held + (1 + stacks) * trained


def block_bytes(program: Program, size: int, sizes: SymbolSizes) -> int:
    """Estimate the bytes of forward, loss and backward of ``size`` members, without their weights.

    The gradients of the block are included: they exist until they are copied into the gradients of all members.
    A compiled program stores fewer values, and takes less.
    """
    # Estimates of bytes do not depend on rates.
    rates = Rates(**asdict(standard_rates(torch.device("cpu"))), load=1.0, evict=1.0, read=1.0, write=1.0)
    costs = line(replace(program, members=size), sizes, rates)
    *_, run = Segments(costs, 0).starting(0)
    results = sum(value.size for value in costs.storages if value.last == len(costs.steps) and value.born)
    return max(run.peak, run.activations + run.workspace) + _LOSS * results


def _largest(inputs: Arguments) -> Arguments:
    """Return arguments in which every member has the largest batch, if members' batches differ in size."""
    if not inputs.ragged:
        return inputs
    first = inputs.ragged[0]
    member = max(range(len(first)), key=lambda row: first[row].numel())

    def even(leaf: Any) -> Any:
        return StackedInput(leaf[member].expand(len(leaf), *leaf[member].shape)) if isinstance(leaf, Ragged) else leaf

    return Arguments(tuple(map(even, inputs.leaves)), inputs.spec)
