"""Members that differ in submodules are one array: values, gradients, buffers and updates of each as alone."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.serialized_program import read_compiled, write_compiled
from hfusion.core.program import Kind
from hfusion.passes import layouts
from hfusion.passes.gather import has_variants


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


X = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 0, 1])


class Cnn(nn.Module):
    def __init__(
        self,
        act: nn.Module,
        norm: Callable[[int], nn.Module] = nn.BatchNorm2d,
        drop: float | None = None,
        blocks: int = 1,
    ) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = norm(8)
        self.act = act
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), norm(8), copy.deepcopy(act)) for _ in range(blocks)
        )
        self.drop = nn.Identity() if drop is None else nn.Dropout(drop)
        self.pool = nn.AdaptiveAvgPool2d(2)
        self.body = nn.Linear(32, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.norm(self.stem(x)))
        for block in self.blocks:
            h = h + block(h)
        h = self.drop(self.pool(h).flatten(1))
        out: Tensor = self.head(self.act(self.body(h)))
        return out


def groups(channels: int) -> nn.Module:
    return nn.GroupNorm(2, channels)


def halves(channels: int) -> nn.Module:
    return nn.GroupNorm(4, channels)


def no_norm(channels: int) -> nn.Module:
    return nn.Identity()


class Moved(nn.Sequential):
    """The same operators, with the layer of each under one of two keys."""

    def __init__(self, position: int, slope: float) -> None:
        layers = [nn.Flatten(), *[nn.Identity()] * position, nn.Linear(192, 4), *[nn.Identity()] * (1 - position)]
        super().__init__(nn.Conv2d(3, 3, 3, padding=1), nn.LeakyReLU(slope), *layers)
        self.add_module("bias", Bias())


class Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.added = nn.Parameter(torch.randn(1200))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.added.view(-1, 4).mean(0)


def own_tanh() -> nn.Module:
    class Tanh(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.tanh() * 0.5

    Tanh.__qualname__ = "Tanh"
    return Tanh()


CASES: dict[str, Callable[[], list[nn.Module]]] = {
    "activations": lambda: [Cnn(act) for act in (nn.ReLU(), nn.GELU(), nn.SiLU(), nn.ReLU(), nn.Tanh())],
    "activations with parameters": lambda: [Cnn(act) for act in (nn.ReLU(), nn.PReLU(), nn.PReLU(8), nn.ReLU())],
    "norms": lambda: [Cnn(nn.ReLU(), norm) for norm in (nn.BatchNorm2d, groups, no_norm, groups, nn.BatchNorm2d)],
    "groups of norms": lambda: [Cnn(nn.ReLU(), norm) for norm in (groups, halves, nn.BatchNorm2d)],
    "activations and norms": lambda: [
        Cnn(act(), norm) for norm in (nn.BatchNorm2d, groups) for act in (nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh)
    ],
    "slopes": lambda: [Cnn(nn.LeakyReLU(slope)) for slope in (0.1, 0.2)] + [Cnn(nn.ReLU()), Cnn(nn.GELU())],
    "one block more": lambda: [Cnn(nn.ReLU(), blocks=blocks) for blocks in (1, 2, 1, 2)],
    "many activations with parameters": lambda: [
        Cnn(act) for act in (nn.PReLU(), nn.PReLU(8), nn.PReLU(), nn.PReLU(8), nn.PReLU(8, 0.1))
    ],
    "many places of one operator": lambda: [
        Moved(position, slope) for position in (0, 1) for slope in (0.1, 0.2, 0.3, 0.4)
    ],
    "classes of one name": lambda: [Cnn(act) for act in (nn.Tanh(), own_tanh(), nn.Tanh())],
    "another dtype of norm": lambda: [Cnn(nn.ReLU(), norm) for norm in (nn.InstanceNorm2d, nn.BatchNorm2d, groups)],
}


def made(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [model.double() for model in CASES[name]()]


def stepped_alone(models: Sequence[nn.Module], steps: int, lrs: Sequence[float], clip: float = 0.5) -> list[Tensor]:
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9, weight_decay=0.1)
        for model, lr in zip(models, lrs, strict=True)
    ]
    losses = []
    for _ in range(steps):
        row = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(X), Y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            row.append(loss.detach())
        losses.append(torch.stack(row))
    return losses


def assert_members_equal(fused: hf.FusedModule, models: Sequence[nn.Module]) -> None:
    for row, model in enumerate(models):
        member, alone = fused[row].state_dict(), model.state_dict()
        assert list(member) == list(alone)
        for name, tensor in alone.items():
            assert member[name].shape == tensor.shape, name
            assert_close(member[name], tensor)


@pytest.mark.parametrize("name", CASES)
def test_each_trains_as_alone(name: str) -> None:
    check_training(name)


@pytest.mark.parametrize("common", [0.0, math.inf])
@pytest.mark.parametrize("name", ["activations with parameters", "activations and norms", "one block more"])
def test_variants_in_common_and_apart_are_the_same(name: str, common: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "COMMON", common)
    check_training(name)


def check_training(name: str) -> None:
    models = made(name)
    fused = hf.fuse(models)
    lrs = [0.01 * (1 + row) for row in range(len(models))]
    opt = hf.optim.SGD(fused.parameters(), lr=lrs, momentum=0.9, weight_decay=0.1)
    expected = stepped_alone(models, 4, lrs)
    for losses in expected:
        opt.zero_grad()
        loss = hf.per_model(F.cross_entropy)(fused(X), Y)
        assert_close(loss.detach(), losses)
        loss.sum().backward()
        hf.optim.clip_grad_norm_(fused.parameters(), 0.5)
        opt.step()
    assert_members_equal(fused, models)
    assert any(has_variants(part.program.module.graph) for part in fused.report().parts)
    with fused.evaluating():
        outputs = fused(X)
    for row, model in enumerate(models):
        assert_close(outputs[row], model.eval()(X))


@pytest.mark.parametrize("name", ["activations with parameters", "norms"])
def test_each_trains_as_alone_compiled(name: str) -> None:
    models = made(name)
    fused = hf.fuse(models)
    lrs = [0.01 * (1 + row) for row in range(len(models))]
    opt = hf.optim.SGD(fused.parameters(), lr=lrs, momentum=0.9, weight_decay=0.1)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=True)
    for losses in stepped_alone(models, 3, lrs, clip=1e9):
        assert_close(step(X, Y), losses)
    assert_members_equal(fused, models)


def mlp(act: nn.Module, drop: float = 0.0, wide: bool = False) -> nn.Module:
    layers = [nn.Linear(5, 8), act, *([nn.Dropout(drop)] if drop else []), *([nn.Linear(8, 8)] if wide else [])]
    return nn.Sequential(nn.Sequential(*layers), nn.Linear(8, 3)).double()


def test_dropout_draws_for_those_who_have_it() -> None:
    torch.manual_seed(0)
    models = [mlp(nn.ReLU()), mlp(nn.ReLU(), 0.5), mlp(nn.Tanh(), 0.2), mlp(nn.Tanh())]
    fused = hf.fuse(models)
    x = torch.randn(64, 5, dtype=torch.float64)
    first, second = fused(x), fused(x)
    for row in (0, 3):
        assert torch.equal(first[row], second[row])
        assert_close(first[row], models[row](x))
    for row in (1, 2):
        assert not torch.equal(first[row], second[row])
    fused.eval()
    assert_close(fused(x), torch.stack([model.eval()(x) for model in models]))


def unlike() -> list[nn.Module]:
    torch.manual_seed(0)
    return [mlp(nn.ReLU()), mlp(nn.PReLU(8)), mlp(nn.PReLU()), mlp(nn.ReLU(), wide=True)]


def test_a_state_dict_holds_the_rows_that_have_each_key(tmp_path: Any) -> None:
    models = unlike()
    fused = hf.fuse(models)
    state = fused.state_dict()
    assert {name: tuple(tensor.shape) for name, tensor in state.items() if name.startswith("0.")} == {
        "0.0.weight": (4, 8, 5),
        "0.0.bias": (4, 8),
        "0.1.weight": (2, 8),
        "0.2.weight": (1, 8, 8),
        "0.2.bias": (1, 8),
    }
    torch.save(state, tmp_path / "state.pt")
    other = hf.fuse(unlike())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    for member, model in zip(other.unfuse(), models, strict=True):
        assert list(member.state_dict()) == list(model.state_dict())
        assert all(torch.equal(member.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(hf.FusionError, match=r"0.1.weight holds the rows of members \[1, 2\], and members \[0, 2\]"):
        hf.fuse([models[1], models[0], models[2], models[3]]).load_state_dict(state)


def test_optimizers_and_saves_follow(tmp_path: Any) -> None:
    models, x = unlike(), torch.randn(6, 5, dtype=torch.float64)
    fused = hf.fuse(models)
    opt = hf.optim.Adam(fused.parameters(), lr=[0.1, 0.2, 0.3, 0.4])
    alone = [torch.optim.Adam(model.parameters(), lr=0.1 * (1 + row)) for row, model in enumerate(models)]
    for _ in range(3):
        opt.zero_grad()
        fused(x).square().sum().backward()
        norms = hf.optim.clip_grad_norm_(fused.parameters(), 0.3)
        opt.step()
        for row, (model, optimizer) in enumerate(zip(models, alone, strict=True)):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            assert_close(norms[row], torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
    for member, optimizer in zip(opt.unfuse(), alone, strict=True):
        expected = optimizer.state_dict()["state"]
        assert member["state"].keys() == expected.keys()
        for key, entry in expected.items():
            assert_close(member["state"][key]["exp_avg_sq"], entry["exp_avg_sq"])
    for model, row in zip(models, fused, strict=True):
        for name, parameter in row.named_parameters():
            assert_close(parameter.grad, dict(model.named_parameters())[name].grad)
    hf.save(tmp_path / "save", fused, opt)
    other = hf.fuse(unlike())
    again = hf.optim.Adam(other.parameters(), lr=0.1)
    hf.load(tmp_path / "save", other, again)
    for model, member in zip(models, other.unfuse(), strict=True):
        for name, tensor in model.state_dict().items():
            assert_close(member.state_dict()[name], tensor)
    turned = unlike()[::-1]
    with pytest.raises(hf.CheckpointError, match="in the order of those that were saved"):
        hf.load(tmp_path / "save", hf.fuse(turned))


REFUSED: dict[str, Callable[[hf.FusedModule], object]] = {
    "slices": lambda fused: fused[1:3],
    "batches of different sizes": lambda fused: fused(
        hf.stacked([torch.zeros(1 + row, 5).double() for row in range(4)])
    ),
    "modes of some": lambda fused: (fused[1].eval(), fused(torch.zeros(2, 5, dtype=torch.float64))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_need_one_structure_are_refused_by_name(name: str) -> None:
    with pytest.raises(hf.FusionError, match=r"differ in submodules \(0.1 is ReLU in member 0 and PReLU in member 1\)"):
        REFUSED[name](hf.fuse(unlike()))


class Unused(nn.Module):
    """Has a layer that it uses with one of two activations only."""

    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.act, self.body, self.extra = act, nn.Linear(5, 8).double(), nn.Linear(8, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.act(self.body(x))
        return h + self.extra(h) if isinstance(self.act, nn.ReLU) else h


UNLIKE: dict[str, tuple[Callable[[], list[nn.Module]], str]] = {
    "a parameter that only some use": (
        lambda: [Unused(nn.ReLU()), Unused(nn.Tanh())],
        "the output depends on extra.weight in model 0 and not in model 1, which has one",
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_inexact_variants_are_refused(name: str) -> None:
    make, message = UNLIKE[name]
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse(make())(torch.zeros(2, 5, dtype=torch.float64))


def test_a_program_is_the_same_after_it_was_written() -> None:
    torch.manual_seed(0)
    models, x = unlike(), torch.randn(6, 5, dtype=torch.float64)
    fused = hf.fuse(models)
    expected = fused(x)
    compiled = next(compiled for family in fused._compiler.families.values() for compiled in family)
    written = json.loads(json.dumps(write_compiled(compiled)))
    again = read_compiled(written, compiled.constants)
    assert again.partial == compiled.partial == {"0.1.weight", "0.2.weight", "0.2.bias"}
    tensors = [fused.stacks[slot.name] for slot in again.program.slots if slot.kind is not Kind.INPUT]
    assert torch.equal(again.program.run(*tensors, x)[0], expected)
