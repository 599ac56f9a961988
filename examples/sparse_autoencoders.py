"""Eight TopK sparse autoencoders with different k, trained on one stream of activations as one array.

    python examples/sparse_autoencoders.py --steps 2000 --features 512
    python examples/sparse_autoencoders.py --compare --double

How many features may be active for one activation, k, is the number that people sweep (Gao et al., "Scaling and
evaluating sparse autoencoders", 2024). The model is the usual one: k is a number of it, columns of the decoder have
length 1, and the part of their gradient that would change the length is removed before clipping. Both are functions of
one model, which `hf.each` runs for all of them. Activations are read once for all members.

Activations are made here: sums of a few of many random directions, so that it can be said how many of them were found.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import hfusion as hf

ACTIVE, BATCH, CLIP = 5, 256, 1.0
KS = (1, 2, 3, 4, 6, 8, 12, 16)


class TopKAutoencoder(nn.Module):
    """Keep the k largest features of each activation; k is a number of the member's own."""

    def __init__(self, width: int, features: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.encoder, self.decoder = nn.Linear(width, features), nn.Linear(features, width, bias=False)
        self.b_dec = nn.Parameter(torch.zeros(width))
        with torch.no_grad():
            self.decoder.weight.copy_(F.normalize(self.decoder.weight, dim=0))
            self.encoder.weight.copy_(self.decoder.weight.T)
            self.encoder.bias.zero_()

    def encode(self, x: Tensor) -> Tensor:
        features = self.encoder(x - self.b_dec).relu()
        values, places = features.topk(self.k, dim=-1, sorted=False)
        return torch.zeros_like(features).scatter_(-1, places, values)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.decoder(self.encode(x)) + self.b_dec
        return result


@hf.each
def project(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Remove the part of the decoder's gradient that is parallel to its columns."""
    unit = F.normalize(params["decoder.weight"], dim=0)
    gradient = grads["decoder.weight"]
    gradient.sub_((gradient * unit).sum(0, keepdim=True) * unit)


@hf.each
def unit_norm(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    """Give the decoder's columns length 1."""
    params["decoder.weight"].div_(params["decoder.weight"].norm(dim=0, keepdim=True))


@dataclass(frozen=True)
class Activations:
    """A stream of sums of `ACTIVE` of the ``directions [count, width]``."""

    directions: Tensor

    @staticmethod
    def random(width: int, count: int, dtype: torch.dtype) -> Activations:
        generator = torch.Generator().manual_seed(0)
        directions = F.normalize(torch.randn(count, width, generator=generator, dtype=torch.float64), dim=1)
        return Activations(directions.to(dtype))

    def batches(self, steps: int, seed: int = 1) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(seed)
        count = len(self.directions)
        for _ in range(steps):
            chosen = torch.rand(BATCH, count, generator=generator).topk(ACTIVE).indices
            strengths = torch.rand(BATCH, ACTIVE, 1, generator=generator, dtype=torch.float64) + 0.5
            yield (self.directions[chosen] * strengths.to(self.directions.dtype)).sum(1)


def make_models(width: int, features: int, ks: Sequence[int], dtype: torch.dtype) -> list[TopKAutoencoder]:
    """All from one seed, so that only k differs."""
    models = []
    for k in ks:
        torch.manual_seed(0)
        models.append(TopKAutoencoder(width, features, k).to(dtype))
    return models


class Array:
    """All autoencoders as the members of one population."""

    def __init__(self, models: Sequence[nn.Module], lr: float) -> None:
        self.pop = hf.Population(
            models,
            optimizer=lambda params: hf.optim.Adam(params, lr=lr),
            loss=F.mse_loss,
            clip_norm=CLIP,
            compile=False,
        )
        self.pop.register_gradient_hook(project)
        self.pop.optimizer.register_step_post_hook(unit_norm.step_hook(self.pop))

    def step(self, x: Tensor) -> Tensor:
        return self.pop.step(x, x)

    def models(self) -> list[nn.Module]:
        return self.pop.fused.unfuse()


class Loop:
    """One autoencoder after the other, in plain torch."""

    def __init__(self, models: Sequence[nn.Module], lr: float) -> None:
        self._models = list(models)
        self._optimizers = [torch.optim.Adam(model.parameters(), lr=lr) for model in models]

    def step(self, x: Tensor) -> Tensor:
        losses = []
        for model, optimizer in zip(self._models, self._optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            project(model)
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            unit_norm(model)
            losses.append(loss.detach())
        return torch.stack(losses)

    def models(self) -> list[nn.Module]:
        return self._models


@dataclass(frozen=True)
class Quality:
    """Attributes:
    explained: the share of the variance of activations that is reconstructed.
    found: the share of the true directions that a column of the decoder points along (cosine above 0.9).
    dead: the share of features that were active for no activation.
    """

    explained: float
    found: float
    dead: float

    @staticmethod
    @torch.no_grad()
    def of(model: nn.Module, activations: Activations, batches: int = 8) -> Quality:
        assert isinstance(model, TopKAutoencoder)
        x = torch.cat(list(activations.batches(batches, seed=2)))
        explained = 1 - (model(x) - x).square().sum() / (x - x.mean(0)).square().sum()
        cosines = activations.directions @ F.normalize(model.decoder.weight, dim=0)
        used = (model.encode(x) > 0).any(0)
        found = (cosines.max(1).values > 0.9).to(x.dtype).mean()
        return Quality(explained.item(), found.item(), 1 - used.to(x.dtype).mean().item())


def difference(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> float:
    """The largest difference of a weight, relative to the largest weight of its tensor."""
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.parameters(), other.parameters(), strict=True):
            largest = max(largest, ((a - b).abs().max() / b.abs().max()).item())
    return largest


def compare(models: Sequence[nn.Module], activations: Activations, steps: int, lr: float) -> float:
    """Step both in turn, and return how many times faster the array is than the loop."""
    array, loop = Array(models, lr), Loop(copy.deepcopy(models), lr)
    seconds: tuple[list[float], list[float]] = ([], [])
    for x in activations.batches(steps):
        for step, times in zip((array.step, loop.step), seconds, strict=True):
            start = time.perf_counter()
            step(x)
            times.append(time.perf_counter() - start)
    ours, theirs = (statistics.median(times[len(times) // 4 :]) for times in seconds)
    print(
        f"array {ours * 1e3:.1f} ms, loop {theirs * 1e3:.1f} ms a step: {theirs / ours:.2f}x; "
        f"largest relative difference of weights {difference(array.models(), loop.models()):.1e}"
    )
    return theirs / ours


def main(arguments: Sequence[str] | None = None) -> dict[int, Quality]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=32, help="of an activation")
    parser.add_argument("--features", type=int, default=128, help="of a dictionary; also the number of true directions")
    parser.add_argument("--ks", type=int, nargs="+", default=KS, help="one autoencoder for each")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--double", action="store_true", help="in float64")
    parser.add_argument("--compare", action="store_true", help="time the array and the loop over autoencoders")
    options = parser.parse_args(arguments)
    dtype = torch.float64 if options.double else torch.float32
    activations = Activations.random(options.width, options.features, dtype)
    models = make_models(options.width, options.features, options.ks, dtype)
    if options.compare:
        compare(models, activations, options.steps, options.lr)
        return {}
    array = Array(models, options.lr)
    for x in activations.batches(options.steps):
        array.step(x)
    qualities = {k: Quality.of(m, activations) for k, m in zip(options.ks, array.models(), strict=True)}
    table = Table("k", "variance explained", "directions found", "dead features")
    for k, quality in qualities.items():
        table.add_row(str(k), f"{quality.explained:.3f}", f"{quality.found:.2f}", f"{quality.dead:.2f}")
    Console().print(table)
    return qualities


if __name__ == "__main__":
    main()
