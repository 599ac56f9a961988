"""Federated learning: a hundred clients with 1 to 300 samples each, trained as one array, equal to a loop over clients.

    python examples/federated.py --clients 100 --rounds 10 --part 0.2
    python examples/federated.py --compare --double

Each round a part of the clients takes the server's model, trains it on minibatches of its own, and the server averages
what they send, weighted by their samples: FedAvg (McMahan et al., 2017), and FedProx (Li et al., 2020), which holds
clients near the server's model. The clients of a round are the members of an array. They have different numbers of
minibatches, and the last one of each is smaller: minibatches are filled up with samples of weight 0, and who has ended
has a loss of exactly 0, so that plain SGD leaves its weights as they are, bit for bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import hfusion as hf

BATCH, EPOCHS, RATE, DISTANCE = 10, 2, 0.05, 0.1


class Net(nn.Module):
    """A small CNN for images of 8 x 8. It also says how far it is from the server's model, as FedProx wants to know."""

    def __init__(self, proximal: bool) -> None:
        super().__init__()
        self.conv1, self.conv2, self.last = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3, stride=2), nn.Linear(32, 10)
        self.names = [name for name, _ in self.named_parameters()] if proximal else []
        for name in self.names:
            self.register_buffer(anchor(name), self.get_parameter(name).detach().clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.conv2(self.conv1(x).relu()).relu()
        distance = hidden.new_zeros(())
        for name in self.names:
            distance = distance + (self.get_parameter(name) - self.get_buffer(anchor(name))).square().sum()
        return self.last(hidden.flatten(1)), distance


def anchor(name: str) -> str:
    """The buffer that holds the server's value of a parameter."""
    return f"server_{name.replace('.', '_')}"


def objective(output: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean loss of the samples, and FedProx's term. ``weights`` sum to 1, or are 0 where a client has ended."""
    (logits, distance), (labels, weights) = output, target
    losses = F.cross_entropy(logits, labels, reduction="none")
    return (losses * weights).sum() + DISTANCE / 2 * distance * weights.sum().sign()


@dataclass(frozen=True)
class Client:
    """The samples of one client."""

    images: Tensor
    labels: Tensor

    def minibatches(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Those of a round, in an order of its own; the last one of an epoch may be smaller."""
        generator = torch.Generator().manual_seed(seed)
        for _ in range(EPOCHS):
            order = torch.randperm(len(self.labels), generator=generator)
            for chosen in order.split(BATCH):
                yield self.images[chosen], self.labels[chosen]


def load(clients: int, dtype: torch.dtype) -> tuple[list[Client], Client]:
    """Clients that see few of the digits each, 1 to 300 samples; and what the server is judged by."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=dtype).unsqueeze(1) / 16
    labels, generator = torch.tensor(data.target), torch.Generator().manual_seed(0)
    order = torch.randperm(len(labels), generator=generator)
    test, train = order[:400], order[400:]
    made = []
    for size in torch.randint(1, 301, (clients,), generator=generator).tolist():
        digits = torch.randperm(10, generator=generator)[:4]
        own = train[torch.isin(labels[train], digits)]
        rows = own[torch.randint(len(own), (size,), generator=generator)]
        made.append(Client(images[rows], labels[rows]))
    return made, Client(images[test], labels[test])


def together(clients: Sequence[Client], seeds: Sequence[int]) -> Iterator[tuple[Tensor, tuple[Tensor, Tensor]]]:
    """The minibatches of all clients at once: images ``[clients, BATCH, ...]``, labels, weights of the samples."""
    per_client = [list(client.minibatches(seed)) for client, seed in zip(clients, seeds, strict=True)]
    steps = max(map(len, per_client))
    example = clients[0].images
    images = example.new_zeros(steps, len(clients), BATCH, *example.shape[1:])
    labels = torch.zeros(steps, len(clients), BATCH, dtype=torch.int64)
    weights = example.new_zeros(steps, len(clients), BATCH)
    for row, minibatches in enumerate(per_client):
        for step, (x, y) in enumerate(minibatches):
            images[step, row, : len(x)], labels[step, row, : len(x)], weights[step, row, : len(x)] = x, y, 1 / len(x)
    for step in range(steps):
        yield images[step], (labels[step], weights[step])


class Array:
    """The clients of a round as the members of a population."""

    def __init__(self, count: int, proximal: bool, dtype: torch.dtype, compile: bool) -> None:
        self.pop = hf.Population(
            hf.build(lambda: Net(proximal).to(dtype), seeds=[0] * count),
            optimizer=lambda params: hf.optim.SGD(params, lr=RATE),
            loss=objective,
            on_nonfinite="ignore",
            compile=compile,
        )
        self.names = Net(proximal).names

    def round(self, clients: Sequence[Client], seeds: Sequence[int]) -> None:
        for images, (labels, weights) in together(clients, seeds):
            self.pop.step(hf.stacked(images), (hf.stacked(labels), hf.stacked(weights)))
        self.pop.average(weights=[len(client.labels) for client in clients], into="all")
        for name in self.names:
            self.pop.fused.get_buffer(anchor(name)).copy_(self.pop.fused.get_parameter(name).detach())

    @property
    def server(self) -> nn.Module:
        """The server's model, which all members are between rounds."""
        model = self.pop.average([0])
        assert model is not None
        return model


class Loop:
    """The same, one client after the other in plain torch."""

    def __init__(self, proximal: bool, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.server = Net(proximal).to(dtype)
        self.model = Net(proximal).to(dtype)

    def round(self, clients: Sequence[Client], seeds: Sequence[int]) -> None:
        samples = sum(len(client.labels) for client in clients)
        state = self.server.state_dict()
        total = {name: torch.zeros_like(value) for name, value in state.items()}
        for client, seed in zip(clients, seeds, strict=True):
            self.model.load_state_dict(state)
            opt = torch.optim.SGD(self.model.parameters(), lr=RATE)
            for images, labels in client.minibatches(seed):
                opt.zero_grad()
                logits, distance = self.model(images)
                (F.cross_entropy(logits, labels) + DISTANCE / 2 * distance).backward()
                opt.step()
            for name, value in self.model.state_dict().items():
                total[name] += value * (len(client.labels) / samples)
        for name in self.server.names:
            total[anchor(name)] = total[name].clone()
        self.server.load_state_dict(total)


def rounds(clients: Sequence[Client], count: int, part: float) -> Iterator[tuple[list[Client], list[int]]]:
    """The clients that take part in each round, and the seeds of their orders."""
    generator, chosen = torch.Generator().manual_seed(1), max(1, round(part * len(clients)))
    for number in range(count):
        rows = torch.randperm(len(clients), generator=generator)[:chosen].tolist()
        yield [clients[row] for row in rows], [1000 * number + row for row in rows]


def accuracy(model: nn.Module, test: Client) -> float:
    with torch.no_grad():
        logits, _ = model(test.images)
    return float((logits.argmax(1) == test.labels).double().mean())


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of two models, in units of the largest value of each tensor."""
    pairs = zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True)
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


def seconds(call: Callable[[], None]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def compare(clients: Sequence[Client], test: Client, options: argparse.Namespace) -> dict[str, float]:
    """Times of rounds of the array and the loop in turns, medians; the first round, which compiles, apart."""
    table, ratios = Table("", "array, s a round", "loop, s a round", "faster", "first round, s", "difference"), {}
    for name, proximal in (("FedAvg", False), ("FedProx", True)):
        picked = list(rounds(clients, options.rounds, options.part))
        array = Array(len(picked[0][0]), proximal, options.dtype, not options.eager)
        loop, ours, theirs = Loop(proximal, options.dtype), [], []
        for one, seeds in picked:
            ours.append(seconds(partial(array.round, one, seeds)))
            theirs.append(seconds(partial(loop.round, one, seeds)))
        a, b = statistics.median(ours[1:] or ours), statistics.median(theirs[1:] or theirs)
        ratios[name] = b / a
        apart = difference(array.server, loop.server)
        table.add_row(name, f"{a:.3f}", f"{b:.3f}", f"{b / a:.1f}", f"{ours[0]:.2f}", f"{apart:.1e}")
    Console().print(table)
    return ratios


def main(arguments: Sequence[str] | None = None) -> dict[str, float]:
    """The accuracy of the server's model by method; with ``--compare`` how many times faster than the loop it was."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--part", type=float, default=0.2, help="of the clients that take part in a round")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--compare", action="store_true", help="time the array beside a loop over clients")
    parser.add_argument("--double", dest="dtype", action="store_const", const=torch.float64, default=torch.float32)
    options = parser.parse_args(arguments)
    clients, test = load(options.clients, options.dtype)
    if options.compare:
        return compare(clients, test, options)
    found = {}
    for name, proximal in (("FedAvg", False), ("FedProx", True)):
        picked = list(rounds(clients, options.rounds, options.part))
        array = Array(len(picked[0][0]), proximal, options.dtype, not options.eager)
        for one, seeds in picked:
            array.round(one, seeds)
        found[name] = accuracy(array.server, test)
    Console().print(", ".join(f"{name}: accuracy {value:.3f}" for name, value in found.items()))
    return found


if __name__ == "__main__":
    main()
