"""Twelve different trainings on four devices of different size, planned, simulated and run.

    python examples/many_models_many_devices.py --epochs 2 --out runs/many

The tasks learn scikit-learn's handwritten digits with MLPs and CNNs of several sizes: single models, arrays over
learning rates, a list of two shapes, one with clipped gradients, one with gradients summed over minibatches. The four
devices are logical ones on the CPU, so that this runs anywhere; what is too large for all of them is trained in
shards. Printed are the plan, what the simulation foretells beside what really ran, and what every task learned. One
task is trained again by itself: it must be equal bit for bit. The timeline of the run is written as a picture, and
for ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.schedule.timeline import Timeline
from hfusion.tasks.train import Report

BATCH = 64
CHECKED = "cnn-large"
MACHINE = hf.Machine(
    [
        hf.Device("cpu:0", name="large", memory="8MiB"),
        hf.Device("cpu:1", name="medium", memory="6MiB"),
        hf.Device("cpu:2", name="small", memory="4MiB"),
        hf.Device("cpu:3", name="tiny", memory="2MiB"),
    ]
)


@dataclass(frozen=True)
class Digits:
    """Images ``[N, 1, 8, 8]`` and labels ``[N]``, to train and to test."""

    train: TensorDataset
    test: tuple[Tensor, Tensor]


def load(seed: int) -> Digits:
    """The 1797 digits, a quarter of them for the test."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=0.25, random_state=seed, stratify=labels)
    train, test = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) / 16 for part in parts[:2])
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(TensorDataset(train, train_labels), (test, test_labels))


def mlp(*hidden: int) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for a, b in zip((64, *hidden), hidden, strict=False):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))


def cnn(channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, channels, 3, padding=1),
        nn.BatchNorm2d(channels),
        nn.ReLU(),
        nn.Conv2d(channels, 2 * channels, 3, padding=1),
        nn.BatchNorm2d(2 * channels),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(2 * channels * 16, 10),
    )


def adam(lr: float | list[float]) -> Callable[[list[nn.Parameter]], hf.optim.Adam]:
    return lambda params: hf.optim.Adam(params, lr=lr)


def sgd(lr: float | list[float]) -> Callable[[list[nn.Parameter]], hf.optim.SGD]:
    return lambda params: hf.optim.SGD(params, lr=lr, momentum=0.9)


def make_tasks(digits: Digits, epochs: int, seed: int) -> list[hf.Task]:
    """The twelve tasks; the lists of models are fused where they have one shape."""
    torch.manual_seed(seed)
    sweep = [1e-3, 3e-3, 1e-2, 3e-2]

    def task(name: str, models: list[nn.Module], optimizer: Callable[..., object], **more: float) -> hf.Task:
        loader = DataLoader(digits.train, BATCH, shuffle=True, drop_last=True)
        return hf.Task(models, F.cross_entropy, optimizer, loader, epochs=epochs, name=name, seed=seed, **more)

    return [
        task("mlp-tiny", [mlp(32)], adam(1e-2)),
        task("mlp-small", [mlp(128, 128)], adam(3e-3)),
        task("mlp-deep", [mlp(*[128] * 6)], adam(1e-3)),
        task("mlp-wide", [mlp(512, 512)], adam(1e-3)),
        task("mlp-huge", [mlp(*[384] * 6)], adam(1e-3)),
        task("mlp-sweep", [mlp(64, 64) for _ in sweep], adam(sweep)),
        task("mlp-clipped", [mlp(64, 64, 64) for _ in sweep], sgd([0.03, 0.1, 0.3, 1.0]), clip_norm=1.0),
        task("mlp-two-shapes", [mlp(64), mlp(64), mlp(256), mlp(256)], adam(sweep)),
        task("cnn-small", [cnn(4)], adam(3e-3)),
        task("cnn-sweep", [cnn(4) for _ in sweep], adam(sweep)),
        task("cnn-summed", [cnn(8) for _ in range(2)], sgd([0.03, 0.1]), accumulate=2),
        task(CHECKED, [cnn(16) for _ in range(2)], adam([1e-3, 3e-3])),
    ]


def accuracies(models: Sequence[nn.Module], test: tuple[Tensor, Tensor]) -> list[float]:
    """The share of right answers of each model on the test set."""
    images, labels = test
    with torch.no_grad():
        return [float((model.eval()(images).argmax(-1) == labels).double().mean()) for model in models]


def results_table(tasks: Sequence[hf.Task], report: Report, digits: Digits) -> Table:
    table = Table("task", "models", "first loss", "last loss", "best accuracy", title="what the tasks learned")
    for column in table.columns[1:]:
        column.justify = "right"
    for task in tasks:
        found = report[task.name]
        best = max(accuracies(found.models, digits.test))
        first, last = (f"{float(row.mean()):.3f}" for row in (found.losses[0], found.losses[-1]))
        table.add_row(task.name, str(task.members), first, last, f"{best:.1%}")
    return table


def timelines_table(simulated: Timeline, real: Timeline) -> Table:
    table = Table("", "simulated", "real", title=f"{len(real.devices)} devices")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, value in {
        "makespan (s)": lambda t: f"{t.makespan:.2f}",
        "lower bound, estimated (s)": lambda t: f"{t.lower_bound:.2f}",
        "time spent computing": lambda t: f"{t.utilisation:.0%}",
        **{f"peak of {name} (MiB)": lambda t, n=name: f"{t.peak[n] / 2**20:.1f}" for name in real.devices},
    }.items():
        table.add_row(name, value(simulated), value(real))
    ratio = real.makespan / simulated.makespan
    table.add_row("makespan, real over simulated", "", f"{ratio:.2f}")
    return table


def check_alone(task: hf.Task, report: Report) -> None:
    """The task by itself, with memory for everything, gives the same losses and weights to the last bit."""
    alone = hf.train([task], hf.Machine([hf.Device("cpu", memory="1GiB")]))[task.name]
    assert torch.equal(alone.losses, report[task.name].losses), "the losses differ"
    for ours, theirs in zip(report[task.name].models, alone.models, strict=True):
        for name, tensor in ours.state_dict().items():
            assert torch.equal(tensor, theirs.state_dict()[name]), f"{name} differs"


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="passes over the digits (5)")
    parser.add_argument("--policy", default="patient-lrtf", help="which unit a device runs next (patient-lrtf)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, the weights and the batches (0)")
    parser.add_argument("--out", type=Path, default=Path("runs/many"), help="folder of the pictures (runs/many)")
    chosen = parser.parse_args(argv)
    if chosen.epochs < 1:
        parser.error(f"--epochs is {chosen.epochs}; it must be at least 1")
    return chosen


def main(argv: Sequence[str] | None = None) -> None:
    chosen = options(argv)
    chosen.out.mkdir(parents=True, exist_ok=True)
    # Every device computes in a thread of its own.
    torch.set_num_threads(1)
    console = Console(highlight=False)
    digits = load(chosen.seed)
    tasks = make_tasks(digits, chosen.epochs, chosen.seed)
    with console.status("planning"):
        plan = hf.plan(tasks, MACHINE)
    print(plan)
    simulated = hf.simulate(plan, policy=chosen.policy)
    with console.status(f"training {len(tasks)} tasks"):
        report = hf.train(tasks, MACHINE, policy=chosen.policy, plan=plan)
    report.timeline.validate(report.plan)
    console.print(timelines_table(simulated, report.timeline))
    console.print("simulated: by the machine's rates; what the loaders take to read is not in them")
    console.print(results_table(tasks, report, digits))
    (checked,) = (task for task in tasks if task.name == CHECKED)
    check_alone(checked, report)
    console.print(f"{CHECKED}, trained by itself, is equal bit for bit")
    simulated.draw(chosen.out / "simulated.svg")
    report.timeline.draw(chosen.out / "timeline.svg")
    report.timeline.perfetto(chosen.out / "timeline.json")
    console.print(f"{chosen.out}: simulated.svg, timeline.svg, and timeline.json for ui.perfetto.dev")


if __name__ == "__main__":
    main()
