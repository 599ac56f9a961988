"""Population based training beside sixteen fixed learning rates, on scikit-learn's handwritten digits.

    python examples/population.py --members 16 --rounds 15

Sixteen members begin with learning rates from too small to too large. After every round the worst quarter becomes a
copy of the best one, with a learning rate that is a bit larger or smaller (Jaderberg et al., "Population Based Training
of Neural Networks", 2017). Beside it the same sixteen go on with the rates that they began with. Both are one array
each: nothing is captured or compiled again when members are copied.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hfusion as hf

BATCH, STEPS = 64, 25


@dataclass(frozen=True)
class Data:
    """Samples to train with, to choose by, and to be judged by."""

    train: tuple[Tensor, Tensor]
    choose: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]


def load() -> Data:
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    x, y = torch.tensor(data.data, dtype=torch.float32)[order] / 16, torch.tensor(data.target)[order]
    return Data((x[:1000], y[:1000]), (x[1000:1400], y[1000:1400]), (x[1400:], y[1400:]))


def make_population(members: int, compile: bool) -> hf.Population:
    torch.manual_seed(0)
    rates = torch.logspace(-4, 0.5, members).tolist()
    return hf.Population(
        [nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)) for _ in range(members)],
        optimizer=lambda params: hf.optim.SGD(params, lr=rates, momentum=0.9),
        loss=F.cross_entropy,
        compile=compile,
    )


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def exploit(pop: hf.Population, scores: Tensor, generator: torch.Generator) -> None:
    """Let copies of the best quarter take the places of the worst, and explore other learning rates."""
    count = max(1, len(pop) // 4)
    ranked = scores.nan_to_num(-1.0).argsort(descending=True)
    best, worst = ranked[:count].tolist(), ranked[-count:].tolist()
    pop.copy(best, worst)
    pop.hparams["lr"][worst] *= 0.8 + 0.4 * torch.randint(2, (count,), generator=generator)


def run(data: Data, members: int, rounds: int, explore: bool, compile: bool) -> tuple[hf.Population, Tensor]:
    """A population after so many rounds, and its accuracies ``[rounds, members]`` on the samples to choose by."""
    pop, generator, found = make_population(members, compile), torch.Generator().manual_seed(1), []
    x, y = data.train
    for number in range(rounds):
        for _ in range(STEPS):
            rows = torch.randint(len(x), (BATCH,), generator=generator)
            pop.step(x[rows], y[rows])
        scores = pop.evaluate(accuracy, [data.choose])
        found.append(scores)
        if explore and number + 1 < rounds:
            exploit(pop, scores, generator)
    return pop, torch.stack(found)


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    data, table, means = load(), Table("", "mean accuracy", "of the best by choice", "learning rates"), {}
    for name, explore in (("fixed rates", False), ("population", True)):
        pop, scores = run(data, options.members, options.rounds, explore, not options.eager)
        tested = pop.evaluate(accuracy, [data.test])
        best = int(scores[-1].nan_to_num(-1.0).argmax())
        means[name] = float(tested.mean())
        rates = pop.hparams["lr"].tolist()
        table.add_row(name, f"{means[name]:.3f}", f"{tested[best]:.3f}", f"{min(rates):.1e} to {max(rates):.1e}")
    Console().print(table)
    return means


if __name__ == "__main__":
    main()
