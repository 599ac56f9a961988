"""Sixteen learning rates at once: an array of CNNs on scikit-learn's handwritten digits.

    python examples/digits_sweep.py --members 16 --epochs 10 --out digits_sweep.png

All members start from the same weights and see the same batches, so only the learning rate differs. They are
trained as one array with hfusion, then the same models one by one with torch.optim. The tables compare time and
accuracy. A few steps in float64 then show that each member is trained as if alone; ``--check`` does only that.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

import hfusion as hf

LARGEST_DIFFERENCE = 1e-9
CHECK_STEPS = 5

Labelled = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Run:
    """Losses ``[steps]`` or, of several models, ``[steps, B]``; seconds of the first step and the others."""

    losses: Tensor
    first: float
    others: float


@dataclass(frozen=True)
class Sweep:
    """Losses, times and test accuracies of the array and of the single models, by learning rate."""

    rates: list[float]
    epochs: int
    array: Run
    alone: Run
    accuracies: list[float]
    alone_accuracies: list[float]


def load(seed: int, device: torch.device) -> tuple[Labelled, Labelled]:
    """Training and test set, 3 to 1, of the 1797 digits: images ``[N, 1, 8, 8]`` and labels ``[N]``."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train, test = (torch.tensor(part, dtype=torch.float32, device=device).view(-1, 1, 8, 8) for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part, device=device) for part in parts[2:])
    # The test images are shifted and scaled as the training images are: nothing is learned from them.
    mean, std = train.mean(), train.std()
    return ((train - mean) / std, train_labels), ((test - mean) / std, test_labels)


def make_model() -> nn.Module:
    """An ordinary CNN; nothing in it knows that it will be fused."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 10),
    )


def make_models(count: int, seed: int, device: torch.device) -> list[nn.Module]:
    """``count`` models with the same weights."""
    torch.manual_seed(seed)
    model = make_model().to(device)
    return [copy.deepcopy(model) for _ in range(count)]


def shuffled(data: Labelled, size: int, epochs: int, seed: int) -> list[Labelled]:
    """The batches of all epochs, drawn before any training, so that array and single models get the same."""
    images, labels = data
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(len(images), generator=generator).to(images.device) for _ in range(epochs)]
    rows = [part for order in orders for part in torch.split(order, size) if len(part) == size]
    return [(images[row], labels[row]) for row in rows]


def clock(device: torch.device) -> float:
    """Seconds, once all the work given to ``device`` is done."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


def train_array(models: list[nn.Module], rates: list[float], batches: list[Labelled]) -> tuple[hf.FusedModule, Run]:
    """Train all models as one. The first step includes capture, fusion and the self-check."""
    device = batches[0][0].device
    history, ends = [], [clock(device)]
    fused = hf.fuse(models)
    optimizer = hf.optim.Adam(fused.parameters(), lr=rates)
    loss_of = hf.per_model(F.cross_entropy)
    for images, labels in batches:
        optimizer.zero_grad()
        losses = loss_of(fused(images), labels)
        # The gradient of the sum is, for every member, the gradient of its own loss.
        losses.sum().backward()
        optimizer.step()
        history.append(losses.detach())
        if len(history) in (1, len(batches)):
            ends.append(clock(device))
    return fused, Run(torch.stack(history), ends[1] - ends[0], ends[-1] - ends[1])


def train_alone(model: nn.Module, rate: float, batches: list[Labelled]) -> Run:
    """The same for one model, without hfusion."""
    device = batches[0][0].device
    history, ends = [], [clock(device)]
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for images, labels in batches:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        history.append(loss.detach())
        if len(history) in (1, len(batches)):
            ends.append(clock(device))
    return Run(torch.stack(history), ends[1] - ends[0], ends[-1] - ends[1])


def accuracy(model: nn.Module, data: Labelled) -> Tensor:
    """The share of right answers: one number for a model, ``[B]`` for an array."""
    images, labels = data
    model.eval()
    with torch.no_grad():
        answers: Tensor = model(images).argmax(-1)
    return (answers == labels).double().mean(-1)


def difference(member: nn.Module, alone: nn.Module) -> float:
    """The largest difference between two models, relative to the largest value of its tensor."""
    pairs = zip(member.state_dict().values(), alone.state_dict().values(), strict=True)
    gaps = [(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs]
    return float(torch.stack(gaps).max())


def check(models: list[nn.Module], rates: list[float], batches: list[Labelled]) -> list[float]:
    """Return the `difference` between each member and the same model trained alone, in float64."""
    exact = [(images.double(), labels) for images, labels in batches]
    models = [copy.deepcopy(model).double() for model in models]
    fused, _ = train_array(models, rates, exact)
    for model, rate in zip(models, rates, strict=True):
        train_alone(model, rate, exact)
    return [difference(fused[b], model) for b, model in enumerate(models)]


def sweep(
    models: list[nn.Module], rates: list[float], batches: list[Labelled], test: Labelled, epochs: int
) -> tuple[hf.FusedModule, Sweep]:
    """Train the models as an array, then each by itself, and compare."""
    fused, array = train_array(models, rates, batches)
    runs = [train_alone(model, rate, batches) for model, rate in zip(models, rates, strict=True)]
    alone = Run(
        torch.stack([run.losses for run in runs], dim=1),
        sum(run.first for run in runs),
        sum(run.others for run in runs),
    )
    accuracies = accuracy(fused, test).tolist()
    alone_accuracies = [float(accuracy(model, test)) for model in models]
    return fused, Sweep(rates, epochs, array, alone, accuracies, alone_accuracies)


def epoch_losses(found: Sweep) -> Tensor:
    """The mean training loss of every epoch, ``[epochs, B]``."""
    return found.array.losses.view(found.epochs, -1, len(found.rates)).mean(1).cpu()


def rates_table(found: Sweep, gaps: list[float]) -> Table:
    table = Table("learning rate", "train loss", "test accuracy", "differs from alone*")
    for column in table.columns:
        column.justify = "right"
    best = max(found.accuracies)
    losses = epoch_losses(found)[-1].tolist()
    for rate, loss, accuracy, gap in zip(found.rates, losses, found.accuracies, gaps, strict=True):
        style = "bold green" if accuracy == best else None
        table.add_row(f"{rate:.1e}", f"{loss:.4f}", f"{accuracy:.1%}", f"{gap:.0e}", style=style)
    return table


def times_table(found: Sweep) -> Table:
    steps = len(found.array.losses)
    table = Table("", "first step", f"other {steps - 1} steps", "together")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, run in [("as one array", found.array), ("one by one", found.alone)]:
        table.add_row(name, f"{run.first:.2f} s", f"{run.others:.2f} s", f"{run.first + run.others:.2f} s")
    ours, theirs = found.array, found.alone
    others = f"{theirs.others / ours.others:.2f}x" if ours.others else "-"
    together = (theirs.first + theirs.others) / (ours.first + ours.others)
    table.add_row("speed-up", "", others, f"{together:.2f}x", style="bold")
    return table


def draw(found: Sweep, path: Path) -> None:
    """Accuracy and loss against the learning rate, and the loss curves."""
    figure = Figure(figsize=(14, 4.2), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    losses = epoch_losses(found)
    left.semilogx(found.rates, [100 * value for value in found.accuracies], "o-", label="as one array")
    left.semilogx(
        found.rates, [100 * value for value in found.alone_accuracies], "x", label="one by one", color="black"
    )
    left.set(xlabel="learning rate", ylabel="test accuracy (%)", title="Test accuracy")
    left.legend()
    middle.loglog(found.rates, losses[-1], "o-", color="tab:red")
    middle.set(xlabel="learning rate", ylabel="cross-entropy (nats)", title="Training loss, last epoch")
    # Two values at least: a colour scale of one rate has no extent.
    scale = ScalarMappable(LogNorm(min(found.rates), max(*found.rates, 2 * min(found.rates))), "viridis")
    for colour, curve in zip(scale.to_rgba(np.array(found.rates)), losses.T, strict=True):
        right.semilogy(range(1, found.epochs + 1), curve, color=colour)
    right.set(xlabel="epoch", ylabel="cross-entropy (nats)", title="Training loss")
    right.xaxis.get_major_locator().set_params(integer=True)
    figure.colorbar(scale, ax=right, label="learning rate")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16, help="learning rates, from 1e-5 to 0.1 (16)")
    parser.add_argument("--epochs", type=int, default=10, help="passes over the training set (10)")
    parser.add_argument("--batch", type=int, default=32, help="images per step (32)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the order (0)")
    parser.add_argument("--out", type=Path, default=Path("digits_sweep.png"), help="the plot (digits_sweep.png)")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cpu"), help="cpu (default) or an accelerator"
    )
    parser.add_argument("--check", action="store_true", help="only compare with training alone, in float64")
    chosen = parser.parse_args(argv)
    for name in ("members", "epochs", "batch"):
        if getattr(chosen, name) < 1:
            parser.error(f"--{name} is {getattr(chosen, name)}; it must be at least 1")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    chosen = options(argv)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    # On a busy machine, threads wait for each other in kernels this small. Array and single models get one.
    torch.set_num_threads(1)
    console = Console()
    train, test = load(chosen.seed, chosen.device)
    batches = shuffled(train, chosen.batch, chosen.epochs, chosen.seed)
    if not batches:
        raise SystemExit(f"--batch {chosen.batch} exceeds the {len(train[0])} training images; take fewer")
    rates = torch.logspace(-5, -1, chosen.members, dtype=torch.float64).tolist()
    models = make_models(chosen.members, chosen.seed, chosen.device)
    console.print(
        f"{chosen.members} CNNs of {sum(p.numel() for p in models[0].parameters())} parameters, "
        f"{len(train[0])} digits to train, {len(test[0])} to test, {len(batches)} steps of {chosen.batch}, "
        f"{chosen.device}, 1 thread"
    )
    initial = copy.deepcopy(models)
    if chosen.check:
        console.print(exactness(compared(console, initial, rates, batches[:CHECK_STEPS])))
        return
    # The timed runs come first: the check would warm up the capture of the array.
    with console.status("training as one array, then one by one"):
        fused, found = sweep(models, rates, batches, test, chosen.epochs)
    report(console, fused, found, compared(console, initial, rates, batches[:CHECK_STEPS]))
    draw(found, chosen.out)
    console.print(f"plot: {chosen.out}")


def compared(console: Console, models: list[nn.Module], rates: list[float], batches: list[Labelled]) -> list[float]:
    """Return what `check` measures. SystemExit if a difference is too large."""
    with console.status("comparing with training alone, in float64"):
        gaps = check(models, rates, batches)
    if not max(gaps) < LARGEST_DIFFERENCE:
        raise SystemExit(f"the difference {max(gaps):.1e} exceeds {LARGEST_DIFFERENCE}: the array is not exact")
    return gaps


def exactness(gaps: list[float]) -> str:
    return (
        f"In float64, after {CHECK_STEPS} steps, the weights of each member differ from those of the same model "
        f"trained alone by at most {max(gaps):.1e} (relative)."
    )


def report(console: Console, fused: hf.FusedModule, found: Sweep, gaps: list[float]) -> None:
    """Print the tables, and the best member as a model of its own."""
    console.print(rates_table(found, gaps), times_table(found), sep="\n")
    mean = sum(found.accuracies) / len(found.accuracies)
    mean_alone = sum(found.alone_accuracies) / len(found.alone_accuracies)
    console.print(f"* {exactness(gaps)}")
    console.print(
        "The runs above are in float32, where sums round in another order: the mean test accuracy is "
        f"{mean:.1%} as one array and {mean_alone:.1%} one by one. The first step of the array includes its capture."
    )
    best = max(range(len(fused)), key=found.accuracies.__getitem__)
    model = fused.unfuse()[best]
    console.print(f"best: learning rate {found.rates[best]:.1e}, fused.unfuse()[{best}], a {type(model).__name__}")


if __name__ == "__main__":
    main()
