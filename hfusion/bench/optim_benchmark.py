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
from torch import Tensor, nn

from hfusion import optim
from hfusion.bench import harness
from hfusion.bench.cases import Contender
from hfusion.bench.harness import Benchmark, Row
from hfusion.core.membership import Membership, mark
from hfusion.optim import gpu, native_kernels

Step = Callable[[], object]
Shapes = tuple[tuple[int, ...], ...]

OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adadelta": {}}


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
        """Return torch's optimizer, if ``fast`` with its fastest kernel; there is no fused Adadelta."""
        options = {"foreach" if self.optimizer == "Adadelta" else "fused": True} if fast else {}
        return getattr(torch.optim, self.optimizer)(params, lr=lr, **OPTIMIZERS[self.optimizer], **options)


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
        params, lr=lr or workload.rates, **OPTIMIZERS[workload.optimizer]
    ).step
    return step


def _eager(workload: OptimWorkload) -> Step:
    """Start the obvious way: whole stacks, with the learning rates as a tensor that broadcasts."""
    params = [param.detach() for param in workload.tensors(workload.members)]
    grads = [torch.randn_like(param) for param in params]
    state = [[torch.zeros_like(param) for param in params] for _ in range(2)]
    rates = torch.tensor(workload.rates, device=workload.device)
    update = EAGER[workload.optimizer]
    count = 0

    def step() -> None:
        nonlocal count
        count += 1
        for param, grad, first, second in zip(params, grads, *state, strict=True):
            lr = rates.view(-1, *[1] * (param.dim() - 1))
            update(param, grad, first, second, lr, count)

    return step


def _eager_sgd(param: Tensor, grad: Tensor, momentum: Tensor, _: Tensor, lr: Tensor, count: int) -> None:
    momentum.mul_(0.9).add_(grad)
    param.addcmul_(momentum, lr, value=-1)


def _eager_adam(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, lr: Tensor, count: int) -> None:
    mean.lerp_(grad, 0.1)
    square.mul_(0.999).addcmul_(grad, grad, value=0.001)
    scale = square.sqrt().div_((1 - 0.999**count) ** 0.5).add_(1e-8)
    param.sub_(mean.div(scale).mul_(lr / (1 - 0.9**count)))


def _eager_adamw(param: Tensor, grad: Tensor, mean: Tensor, square: Tensor, lr: Tensor, count: int) -> None:
    param.mul_(1 - lr * 1e-2)
    _eager_adam(param, grad, mean, square, lr, count)


def _eager_adadelta(param: Tensor, grad: Tensor, square: Tensor, moved: Tensor, lr: Tensor, count: int) -> None:
    square.mul_(0.9).addcmul_(grad, grad, value=0.1)
    delta = moved.add(1e-6).sqrt_().div_(square.add(1e-6).sqrt_()).mul_(grad)
    moved.mul_(0.9).addcmul_(delta, delta, value=0.1)
    param.sub_(delta.mul_(lr))


EAGER: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int], None]] = {
    "SGD": _eager_sgd,
    "Adam": _eager_adam,
    "AdamW": _eager_adamw,
    "Adadelta": _eager_adadelta,
}


OURS, BOUND = "hfusion", "stack, one lr"
CONTENDERS = (
    Contender("serial", "B default torch.optim optimizers, one after the other", _serial),
    Contender(
        "serial fused",
        "B of them with torch's fastest kernel (fused; foreach for Adadelta)",
        partial(_serial, fast=True),
    ),
    Contender("eager stack", "broadcasting arithmetic on the stacks with lr as a tensor", _eager),
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
