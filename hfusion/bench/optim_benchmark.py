"""Optimizers alone, in ns per parameter (``optim``): a step over B members with B learning rates.

hfusion is compared with what users write otherwise, and with a bound: torch's fastest kernel over the whole stacks,
which takes only one learning rate.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import nn

from hfusion import optim
from hfusion.bench import harness
from hfusion.bench.cases import Contender
from hfusion.bench.harness import Benchmark, Row
from hfusion.core.membership import Membership, mark
from hfusion.optim import gpu, native_kernels

Step = Callable[[], object]
Shapes = tuple[tuple[int, ...], ...]

# Those of which torch has a fused kernel on every device, then the others.
FUSED = ("SGD", "Adam", "AdamW")
OPTIMIZERS = (*FUSED, "Adadelta", "Adagrad", "Adamax", "NAdam", "RAdam", "RMSprop")
"""All whose steps are elementwise, and that torch has."""
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}


@dataclass(frozen=True)
class OptimCase:
    """Parameters of an array: ``shapes(members)`` are those of one member."""

    name: str
    about: str
    shapes: Callable[[int], Shapes]


def _layers(total: int) -> Callable[[int], Shapes]:
    """Return two square layers with bias, so large that all members together have about ``total`` parameters."""

    def shapes(members: int) -> Shapes:
        width = max(1, round(math.sqrt(total / members / 2)))
        return ((width, width), (width,)) * 2

    return shapes


CASES = (
    OptimCase("0.1M", "two square layers, 0.1M parameters in all", _layers(100_000)),
    OptimCase("1M", "two square layers, 1M parameters in all", _layers(1_000_000)),
    OptimCase("10M", "two square layers, 10M parameters in all", _layers(10_000_000)),
    OptimCase("200 small", "100 x [64] and 100 x [16, 16] per member", lambda _: ((64,), (16, 16)) * 100),
)


@dataclass(frozen=True)
class OptimWorkload:
    """One optimizer over one array; ``rates`` are the members' learning rates."""

    optimizer: str
    shapes: Shapes
    members: int
    device: torch.device

    @property
    def rates(self) -> list[float]:
        return [1e-3 * (1 + member / self.members) for member in range(self.members)]

    def tensors(self, *leading: int) -> list[nn.Parameter]:
        """Return fresh parameters ``[*leading, *shape]`` with gradients."""
        params = [nn.Parameter(torch.randn(*leading, *shape, device=self.device)) for shape in self.shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        return params

    def torch_optimizer(self, params: list[nn.Parameter], lr: float, fast: bool) -> Any:
        """Return torch's optimizer, if ``fast`` with its fastest kernel."""
        options = {"fused" if self.optimizer in FUSED else "foreach": True} if fast else {}
        return getattr(torch.optim, self.optimizer)(params, lr=lr, **OPTIONS.get(self.optimizer, {}), **options)


def _serial(workload: OptimWorkload, fast: bool = False) -> Step:
    alone = [workload.torch_optimizer(workload.tensors(), lr, fast) for lr in workload.rates]

    def step() -> None:
        for optimizer in alone:
            optimizer.step()

    return step


def _bound(workload: OptimWorkload) -> Step:
    step: Step = workload.torch_optimizer(workload.tensors(workload.members), 1e-3, fast=True).step
    return step


def _hfusion(workload: OptimWorkload, lr: float | None = None) -> Step:
    params = [
        mark(param, Membership(str(index), workload.members, True))
        for index, param in enumerate(workload.tensors(workload.members))
    ]
    step: Step = getattr(optim, workload.optimizer)(
        params, lr=lr or workload.rates, **OPTIONS.get(workload.optimizer, {})
    ).step
    return step


OURS, BOUND = "hfusion", "stack, one lr"
CONTENDERS = (
    Contender("serial", "B default torch.optim optimizers, one after the other", _serial),
    Contender(
        "serial fused",
        "B of them with torch's fastest kernel (fused, or foreach where there is none)",
        partial(_serial, fast=True),
    ),
    Contender(OURS, "hf.optim with B learning rates", _hfusion),
    Contender("hfusion, one lr", "hf.optim with one learning rate for all", partial(_hfusion, lr=1e-3)),
    Contender(
        BOUND, "torch's fastest kernel over the whole stacks: the bound, it cannot have B learning rates", _bound
    ),
)


def form(device: torch.device) -> str:
    """Return the implementation that hfusion runs on ``device``, with the reason if it is not the native kernel."""
    library = (native_kernels if device.type == "cpu" else gpu).library()
    return f"formula: {library}" if isinstance(library, str) else "native"


def _run(options: argparse.Namespace) -> Iterator[Row]:
    """Yield a row for each contender: median ns per step and parameter, counted over all parameters of all members."""
    for name in OPTIMIZERS:
        for case in CASES[: 1 if options.quick else None]:
            for members in options.members or ((4,) if options.quick else (4, 16, 64)):
                harness.say(f"{name}, {case.name} x {members}")
                workload = OptimWorkload(name, case.shapes(members), members, options.device)
                params = members * sum(math.prod(shape) for shape in workload.shapes)
                times = harness.interleave(
                    {contender.name: contender.start(workload) for contender in CONTENDERS},
                    options.repeats or (3 if options.quick else 7),
                    0.01 if options.quick else 0.04,
                    options.device,
                )
                for contender, seconds in times.items():
                    yield {
                        "optimizer": name,
                        "case": case.name,
                        "params": params,
                        "members": members,
                        "contender": contender,
                        "ns_per_param": 1e9 * statistics.median(seconds) / params,
                        "over_bound": statistics.median(seconds) / statistics.median(times[BOUND]),
                        "note": f"kernel: {form(options.device)}" if contender == OURS else "",
                    }


def _table(rows: Sequence[Row]) -> Table:
    values: dict[str, Callable[[Row], harness.Cell]] = {
        "ns per parameter": lambda row: f"{row['ns_per_param']:.2f}",
        f"over {BOUND}": lambda row: f"{row['over_bound']:.2f}x",
    }
    labels = ("optimizer", "case", "params", "members", "contender")
    return harness.row_table("one optimizer step", rows, labels, values)


BENCHMARK = Benchmark(__doc__, _run, _table, {"cases": CASES, "ways": CONTENDERS}, members=True)
