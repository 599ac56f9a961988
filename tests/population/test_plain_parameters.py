"""Parameters of a plain member that the user replaces: trained as those of a member of an array, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

import hfusion as hf


class Normed(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.act, self.last = nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.act(self.first(x)))
        return y


def sgd(parameters: Any) -> hf.optim.SGD:
    return hf.optim.SGD(parameters, lr=0.1, momentum=0.9)


def population() -> tuple[hf.Population, list[nn.Module]]:
    torch.manual_seed(0)
    models: list[nn.Module] = [Normed(width).double() for width in (5, 6)]
    return hf.Population(models, optimizer=sgd, loss=F.cross_entropy, tags=["5", "6"]), models


def batch(seed: int) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(6, 4, generator=draws, dtype=torch.float64), torch.randint(3, (6,), generator=draws)


def parameter(model: nn.Module) -> None:
    layer = model.get_submodule("first")
    layer.weight = nn.Parameter(torch.full_like(layer.get_parameter("weight"), 0.3))


def submodule(model: nn.Module) -> None:
    torch.manual_seed(5)
    model.last = nn.Linear(model.get_parameter("last.weight").shape[1], 3).double()


def assigned(model: nn.Module) -> None:
    model.load_state_dict({name: value * 0.7 for name, value in model.state_dict().items()}, assign=True)


def activation(model: nn.Module) -> None:
    model.act = nn.Tanh()


def frozen(model: nn.Module) -> None:
    parameter(model)
    model.get_parameter("first.weight").requires_grad_(False)


def pruned(model: nn.Module) -> None:
    prune.l1_unstructured(model.get_submodule("first"), "weight", amount=0.3)


CHANGES: dict[str, Callable[[nn.Module], None]] = {
    change.__name__: change for change in (parameter, submodule, assigned, activation, frozen, pruned)
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", [0, 2])
def test_a_replaced_parameter_is_trained(change: str, at: int) -> None:
    pop, models = population()
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    for step in range(4):
        if step == at:
            [shown] = [pop.models[0]]
            assert shown is not None
            for model in (models[0], shown):
                CHANGES[change](model)
            # As if the optimizer had followed.
            held, current = optimizers[0].param_groups[0]["params"], list(models[0].parameters())
            if change != "pruned":
                optimizers[0].state.update({b: optimizers[0].state[a] for a, b in zip(held, current, strict=True)})
                held[:] = current
        x, y = batch(step)
        losses = pop.step(x, y)
        for row, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(losses[row], loss.detach(), rtol=1e-9, atol=1e-12)
    for model, member in zip(models, pop.models, strict=True):
        assert member is not None
        torch.testing.assert_close(dict(member.state_dict()), dict(model.state_dict()), rtol=1e-9, atol=1e-12)


def without_bias(model: nn.Module) -> None:
    model.get_submodule("last").bias = None


def tied(model: nn.Module) -> None:
    model.get_submodule("last").bias = model.get_submodule("first").bias


def wider(model: nn.Module) -> None:
    model.get_submodule("first").weight = nn.Parameter(torch.zeros(9, 4, dtype=torch.float64))


def added(model: nn.Module) -> None:
    model.register_parameter("scale", nn.Parameter(torch.ones((), dtype=torch.float64)))


def normed(model: nn.Module) -> None:
    parametrizations.weight_norm(model.get_submodule("first"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_bias, "it has no parameter last.bias any more"),
        (tied, "it has no parameter last.bias any more"),
        (wider, r"shape of the parameter first.weight is torch.Size\(\[9, 4\]\), and was torch.Size\(\[5, 4\]\)"),
        (added, "the parameter scale is new, and the optimizer does not have it"),
        (normed, "the parameter first.parametrizations.weight.original0 is new"),
    ],
)
def test_other_parameters_are_refused(change: Callable[[nn.Module], None], message: str, tmp_path: Path) -> None:
    pop, _ = population()
    pop.step(*batch(0))
    before = copy.deepcopy([None if model is None else model.state_dict() for model in pop.models])
    [model] = [pop.models[0]]
    assert model is not None
    change(model)
    for call in (lambda: pop.step(*batch(1)), lambda: pop.save(tmp_path), lambda: pop.copy(0, 1)):
        with pytest.raises(hf.FusionError, match=message):
            call()
    assert pop.models[1] is not None
    torch.testing.assert_close(pop.models[1].state_dict(), before[1], rtol=0, atol=0)
    # The remedy of the message.
    stopped = pop.stop(0)
    assert [name for name, _ in stopped.named_parameters()] == [name for name, _ in model.named_parameters()]
