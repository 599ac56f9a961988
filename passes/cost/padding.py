"""Compare the cost of batches padded to the largest, in one call, with that of one call per batch size."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor, fx

from hfusion.device.calibrate import ComputeRates
from hfusion.passes.cost.price import Model

# The overhead of a call for some members, such as the lookup of their program, as a number of operators. With it the
# faster of both was chosen in ten of ten cases on one thread of a CPU: MLPs, CNNs and encoders of 3 to 16 members,
# with batches of 2 to 1024 samples.
BLOCK_CALLS = 80.0
# A call for some of the members takes their rows of each parameter, and autograd adds the gradients of these rows to
# those of all members: operators per parameter, and how often it passes over the rows and over the whole.
ROW_CALLS, WHOLE_PASSES = 6.0, 3
# How often forward and backward pass over a parameter.
PARAMETER_PASSES = 3


@dataclass(frozen=True)
class SizeCosts:
    """Estimated seconds of a forward and its backward, in parts.

    Attributes:
        call: of a call, however many members and samples it computes.
        block: more of a call that computes some of the members only.
        member: of each member of a call.
        sample: of each sample of a member.
    """

    call: float
    block: float
    member: float
    sample: float

    @staticmethod
    def of(
        member: fx.Graph, program: fx.Graph, members: int, stacks: Iterable[Tensor], rates: ComputeRates
    ) -> SizeCosts:
        """Split the estimate of a program of ``members`` members, made of the graph ``member``, into parts."""
        model = Model.of(member, members, rates)
        choices = [node.meta["choice"] for node in program.nodes if "choice" in node.meta]
        total = sum(choice.price.seconds for choice in choices)
        call = sum(node.op == "call_function" for node in program.nodes) / rates.calls
        sizes = [math.prod(stack.shape) * stack.element_size() for stack in stacks]
        row = sum(sizes) / members / rates.memory
        block = (BLOCK_CALLS + ROW_CALLS * len(sizes)) / rates.calls + WHOLE_PASSES * sum(sizes) / rates.memory
        sample = max(total - call - PARAMETER_PASSES * row * members, 0.0) / (members * model.batch)
        return SizeCosts(call, block, PARAMETER_PASSES * row, sample)

    def padded(self, sizes: Iterable[int]) -> float:
        """One call over batches of the largest size."""
        counts = list(sizes)
        return self.call + len(counts) * (self.member + max(counts) * self.sample)

    def by_size(self, sizes: Iterable[int]) -> float:
        """A call for each size."""
        counts = list(sizes)
        calls = len(set(counts)) * (self.call + self.block)
        return calls + sum(2 * self.member + count * self.sample for count in counts)
