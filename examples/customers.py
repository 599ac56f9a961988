"""A model for every customer: two thousand tiny members with data of their own, streamed, as one array.

    python examples/customers.py --customers 2000 --days 30

Every customer buys by habits of their own. One model for all learns the mean habit; an array learns each. The data of a
day come, are used once and are gone. A customer who leaves takes a row with them, a new one begins in it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor, nn

import hfusion as hf

FEATURES, VISITS, STEPS = 6, 16, 10


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 1))


def habits(customers: int, generator: torch.Generator) -> Tensor:
    """What each customer goes by: a common part and an own one, ``[customers, features]``."""
    return torch.randn(1, FEATURES, generator=generator) + torch.randn(customers, FEATURES, generator=generator)


def day(own: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """A day's visits and purchases of every customer: ``[customers, visits, features]`` and ``[..., 1]``."""
    x = torch.randn(len(own), VISITS, FEATURES, generator=generator)
    noise = 0.1 * torch.randn(len(own), VISITS, generator=generator)
    return x, (torch.einsum("cvf,cf->cv", x, own).tanh() + noise).unsqueeze(-1)


def stream(own: Tensor, days: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(days):
        yield day(own, generator)


def train_for_all(own: Tensor, days: int) -> nn.Module:
    """One model that sees the visits of all customers."""
    torch.manual_seed(0)
    model = make_model()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for x, y in stream(own, days, seed=1):
        for _ in range(STEPS):
            opt.zero_grad()
            F.mse_loss(model(x.flatten(0, 1)), y.flatten(0, 1)).backward()
            opt.step()
    return model


def train_each(own: Tensor, days: int, compile: bool) -> hf.Population:
    """A model for every customer. Half way through the first one leaves, and another comes."""
    pop = hf.Population(
        hf.build(make_model, seeds=range(len(own))),
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-2),
        loss=F.mse_loss,
        tags=[f"customer {number}" for number in range(len(own))],
        on_nonfinite="ignore",
        compile=compile,
    )
    for number, (x, y) in enumerate(stream(own, days, seed=1)):
        if number == days // 2:
            pop.stop(0)
            pop.start(0, make_model(), tag="a new customer")
        for _ in range(STEPS):
            pop.step(hf.stacked(x), hf.stacked(y))
    return pop


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """The mean errors on a new day, of one model for all and of a model for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--customers", type=int, default=2000)
    parser.add_argument("--days", type=int, default=30)
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    options = parser.parse_args(arguments)
    own = habits(options.customers, torch.Generator().manual_seed(0))
    x, y = day(own, torch.Generator().manual_seed(2))
    model = train_for_all(own, options.days)
    with torch.no_grad():
        common = F.mse_loss(model(x), y).item()
    begin = time.perf_counter()
    pop = train_each(own, options.days, not options.eager)
    seconds = time.perf_counter() - begin
    each = pop.evaluate(F.mse_loss, [(hf.stacked(x), hf.stacked(y))])
    Console().print(
        f"{options.customers} customers, {pop.steps} steps in {seconds:.1f} s: one model for all has an error of "
        f"{common:.3f}, a model for each {each.mean():.3f}; the new customer, after half the time, {each[0]:.3f}"
    )
    return common, float(each.mean())


if __name__ == "__main__":
    main()
