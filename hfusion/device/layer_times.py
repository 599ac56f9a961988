"""Time layers of several members, and fit how well each kind of lowering uses a device.

The `hfusion.ops.lowering.Efficiency` of a lowering was fitted on one reference device. Here the same kinds are timed on
this device: a small layer measures the cost of a call, a large one the rate of its products.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.device.backend import backend

GROUPED, DENSE, CONVOLUTIONS = "grouped convolution", "dense convolution", "loop of convolutions"
BATCHED, PRODUCTS = "batched product", "loop of products"
KINDS = (GROUPED, DENSE, CONVOLUTIONS, BATCHED, PRODUCTS)
SECONDS = 3.0
"""The time to measure in, except for the first run of each layer, which loads its kernels."""
MOST_RUNS = 7
# Convolutions compute in TF32 by default, faster than the products in float32 from which the rate comes.
SHARES = (1 / 16, 16.0)
CALLS = (1.0, 1e3)


class KindFit(NamedTuple):
    """``calls``: fixed cost in calls of small operators; ``arithmetic``: fraction of the rate of matrix products."""

    calls: float
    arithmetic: float


class LayerSizes(NamedTuple):
    """Sizes of a 3 x 3 convolution of ``size`` x ``size`` images, and of a linear layer of ``features`` samples.

    ``repeats``: how often a timed run computes a layer, to reduce the share of autograd's start and of waiting.
    """

    members: int
    batch: int
    channels: int
    size: int
    features: int
    repeats: int


Sizes = Mapping[str, LayerSizes]
ACCELERATOR: Sizes = {"small": LayerSizes(4, 4, 16, 8, 64, 16), "large": LayerSizes(4, 32, 256, 32, 2048, 2)}


class TimedLayer(NamedTuple):
    """A layer of all members: ``run`` takes tensors of ``shapes`` and makes ``calls`` calls.

    ``flops`` and ``traffic``: operations and bytes, forward and backward. ``repeats``: see `LayerSizes`.
    """

    run: Callable[[Tensor, Tensor], Tensor | list[Tensor]]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]
    calls: int
    flops: float
    traffic: float
    repeats: int


def layers(sizes: LayerSizes) -> dict[str, TimedLayer]:
    """Return a layer for each kind of lowering."""
    members, batch, channels, size, features, repeats = sizes
    convolve = partial(F.conv2d, padding=1)
    image, kernel = (channels, size, size), (channels, 3, 3)
    inputs, weights = members * batch * math.prod(image), members * channels * math.prod(kernel)
    stacked = (members * channels, *kernel)
    # A backward makes two products, and twice the traffic. Elements have four bytes.
    convolution = (6.0 * weights * batch * size**2, 12.0 * (2 * inputs + weights), repeats)
    product = (6.0 * members * features**3, 12.0 * 3 * members * features**2, repeats)
    grouped = (batch, members * channels, size, size), stacked
    dense = (batch, *image), stacked
    separate = (members, batch, *image), (members, channels, *kernel)
    square = ((members, features, features),) * 2
    return {
        GROUPED: TimedLayer(partial(convolve, groups=members), grouped, 1, *convolution),
        DENSE: TimedLayer(convolve, dense, 1, *convolution),
        CONVOLUTIONS: TimedLayer(partial(_loop, convolve), separate, members, *convolution),
        BATCHED: TimedLayer(torch.bmm, square, 1, *product),
        PRODUCTS: TimedLayer(partial(_loop, F.linear), square, members, *product),
    }


def _loop(run: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, weights: Tensor) -> list[Tensor]:
    return [run(x, weight) for x, weight in zip(inputs, weights, strict=True)]


def timed_layers(sizes: Sizes = ACCELERATOR) -> dict[str, TimedLayer]:
    """Return all layers by the name of what is measured."""
    return {
        f"{kind}, {size}": layer for size, layer_sizes in sizes.items() for kind, layer in layers(layer_sizes).items()
    }


def measure(device: torch.device, sizes: Sizes = ACCELERATOR) -> dict[str, float]:
    """Return how many times a second each layer runs forward and backward, at least once."""
    timed = timed_layers(sizes)
    return {name: max(1 / _seconds(device, layer, SECONDS / len(timed)), 1.0) for name, layer in timed.items()}


def _seconds(device: torch.device, layer: TimedLayer, limit: float) -> float:
    """Return the minimum seconds of a layer over runs that start within ``limit`` seconds, after a warm-up run."""
    draw = torch.Generator(device).manual_seed(0)
    operands = [torch.rand(shape, device=device, dtype=torch.float32, generator=draw) for shape in layer.shapes]
    x, weight = (operand.requires_grad_() for operand in operands)
    gradients = [torch.ones_like(y) for y in _outputs(layer, x, weight)]
    times: list[float] = []
    while len(times) < 2 or (len(times) < 1 + MOST_RUNS and sum(times[1:]) * layer.repeats < limit):
        backend(device).wait()
        start = time.perf_counter()
        torch.autograd.grad(_outputs(layer, x, weight), (x, weight), gradients)
        backend(device).wait()
        times.append((time.perf_counter() - start) / layer.repeats)
    return max(min(times[1:]), 1e-9)


def _outputs(layer: TimedLayer, x: Tensor, weight: Tensor) -> list[Tensor]:
    results = (layer.run(x, weight) for _ in range(layer.repeats))
    return [y for result in results for y in (result if isinstance(result, list) else [result])]


def fitted(
    measured: Mapping[str, float], flops: float, memory: float, calls: float, sizes: Sizes = ACCELERATOR
) -> dict[str, KindFit]:
    """Fit the estimate of `hfusion.passes.cost.price` to what `measure` returned.

    ``flops``, ``memory``, ``calls``: the rates of the device. Layers are assumed to reach its full memory bandwidth.
    """
    fits = {}
    for kind in KINDS:
        (small, quick), (large, slow) = (
            (layer, 1 / measured[name] - layer.traffic / memory)
            for name, layer in timed_layers(sizes).items()
            if name.startswith(kind)
        )
        share = _between(SHARES, (large.flops - small.flops) / flops, slow - quick)
        fits[kind] = KindFit(_between(CALLS, (quick - small.flops / (flops * share)) * calls, small.calls), share)
    return fits


def _between(limits: tuple[float, float], numerator: float, denominator: float) -> float:
    """Return the quotient, clamped to ``limits``; the upper limit if the denominator is not positive."""
    lower, upper = limits
    return min(max(numerator / denominator, lower), upper) if denominator > 0 else upper
