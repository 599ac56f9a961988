"""The sub-benchmark ``optim``: the step of an optimizer alone, over B members with B learning rates.

hfusion runs its own kernel with one pass over the stacks, or the optimizer's formula over the stacks where the kernel
cannot run (``hfusion.optim.native_kernels``, ``gpu``). It is compared with the user's alternatives, and with the
bound: torch's fused kernel over the whole stack, which takes only one learning rate.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from hfusion import optim
from hfusion.bench import timing
from hfusion.bench.progress import Meter
from hfusion.core.membership import Membership, mark
from hfusion.optim import gpu, native_kernels

Step = Callable[[], object]
Shapes = tuple[tuple[int, ...], ...]

BOUND = "stack, one lr"
OURS = "hfusion"
OPTIMIZERS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}, "Adam": {}, "AdamW": {}, "Adadelta": {}}


@dataclass(frozen=True)
class OptimCase:
    """Parameters of an array: ``shapes(members)`` are those of one member."""

    name: str
    about: str
    shapes: Callable[[int], Shapes]


@dataclass(frozen=True)
class OptimSettings:
    """Settings of the comparison. ``slot`` is the least time in seconds that a contender runs in a round."""

    cases: tuple[OptimCase, ...]
    members: tuple[int, ...]
    rounds: int
    slot: float
    device: torch.device


@dataclass(frozen=True)
class OptimRow:
    """One contender: median ns per step and parameter, counted over all ``params`` of all members."""

    optimizer: str
    case: str
    params: int
    members: int
    contender: str
    ns_per_param: float


def _layers(total: int) -> Callable[[int], Shapes]:
    """Two square layers with bias, so large that all members together have about ``total`` parameters."""

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
    def params(self) -> int:
        return self.members * sum(math.prod(shape) for shape in self.shapes)

    @property
    def rates(self) -> list[float]:
        return [1e-3 * (1 + member / self.members) for member in range(self.members)]

    def tensors(self, *leading: int) -> list[torch.nn.Parameter]:
        """Fresh parameters ``[*leading, *shape]`` with gradients."""
        params = [torch.nn.Parameter(torch.randn(*leading, *shape, device=self.device)) for shape in self.shapes]
        for param in params:
            param.grad = torch.randn_like(param)
        return params

    def torch_optimizer(self, params: list[torch.nn.Parameter], lr: float, **options: Any) -> Any:
        return getattr(torch.optim, self.optimizer)(params, lr=lr, **OPTIMIZERS[self.optimizer], **options)

    def fastest(self) -> dict[str, bool]:
        """Torch's options for its fastest kernel; there is no fused Adadelta."""
        return {"foreach": True} if self.optimizer == "Adadelta" else {"fused": True}


def _serial(workload: OptimWorkload, **options: bool) -> Step:
    alone = [workload.torch_optimizer(workload.tensors(), lr, **options) for lr in workload.rates]

    def step() -> None:
        for optimizer in alone:
            optimizer.step()

    return step


def _bound(workload: OptimWorkload) -> Step:
    params = workload.tensors(workload.members)
    step: Step = workload.torch_optimizer(params, 1e-3, **workload.fastest()).step
    return step


def _hfusion(workload: OptimWorkload, lr: float | list[float]) -> Step:
    params = [
        mark(param, Membership(str(index), workload.members, True))
        for index, param in enumerate(workload.tensors(workload.members))
    ]
    optimizer = getattr(optim, workload.optimizer)(params, lr=lr, **OPTIMIZERS[workload.optimizer])
    step: Step = optimizer.step
    return step


def _eager(workload: OptimWorkload) -> Step:
    """The obvious way: whole stacks, with the learning rates as a tensor that broadcasts."""
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


CONTENDERS: dict[str, Callable[[OptimWorkload], Step]] = {
    "serial": lambda workload: _serial(workload),
    "serial fused": lambda workload: _serial(workload, **workload.fastest()),
    "eager stack": _eager,
    OURS: lambda workload: _hfusion(workload, workload.rates),
    "hfusion, one lr": lambda workload: _hfusion(workload, 1e-3),
    BOUND: _bound,
}

ABOUT = {
    "serial": "B default torch.optim optimizers, one after the other",
    "serial fused": "B of them with torch's fastest kernel (fused; foreach for Adadelta)",
    "eager stack": "broadcasting arithmetic on the stacks with lr as a tensor",
    OURS: "hf.optim with B learning rates",
    "hfusion, one lr": "hf.optim with one learning rate for all",
    BOUND: "torch's fastest kernel over the whole stacks: the bound, it cannot have B learning rates",
}


def form(device: torch.device) -> str:
    """Return the implementation that hfusion runs on ``device``, with the reason if it is not the native kernel."""
    library = (native_kernels if device.type == "cpu" else gpu).library()
    return f"formula: {library}" if isinstance(library, str) else "native"


def pieces(settings: OptimSettings) -> int:
    """Return the number of pieces of work that ``run`` reports: one per contender and round."""
    return len(OPTIMIZERS) * len(settings.cases) * len(settings.members) * len(CONTENDERS) * settings.rounds


def run(settings: OptimSettings, meter: Meter) -> Iterator[list[OptimRow]]:
    """The rows of one optimizer on one case and number of members after the other."""
    for name in OPTIMIZERS:
        for case in settings.cases:
            for members in settings.members:
                meter.say(f"{name}, {case.name} x {members}")
                workload = OptimWorkload(name, case.shapes(members), members, settings.device)
                yield _compare(case.name, workload, settings, meter)


def _compare(case: str, workload: OptimWorkload, settings: OptimSettings, meter: Meter) -> list[OptimRow]:
    steps = {name: start(workload) for name, start in CONTENDERS.items()}
    times = timing.interleave(
        steps,
        rounds=settings.rounds,
        slot=settings.slot,
        device=settings.device,
        tick=lambda: meter.advance(1),
    )
    return [
        OptimRow(
            workload.optimizer,
            case,
            workload.params,
            workload.members,
            name,
            ns_per_param=1e9 * statistics.median(seconds) / workload.params,
        )
        for name, seconds in times.items()
    ]


def table(rows: Sequence[OptimRow]) -> Table:
    """ns per parameter, a row per optimizer, case and members, and how far hfusion is from the bound."""
    shown = Table(title="one optimizer step, ns per parameter")
    for heading in ("optimizer", "case"):
        shown.add_column(heading, no_wrap=True)
    for heading in ("params", "members", *CONTENDERS, f"{OURS} / {BOUND}"):
        shown.add_column(heading, justify="right")
    times: dict[tuple[str, str, int, int], dict[str, float]] = {}
    for row in rows:
        key = (row.optimizer, row.case, row.params, row.members)
        times.setdefault(key, {})[row.contender] = row.ns_per_param
    for (name, case, params, members), values in times.items():
        cells = [f"{values[contender]:.2f}" for contender in CONTENDERS]
        ratio = f"{values[OURS] / values[BOUND]:.2f}x"
        shown.add_row(name, case, f"{params:,}", str(members), *cells, ratio)
    return shown
