"""The common step sees whatever changed since the last one: it gives the bits of a step that prepares from scratch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from hfusion import optim
from hfusion.core.membership import Membership, mark

ROWS = 3
SHAPES = [(4, 4), (5,), (2, 3)]

Change = Callable[[Any], object]


def parameter(index: int, tensor: Tensor) -> Tensor:
    return mark(Parameter(tensor), Membership(str(index), ROWS, True))


def made(name: str, **options: Any) -> Any:
    torch.manual_seed(0)
    params = [parameter(index, torch.randn(ROWS, *shape)) for index, shape in enumerate(SHAPES)]
    return getattr(optim, name)(params, lr=[1e-1, 1e-2, 1e-3], **options)


def first(opt: Any) -> Tensor:
    param: Tensor = opt.param_groups[0]["params"][0]
    return param


def state(opt: Any) -> dict[str, Tensor]:
    entry: dict[str, Tensor] = opt.state[first(opt)]
    return entry


def assign(key: str, value: Any) -> Change:
    return lambda opt: opt.param_groups[0].update({key: value})


def load(opt: Any) -> None:
    saved = opt.state_dict()
    saved["state"][0]["exp_avg_sq"] = saved["state"][0]["exp_avg_sq"] + 1
    opt.load_state_dict(saved)


ADAM: dict[str, Change] = {
    "nothing": lambda opt: None,
    "lr assigned": assign("lr", 0.3),
    "lr of a member": lambda opt: opt.param_groups[0]["lr"].__setitem__(1, 0.3),
    "lr written past torch": lambda opt: opt.param_groups[0]["lr"].numpy().fill(0.3),
    "another pair": assign("betas", (0.5, 0.6)),
    "a flag": assign("maximize", True),
    "a state with more": assign("amsgrad", True),
    "a parameter with other data": lambda opt: setattr(first(opt), "data", first(opt).data + 1),
    # The same address, another order in memory.
    "a parameter turned": lambda opt: setattr(first(opt), "data", first(opt).data.mT),
    "a state replaced": lambda opt: state(opt).update(exp_avg=torch.ones_like(state(opt)["exp_avg"])),
    "a count written": lambda opt: state(opt)["step"].add_(5),
    "a state loaded": load,
    "a state lost": lambda opt: opt.state.pop(first(opt)),
    "a group added": lambda opt: opt.add_param_group({"params": [parameter(9, torch.ones(ROWS, 2))], "lr": 0.5}),
    "a parameter without gradient": lambda opt: first(opt).requires_grad_(False),
}


def move_all(opt: Any) -> None:
    """Let everything lie elsewhere, as shards do that come and go."""
    opt.forget()
    for group in opt.param_groups:
        for param in group["params"]:
            param.data = param.data.clone()
            entry = opt.state.get(param, {})
            entry |= {key: value.clone() for key, value in entry.items() if key != "step"}


def run(opt: Any, change: Change, before: Change | None) -> list[Tensor]:
    """Three steps, the change, two more, and ``before`` each; every parameter and state."""
    generator = torch.Generator().manual_seed(5)
    for step in range(5):
        if step == 3:
            change(opt)
        for group in opt.param_groups:
            for param in group["params"]:
                grad = torch.randn(param.shape, generator=generator)
                param.grad = grad if param.requires_grad else None
        if before is not None:
            before(opt)
        opt.step()
    params = [param for group in opt.param_groups for param in group["params"]]
    return [*params, *(tensor for param in params for tensor in opt.state[param].values())]


@pytest.mark.parametrize("before", [None, move_all], ids=["ready", "moved"])
@pytest.mark.parametrize("change", ADAM.values(), ids=ADAM)
def test_a_change_is_seen(change: Change, before: Change | None) -> None:
    anew = run(made("Adam"), change, lambda opt: opt.forget())
    for actual, expected in zip(run(made("Adam"), change, before), anew, strict=True):
        assert torch.equal(actual, expected)
