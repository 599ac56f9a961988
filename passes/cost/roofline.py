"""A roofline model of operators, used to choose lowerings, to plan and to simulate.

    seconds = calls / rate of calls + arithmetic / rate of products + traffic / bandwidth

The rates are the machine's own (`hfusion.device.calibrate`), the shares of them that a lowering reaches its
`Efficiency`. These are fits to forward and backward of single operators, on one core with 4 and 16 members: within a
fifth of the times of convolutions, linear layers, BatchNorm and pooling of 2^12 to 2^19 elements of a member. For whole
training steps they reproduce that convolutions run best in one call up to about 2^16 elements of a member, and above
that in a channels-last loop; that a loop is worth leaving below about 2^15 elements; and that gradients are expensive
where a loop merges the dims of images or ends. On an accelerator there are efficiencies of convolutions, linear layers
and BatchNorm, from the times of layers of 16 members on one H200 (docs/benchmarks/contact-h200.json): full rates, and
fixed costs with which one call for all members is chosen from two members on. Convolutions and linear layers are timed
on each accelerator when its rates are (`hfusion.device.layer_times`). Other lowerings differ there only in their number
of calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hfusion.core.layout import (
    Conversion,
    listed_to_packed,
    listed_to_stacked,
    packed_to_listed,
    shared_to_listed,
    shared_to_packed,
    shared_to_stacked,
    stacked_to_listed,
    stacked_to_packed,
)
from hfusion.device.calibrate import ComputeRates
from hfusion.ops.lowering import PLAIN, Efficiency, Lowering

# A backward makes a gradient for each of two operands: of what is counted for both together, a third is forward.
FORWARD = 1 / 3

# How many times a value is read or written by a conversion: forward, backward if it has a gradient.
PASSES: Mapping[Conversion, tuple[int, int]] = {
    shared_to_stacked: (0, 2),
    shared_to_packed: (2, 2),
    shared_to_listed: (0, 2),
    stacked_to_packed: (2, 0),
    stacked_to_listed: (0, 2),
    packed_to_listed: (0, 2),
    listed_to_stacked: (2, 0),
    listed_to_packed: (2, 0),
}
# Conversions that handle every member's tensor separately.
LOOPING = frozenset({stacked_to_listed, packed_to_listed, listed_to_stacked, listed_to_packed})
# The same for images, in addition: they change their memory order, and the gradient comes in an order that the value
# before does not have; elementwise operators take 4 ns for an element of such a pair.
REORDERED = (2, 14)
REORDERING = frozenset({stacked_to_listed, listed_to_stacked, stacked_to_packed})
# From channels_last to channels_last a pixel is cut into the channels of members, or put together of them: 4 to 14
# passes in all on one core of a Xeon, over 4 to 26 MB.
PIXELS = (1, 5)
BETWEEN_PIXELS = frozenset({packed_to_listed, listed_to_packed})
# Python's calls that a view takes.
VIEW = 1.0


class Seconds(NamedTuple):
    """Seconds that an operator takes for all members."""

    forward: float
    backward: float

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Work:
    """The work of one operator for all members.

    ``calls`` of its function; ``flops`` of the forward, and ``products``, the ratio of those of the backward to them;
    ``more``: further operations of both; ``traffic``: bytes that the forward reads and writes, the backward twice
    that. ``tracked``: whether there is a backward. ``view``: whether the result is a view of an operand, which takes no
    work but the call. ``dtype``: of the products; further operations count as those of float32.
    """

    calls: int
    flops: float
    products: float
    more: float
    traffic: float
    tracked: bool
    view: bool = False
    dtype: torch.dtype = torch.float32


def seconds(lowering: Lowering, work: Work, rates: ComputeRates) -> Seconds:
    """Estimate the seconds of an operator by ``lowering``."""
    if work.view:
        return _split(work.calls * VIEW / rates.calls, work.tracked)
    efficiency = efficiency_on(rates, lowering)
    arithmetic, traffic = rates.flops_of(work.dtype) * efficiency.arithmetic, rates.memory * efficiency.traffic
    more = work.more / (rates.flops * efficiency.arithmetic)
    either = _split(work.calls * efficiency.calls / rates.calls + more, work.tracked)
    backward = work.flops * work.products / arithmetic + 2 * work.traffic / traffic if work.tracked else 0.0
    return Seconds(either.forward + work.flops / arithmetic + work.traffic / traffic, either.backward + backward)


def efficiency_on(rates: ComputeRates, lowering: Lowering) -> Efficiency:
    """Return what a lowering takes of ``rates``: as measured on the device, else as fitted to another."""
    prior = lowering.efficiency if rates.device == "cpu" else lowering.efficiency.gpu or PLAIN
    fit = rates.kinds.get(prior.kind)
    return prior if fit is None else replace(prior, calls=fit.calls, arithmetic=fit.arithmetic)


def conversion_seconds(
    convert: Conversion, size: int, members: int, rates: ComputeRates, *, tracked: bool, image: bool
) -> Seconds:
    """Estimate the seconds to convert a value of ``size`` bytes, of all members, to another layout."""
    forward, backward = PASSES.get(convert, (0, 0))
    if image and reorders(rates):
        more = REORDERED if convert in REORDERING else PIXELS if convert in BETWEEN_PIXELS else (0, 0)
        forward, backward = forward + more[0], backward + more[1]
    return passes_seconds(1 + (members if convert in LOOPING else 0), (forward, backward), size, rates, tracked)


def passes_seconds(calls: int, passes: tuple[int, int], size: int, rates: ComputeRates, tracked: bool) -> Seconds:
    """Estimate the seconds of ``calls`` views and of ``passes`` (forward, backward) over ``size`` bytes."""
    either = _split(calls * VIEW / rates.calls, tracked)
    backward = passes[1] * size / rates.memory if tracked else 0.0
    return Seconds(either.forward + passes[0] * size / rates.memory, either.backward + backward)


def reorders(rates: ComputeRates) -> bool:
    """True if convolutions prefer channels-last on the device."""
    return rates.device == "cpu"


def _split(total: float, tracked: bool) -> Seconds:
    return Seconds(total * FORWARD, total * (1 - FORWARD) if tracked else 0.0)
