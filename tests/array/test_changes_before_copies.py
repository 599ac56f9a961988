"""A member that was changed is copied as it is now, also before the next call of its array."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.scale = nn.Linear(3, 2), nn.BatchNorm1d(2), 1.0

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x)) * self.scale
        return y


def bias(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("fc.bias").fill_(2.0)


def data(model: nn.Module) -> None:
    model.get_parameter("fc.weight").data = torch.ones(2, 3, dtype=torch.float64)


def parameter(model: nn.Module) -> None:
    model.get_submodule("fc").weight = nn.Parameter(torch.full((2, 3), 4.0, dtype=torch.float64))


def note(model: nn.Module) -> None:
    model.note = "kept"


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "attribute": lambda model: setattr(model, "scale", 3.0),
    "option": lambda model: setattr(model.get_submodule("norm"), "momentum", 0.7),
    "mode": lambda model: model.get_submodule("norm").eval(),
    "frozen": lambda model: model.get_parameter("fc.weight").requires_grad_(False),
    "hook": lambda model: model.register_forward_hook(doubled),
    "bias": bias,
    "data": data,
    "parameter": parameter,
    "note": note,
}


def doubled(module: nn.Module, args: object, output: Tensor) -> Tensor:
    return output * 2


def saved(fused: hf.FusedModule) -> nn.Module:
    """Member 1 of another array, with the tensors that a save of the array holds."""
    folder = Path("save")
    hf.save(folder, fused)
    other = hf.fuse([Scaled().double() for _ in range(4)])
    hf.load(folder, other)
    return other[1]


COPIES: dict[str, Callable[[hf.FusedModule], nn.Module]] = {
    "unfuse": lambda fused: fused.unfuse()[1],
    "unfuse of a slice": lambda fused: fused[1:3].unfuse()[0],
    "copy": lambda fused: copy.deepcopy(fused)[1],
    "copy of a slice": lambda fused: copy.deepcopy(fused[1:3])[0],
    "unfuse of a copy": lambda fused: copy.deepcopy(fused).unfuse()[1],
    "pickle": lambda fused: pickle.loads(pickle.dumps(fused))[1],
    "copy of the member": lambda fused: copy.deepcopy(fused[1]),
}


def seen(model: nn.Module) -> tuple[object, ...]:
    """All that a change may change."""
    values = [value.tolist() for value in model.state_dict().values()]
    flags = [module.training for module in model.modules()], [p.requires_grad for p in model.parameters()]
    hooks = list(copy.copy(model)._forward_hooks.values())
    return model.scale, model.get_submodule("norm").momentum, getattr(model, "note", ""), values, flags, hooks


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("kind", COPIES)
@pytest.mark.parametrize("change", CHANGES)
def test_copies(change: str, kind: str, called: bool) -> None:
    torch.manual_seed(0)
    models = [Scaled().double() for _ in range(4)]
    fused = hf.fuse(copy.deepcopy(models))
    if called:
        x = torch.randn(5, 3, dtype=torch.float64)
        for model in (*models, fused):
            model(x)
    for model in (models[1], fused[1]):
        CHANGES[change](model)
    copied = COPIES[kind](fused)
    hooks = [hook for hook in seen(copied)[-1] if hook is doubled]
    assert (*seen(copied)[:-1], hooks) == seen(models[1])
    # The others are as they were.
    assert fused.unfuse()[2].scale == 1.0


@pytest.mark.parametrize("change", ["bias", "data", "parameter"])
def test_saves(change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    fused = hf.fuse([Scaled().double() for _ in range(4)])
    CHANGES[change](fused[1])
    expected = copy.deepcopy(fused[1]).state_dict()
    torch.testing.assert_close(saved(fused).state_dict(), expected, rtol=0, atol=0)
    pop = hf.Population(fused, optimizer=hf.optim.SGD, loss=nn.functional.mse_loss)
    CHANGES[change](fused[2])
    pop.save(tmp_path / "pop")
    again = hf.Population.load(
        tmp_path / "pop", lambda: Scaled().double(), optimizer=hf.optim.SGD, loss=nn.functional.mse_loss
    )
    for loaded, member in zip(again.models, fused, strict=True):
        assert loaded is not None
        torch.testing.assert_close(dict(loaded.state_dict()), dict(member.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("change", ["bias", "data", "parameter"])
@pytest.mark.parametrize("alike", [True, False])
def test_averages(change: str, alike: bool) -> None:
    torch.manual_seed(0)
    models: list[nn.Module] = [Scaled().double() for _ in range(3)]
    others = [] if alike else [nn.Linear(3, 2).double()]
    pop = hf.Population([*models, *others], optimizer=hf.optim.SGD, loss=nn.functional.mse_loss)
    for model in (models[1], pop.models[1]):
        assert model is not None
        CHANGES[change](model)
    average = pop.average([0, 1, 2])
    assert average is not None
    for name, value in average.named_parameters():
        mean = torch.stack([model.get_parameter(name) for model in models]).mean(0)
        torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("take", [lambda fused: fused[1], lambda fused: fused.unfuse()])
def test_memory_of_other_rows_that_the_stack_was_given_is_refused(held: bool, take: Callable[..., object]) -> None:
    fused = hf.fuse([nn.Linear(3, 2) for _ in range(3)])
    fused(torch.ones(4, 3))
    members = [*fused] if held else []
    fused.get_parameter("weight").data, fused.get_parameter("bias").data = torch.ones(3, 5, 3), torch.zeros(3, 5)
    with pytest.raises(hf.FusionError, match=r"stack of weight has the shape \(3, 5, 3\), but members have \(2, 3\)"):
        take(fused)
    assert len(members) == 3 * held
