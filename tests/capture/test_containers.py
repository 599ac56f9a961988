"""Members that give, and hand to one another, containers of their author's own."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.alone import normal


@dataclass
class Plain:
    sample: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    sample: Tensor
    count: int = 3


@dataclass(slots=True)
class Slotted:
    sample: Tensor


@dataclass
class Mapped(OrderedDict[str, Any]):
    """As diffusers and transformers have them: an ordered dict of the fields that are not None, known to torch."""

    sample: Tensor | None = None
    extra: Any = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


pytree.register_pytree_node(
    Mapped,
    lambda mapped: (list(mapped.values()), list(mapped.keys())),
    lambda values, keys: Mapped(**dict(zip(keys, values, strict=True))),
)


class Named(NamedTuple):
    sample: Tensor
    inner: Any


@dataclass
class Counting:
    """Has more than its fields say."""

    sample: Tensor
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.norm = self.sample.norm()


class Around:
    def __init__(self, sample: Tensor) -> None:
        self.sample = sample


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Plain,
    "frozen": Frozen,
    "slots": Slotted,
    "mapping": lambda y: Mapped(sample=y, extra=(y * 2, None)),
    "dataclass in a dataclass": lambda y: Plain(y, {"more": Frozen(y * 2)}),
    "dataclass in a named tuple": lambda y: Named(y, Plain(y * 2, "text")),
}


class Net(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any], leaf: nn.Module | None = None) -> None:
        super().__init__()
        self.output, self.fc, self.leaf = output, nn.Linear(4, 3).double(), leaf

    def forward(self, x: Tensor) -> Any:
        y = self.output(self.fc(x))
        return y if self.leaf is None else self.leaf(y)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


def alone(models: list[nn.Module], x: Tensor, target: Tensor, steps: int) -> Tensor:
    losses = []
    for model in models:
        opt = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(steps):
            opt.zero_grad()
            value = loss(model(x), target)
            value.backward()
            opt.step()
        losses.append(value.detach())
    return torch.stack(losses)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_losses_read_their_attributes(name: str, compile: bool) -> None:
    models: list[nn.Module] = [Net(OUTPUTS[name]) for _ in range(2)]
    x, target = normal(5, 4), normal(5, 3)
    fused = hf.fuse(models)
    copies = copy.deepcopy(models)
    assert type(fused(x)) is type(models[0](x))
    step = hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=compile)
    for _ in range(3):
        losses = step(x, target)
    torch.testing.assert_close(losses, alone(copies, x, target, 3), rtol=1e-9, atol=0)
    assert compile == all(row.how != "eager" for row in step.report().rows)


@pytest.mark.parametrize("output", [Counting, Around])
def test_containers_with_more_than_their_fields_are_refused(output: Callable[[Tensor], Any]) -> None:
    with pytest.raises(hf.FusionError, match=f"returns (a )?{output.__name__}; let it return tensors only"):  # type: ignore[attr-defined]
        hf.fuse([Net(output), Net(output)])(normal(5, 4))
