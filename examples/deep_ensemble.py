"""A deep ensemble, regression with error bars, on scikit-learn's diabetes data.

    python examples/deep_ensemble.py --members 16 --epochs 20 --out deep_ensemble.png

Every member predicts a mean and a variance and minimises the Gaussian negative log-likelihood, from
its own initial weights, on its own bootstrap sample in its own order. Together they give one Gaussian per
patient, wider where they disagree (Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474). All are
trained at once, each with its own weight decay.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import hfusion as hf

BATCH = 32
LEARNING_RATE = 3e-3
LEVEL = 0.9


@dataclass(frozen=True)
class Data:
    """Ten standardised features per patient ``[N, 10]``, and how far the disease was a year later ``[N]``.

    The targets are standardised as well; ``mean`` and ``std`` lead back to the points of the study.
    """

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    mean: Tensor
    std: Tensor


@dataclass(frozen=True)
class Gaussians:
    """One Gaussian per patient: mean and variance ``[..., N]``, in points and squared points."""

    mean: Tensor
    variance: Tensor

    def __getitem__(self, member: int) -> Gaussians:
        return Gaussians(self.mean[member], self.variance[member])


@dataclass(frozen=True)
class Scores:
    """Root mean squared error (points), negative log-likelihood (nats), targets in the 90% interval."""

    rmse: float
    nll: float
    coverage: float


class Network(nn.Module):
    """From features ``[N, 10]`` to a mean ``[N]`` and a variance ``[N]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(10, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
        self.head = nn.Linear(64, 2)

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        mean, raw = self.head(self.body(features)).unbind(-1)
        # As in the paper: positive, and never so small that the likelihood explodes.
        return mean, F.softplus(raw) + 1e-6


def load(seed: int) -> Data:
    """The 442 patients, a quarter of them for the test."""
    parts = train_test_split(*load_diabetes(return_X_y=True, scaled=False), test_size=0.25, random_state=seed)
    features, test_features, targets, test_targets = (torch.tensor(part, dtype=torch.float32) for part in parts)
    # Only the training set tells how to scale: the test set is not to be known yet.
    centre, width = features.mean(0), features.std(0)
    mean, std = targets.mean(), targets.std()
    return Data(
        train=((features - centre) / width, (targets - mean) / std),
        test=((test_features - centre) / width, (test_targets - mean) / std),
        mean=mean,
        std=std,
    )


def gaussian_nll(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The mean negative log-likelihood of one member (nats per patient)."""
    mean, variance = output
    return 0.5 * (math.log(2 * math.pi) + variance.log() + (target - mean).square() / variance).mean(-1)


def bootstrap(data: tuple[Tensor, Tensor], members: int, epochs: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Per step, features ``[B, n, 10]`` and targets ``[B, n]`` from the members' own bootstrap samples."""
    features, targets = data
    generator = torch.Generator().manual_seed(seed)
    samples = torch.randint(len(targets), (members, len(targets)), generator=generator)
    for _ in range(epochs):
        order = torch.rand(samples.shape, generator=generator).argsort(dim=1)
        for rows in torch.split(samples.gather(1, order), BATCH, dim=1):
            yield features[rows], targets[rows]


def train(fused: hf.FusedModule, data: Data, decays: list[float], epochs: int, seed: int) -> Tensor:
    """Train all members; losses ``[steps, B]``."""
    optimizer = hf.optim.AdamW(fused.parameters(), lr=LEARNING_RATE, weight_decay=decays)
    loss_of = hf.per_model(gaussian_nll)
    history = []
    for features, targets in bootstrap(data.train, len(fused), epochs, seed):
        optimizer.zero_grad()
        # Without hf.stacked every member would see all of the tensor; with it member b sees row b.
        losses = loss_of(fused(hf.stacked(features)), hf.stacked(targets))
        losses.sum().backward()
        optimizer.step()
        history.append(losses.detach())
    return torch.stack(history)


def predict(model: nn.Module, data: Data) -> Gaussians:
    """What a model, or every member of an array, says about the test patients, in points."""
    model.eval()
    with torch.no_grad():
        mean, variance = model(data.test[0])
    return Gaussians(mean * data.std + data.mean, variance * data.std**2)


def combine(members: Gaussians) -> Gaussians:
    """The Gaussian with mean and variance of the equal mixture of the members."""
    mean = members.mean.mean(0)
    return Gaussians(mean, (members.variance + members.mean.square()).mean(0) - mean.square())


def half_width(predicted: Gaussians, level: float) -> Tensor:
    """Half the length of the central interval that should hold ``level`` of the targets (points)."""
    return (2 * predicted.variance).sqrt() * torch.erfinv(torch.tensor(level))


def coverage(predicted: Gaussians, targets: Tensor, level: float) -> float:
    """The share of targets in the central interval that should hold ``level`` of them."""
    inside = (targets - predicted.mean).abs() <= half_width(predicted, level)
    return float(inside.double().mean())


def score(predicted: Gaussians, targets: Tensor) -> Scores:
    rmse = (targets - predicted.mean).square().mean().sqrt()
    nll = gaussian_nll((predicted.mean, predicted.variance), targets)
    return Scores(float(rmse), float(nll), coverage(predicted, targets, LEVEL))


def scores_table(members: list[Scores], ensemble: Scores) -> Table:
    table = Table(
        "",
        "RMSE (points)",
        "NLL (nats)",
        f"in the {LEVEL:.0%} interval",
        caption="worst and best: by NLL on the test set",
    )
    for column in table.columns[1:]:
        column.justify = "right"
    by_likelihood = sorted(members, key=lambda scores: scores.nll)
    mean = Scores(*(sum(values) / len(members) for values in zip(*map(_values, members), strict=True)))
    for name, scores in [
        ("worst member", by_likelihood[-1]),
        ("mean of the members", mean),
        ("best member", by_likelihood[0]),
        (f"ensemble of {len(members)}", ensemble),
    ]:
        style = "bold" if scores is ensemble else None
        table.add_row(name, f"{scores.rmse:.1f}", f"{scores.nll:.2f}", f"{scores.coverage:.1%}", style=style)
    return table


def _values(scores: Scores) -> tuple[float, float, float]:
    return scores.rmse, scores.nll, scores.coverage


def draw(members: Gaussians, ensemble: Gaussians, targets: Tensor, path: Path) -> None:
    """Left: how often an interval held the truth, against how often it should. Right: intervals and truth."""
    figure = Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    levels = [0.01 * percent for percent in range(5, 100, 5)]
    nominal = [100 * level for level in levels]
    left.plot([0, 100], [0, 100], "--", color="black", label="perfectly calibrated")
    for b in range(len(members.mean)):
        observed = [100 * coverage(members[b], targets, level) for level in levels]
        left.plot(nominal, observed, color="tab:gray", alpha=0.4, label=None if b else "single members")
    observed = [100 * coverage(ensemble, targets, level) for level in levels]
    left.plot(nominal, observed, "o-", color="tab:blue", label="ensemble")
    left.set(xlabel="nominal level of the interval (%)", ylabel="test patients in the interval (%)")
    left.set(title="Calibration", xlim=(0, 100), ylim=(0, 100))
    order = ensemble.mean.argsort()
    half = half_width(ensemble, LEVEL)[order]
    places = range(len(order))
    mean = ensemble.mean[order]
    right.fill_between(places, mean - half, mean + half, alpha=0.25, label=f"{LEVEL:.0%} interval of the ensemble")
    right.plot(places, mean, label="mean of the ensemble")
    right.plot(places, targets[order], ".", color="black", label="truth")
    right.set(xlabel="test patients, by predicted mean", ylabel="disease progression (points)", title="Predictions")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        # Below, where it can hide no patient.
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, frameon=False)
    figure.savefig(path, dpi=120)


def show_members(console: Console, fused: hf.FusedModule, members: Gaussians, data: Data) -> None:
    """Print that members live on their own, as copies and as views."""
    model = fused.unfuse()[0]
    gap = float((predict(model, data).mean - members[0].mean).abs().max())
    console.print(f"fused.unfuse()[0], a {type(model).__name__} on its own, predicts the same within {gap:.0e} points")
    ours, view = fused.get_parameter("head.bias"), fused[0].get_parameter("head.bias")
    where = "the array's own memory" if view.data_ptr() == ours.data_ptr() else "a copy"
    console.print(f"fused[0], a {type(fused[0]).__name__} too, is a view: its weights lie in {where}")


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16, help="networks in the ensemble (16)")
    parser.add_argument("--epochs", type=int, default=20, help="passes over the bootstrap samples (20)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the samples (0)")
    parser.add_argument("--out", type=Path, default=Path("deep_ensemble.png"), help="the plot (deep_ensemble.png)")
    chosen = parser.parse_args(argv)
    for name in ("members", "epochs"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} is {getattr(chosen, name)}; it must be at least 1")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    chosen = options(argv)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    # Matrices this small gain nothing from more threads.
    torch.set_num_threads(1)
    console = Console()
    data = load(chosen.seed)
    fused = hf.build(Network, seeds=range(chosen.seed, chosen.seed + chosen.members))
    decays = torch.logspace(0, 1.5, chosen.members, dtype=torch.float64).tolist()
    with console.status(f"training {chosen.members} networks"):
        train(fused, data, decays, chosen.epochs, chosen.seed)
    targets = data.test[1] * data.std + data.mean
    members = predict(fused, data)
    ensemble = combine(members)
    console.print(f"{len(data.train[1])} patients to train, {len(targets)} to test; progression in points, 25 to 346")
    console.print(scores_table([score(members[b], targets) for b in range(len(fused))], score(ensemble, targets)))
    show_members(console, fused, members, data)
    draw(members, ensemble, targets, chosen.out)
    console.print(f"plot: {chosen.out}")


if __name__ == "__main__":
    main()
