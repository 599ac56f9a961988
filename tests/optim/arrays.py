"""Arrays of parameters next to the members they are the stack of, and the oracle that compares them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from hfusion import optim
from hfusion.core.membership import Membership, mark


# Optimizers for one model as their papers write them, where torch has none.
class Lion(Optimizer):
    """Chen and others, 2023, "Symbolic Discovery of Optimization Algorithms", program 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad * (-1 if group["maximize"] else 1), self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * mean + (1 - beta1) * grad).sign()
                param.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                mean.copy_(beta2 * mean + (1 - beta2) * grad)
                state["step"] = state.get("step", torch.tensor(0.0)) + 1


# The plain forms of what torch does not have, by name.
PLAIN = {"Lion": Lion}

# Arrays of parameters next to the members they are the stack of, and the oracle that compares them.
SHAPES = ((4, 3), (), (5,), (2, 1, 3), (0,))


@dataclass(frozen=True)
class Per:
    """A hyper-parameter of a test case with a separate value for each member."""

    first: float
    ratio: float

    def of(self, member: int) -> float:
        return self.first * self.ratio**member


def for_member(options: Mapping[str, Any], member: int) -> dict[str, Any]:
    return {name: _resolve(value, lambda per: per.of(member)) for name, value in options.items()}


def for_array(options: Mapping[str, Any], members: int) -> dict[str, Any]:
    return {
        name: _resolve(value, lambda per: [per.of(member) for member in range(members)])
        for name, value in options.items()
    }


def _resolve(value: Any, take: Any) -> Any:
    if isinstance(value, Per):
        return take(value)
    if isinstance(value, tuple):
        return tuple(_resolve(item, take) for item in value)
    return value


class Array:
    """Marked stacks and the members' own parameters, with what ``optim.fuse`` asks of a fused module."""

    def __init__(
        self,
        members: int,
        shapes: Sequence[tuple[int, ...]] = SHAPES,
        dtype: torch.dtype = torch.float64,
        device: str = "cpu",
    ) -> None:
        self.members = [
            [Parameter(torch.randn(shape, dtype=dtype, device=device)) for shape in shapes] for _ in range(members)
        ]
        self.params = [
            mark(Parameter(torch.stack([p.detach() for p in rows])), Membership(f"p{index}", members, True))
            for index, rows in enumerate(zip(*self.members, strict=True))
        ]

    def __len__(self) -> int:
        return len(self.members)

    def named_parameters(self) -> Iterable[tuple[str, Parameter]]:
        return [(f"p{index}", param) for index, param in enumerate(self.params)]

    def origin(self, parameter: Tensor) -> tuple[int, str] | None:
        for member, params in enumerate(self.members):
            for index, param in enumerate(params):
                if param is parameter:
                    return member, f"p{index}"
        return None

    def draw_grads(self, skip: Sequence[int] = (), steady: bool = False) -> None:
        """New random gradients, the members' the rows of the array's; None for the parameters in ``skip``.

        ``steady``: in the memory of the last ones, so that steps may be recorded.
        """
        for index, param in enumerate(self.params):
            grad = None if index in skip else torch.randn_like(param)
            if steady and grad is not None and param.grad is not None:
                grad = param.grad.copy_(grad)
            param.grad = grad
            for member, params in enumerate(self.members):
                params[index].grad = None if grad is None else grad[member].clone()

    def clip_alone(self, limits: Sequence[float], norm_type: float) -> Tensor:
        """Clip the gradients of each member as torch does, and return the norms."""
        norms = [
            torch.nn.utils.clip_grad_norm_([p for p in params if p.numel()], limit, norm_type)
            for params, limit in zip(self.members, limits, strict=True)
        ]
        return torch.stack(norms)

    def assert_equal(self, rtol: float = 1e-9, atol: float | None = None) -> None:
        for index, param in enumerate(self.params):
            alone = torch.stack([params[index].detach() for params in self.members])
            torch.testing.assert_close(param.detach(), alone, rtol=rtol, atol=rtol * 1e-3 if atol is None else atol)


def start(name: str, options: Mapping[str, Any], array: Array) -> tuple[Any, list[Any]]:
    """The fused optimizer over the array, and the members' own torch.optim ones."""
    fused = getattr(optim, name)(array.params, **for_array(options, len(array)))
    return fused, start_alone(name, options, array)


def start_alone(name: str, options: Mapping[str, Any], array: Array) -> list[Any]:
    return [alone_class(name)(params, **for_member(options, member)) for member, params in enumerate(array.members)]


def alone_class(name: str) -> Any:
    """The optimizer of one member: torch's, or the plain form of what torch does not have."""
    return getattr(torch.optim, name, None) or PLAIN[name]


def run(
    array: Array, fused: Any, alone: Sequence[Any], steps: int, skip: Sequence[int] = (), steady: bool = False
) -> None:
    """``steps`` steps of everybody on the same gradients."""
    for _ in range(steps):
        array.draw_grads(skip, steady)
        fused.step()
        for optimizer in alone:
            optimizer.step()


def run_shared(name: str, options: Mapping[str, Any], array: Array) -> tuple[Any, Parameter, Parameter]:
    """Some steps with a parameter beside the array that is one for all: the optimizer, it, and what it must equal."""
    equal, like = for_member(options, 0), array.params[0]
    shared = mark(Parameter(torch.randn(4, 2).to(like)), Membership("shared", len(array), False))
    single = Parameter(shared.detach().clone())
    fused = getattr(optim, name)([*array.params, shared], **equal)
    alone = [alone_class(name)(params, **equal) for params in [*array.members, [single]]]
    for _ in range(4):
        shared.grad = torch.randn_like(shared)
        single.grad = shared.grad.clone()
        run(array, fused, alone, 1)
    return fused, shared, single


def beside_a_bad_member(
    name: str, options: Mapping[str, Any], value: float, device: str = "cpu", shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    """Parameters and state of members 0, 2 and 3 of four, when the gradients of member 1 become ``value``."""
    torch.manual_seed(3)
    array = Array(4, shapes, torch.float32, device)
    fused, _ = start(name, options, array)
    for step in range(4):
        array.draw_grads()
        for param in array.params:
            if step >= 1 and param.grad is not None:
                param.grad[1] = value
        fused.step()
    tensors = [*array.params, *(fused.state[p][key] for p in array.params for key in fused.state[p])]
    return [tensor.detach()[[0, 2, 3]] for tensor in tensors]


LR = Per(0.1, 0.5)
BETAS = (Per(0.9, 0.9), Per(0.99, 0.9))
DECAY = Per(0.1, 0.1)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": LR}),
    "sgd-equal": ("SGD", {"lr": 0.1, "momentum": 0.9}),
    "sgd-momentum": ("SGD", {"lr": LR, "momentum": Per(0.9, 0.8), "dampening": Per(0.3, 0.5)}),
    "sgd-decay": ("SGD", {"lr": LR, "momentum": 0.9, "weight_decay": DECAY, "maximize": True}),
    "sgd-nesterov": ("SGD", {"lr": LR, "momentum": Per(0.9, 0.9), "nesterov": True}),
    "adam": ("Adam", {"lr": LR}),
    "adam-equal": ("Adam", {"lr": 0.01}),
    "adam-all": ("Adam", {"lr": LR, "betas": BETAS, "eps": Per(1e-8, 10.0)}),
    "adam-far": ("Adam", {"lr": LR, "betas": (Per(0.9, 0.5), 0.9)}),
    "adam-decay": ("Adam", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
    "adam-amsgrad": ("Adam", {"lr": LR, "amsgrad": True}),
    "adamw": ("AdamW", {"lr": LR}),
    "adamw-all": ("AdamW", {"lr": LR, "weight_decay": Per(0.5, 0.5), "amsgrad": True, "maximize": True}),
    "adadelta": ("Adadelta", {"lr": Per(1.0, 0.5)}),
    "adadelta-all": (
        "Adadelta",
        {"rho": Per(0.9, 0.9), "eps": Per(1e-6, 10.0), "weight_decay": DECAY, "maximize": True},
    ),
    "rmsprop": ("RMSprop", {"lr": LR, "alpha": Per(0.99, 0.9), "eps": Per(1e-8, 10.0)}),
    "rmsprop-all": (
        "RMSprop",
        {"lr": LR, "momentum": Per(0.9, 0.5), "weight_decay": DECAY, "centered": True, "maximize": True},
    ),
    "adagrad": ("Adagrad", {"lr": LR}),
    "adagrad-all": (
        "Adagrad",
        {
            "lr": LR,
            "lr_decay": Per(0.1, 0.5),
            "initial_accumulator_value": Per(0.1, 0.5),
            "eps": Per(1e-10, 10.0),
            "weight_decay": DECAY,
            "maximize": True,
        },
    ),
    "nadam": ("NAdam", {"lr": LR, "betas": BETAS, "eps": Per(1e-8, 10.0), "momentum_decay": Per(4e-3, 2.0)}),
    "nadam-decay": ("NAdam", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
    "nadam-decoupled": ("NAdam", {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True}),
    "radam": ("RAdam", {"lr": LR, "betas": (Per(0.9, 0.9), Per(0.99, 0.7)), "eps": Per(1e-8, 10.0)}),
    "radam-decay": ("RAdam", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
    "radam-decoupled": ("RAdam", {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True}),
    "adamax": ("Adamax", {"lr": LR, "betas": BETAS, "eps": Per(1e-8, 10.0)}),
    "adamax-decay": ("Adamax", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
    "lion": ("Lion", {"lr": LR, "betas": BETAS}),
    "lion-decay": ("Lion", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
}
"""Every option of every elementwise optimizer."""

ONE_EACH = {case: CASES[case] for case in ("sgd-momentum", "adam-amsgrad", "adamw", "adadelta", "rmsprop-all")} | {
    case: CASES[case] for case in ("adagrad-all", "nadam", "radam", "adamax", "lion")
}
"""A case of each of them."""
