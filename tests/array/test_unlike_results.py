"""Members whose results differ in shape, as heads of other numbers of classes give: each trains as alone."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.serialized_program import read_compiled, write_compiled

DOUBLE = torch.float64
Y = torch.tensor([0, 1, 1, 0, 1, 0])
OWN_Y = torch.tensor([[0, 1, 1, 0, 1, 0], [2, 1, 1, 0, 2, 0], [1, 1, 1, 0, 0, 0], [0, 1, 0, 1, 1, 0]])


def mlp(classes: int, act: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), act(), nn.Linear(8, 8), act(), nn.Linear(8, classes))


def two_layers(width: int, classes: int) -> nn.Module:
    head = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, classes))
    return nn.Sequential(nn.Linear(5, 24), nn.ReLU(), nn.Linear(24, 8), head)


class Cnn(nn.Module):
    def __init__(self, classes: int, act: Callable[[], nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem, self.norm, self.act = nn.Conv2d(1, 4, 2), nn.BatchNorm1d(16), act()
        self.body, self.head = nn.Linear(16, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act(self.stem(x[:, None, :4].reshape(-1, 1, 2, 2).repeat(1, 1, 2, 2)[..., :3, :3]))
        out: Tensor = self.head(self.body(self.norm(h.flatten(1))))
        return out


class Features(nn.Module):
    """Returns features of one shape, and logits of other shapes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = self.body(x).relu()
        return {"features": features, "logits": self.head(features)}


class Squeezed(nn.Module):
    """One number per sample, or several."""

    def __init__(self, sizes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, sizes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x).tanh())
        return out.squeeze(1) if out.shape[1] == 1 else out


CASES: dict[str, Callable[[], list[nn.Module]]] = {
    "classes": lambda: [mlp(classes) for classes in (3, 4, 3, 2)],
    "classes and activations": lambda: [mlp(3), mlp(4, nn.Tanh), mlp(3, nn.Tanh), mlp(2)],
    "widths before the end": lambda: [two_layers(4, 2), two_layers(6, 3), two_layers(4, 3), two_layers(6, 3)],
    "convolutions and norms": lambda: [Cnn(3), Cnn(4, nn.Tanh), Cnn(3, nn.Tanh), Cnn(2)],
}


def made(name: str) -> list[nn.Module]:
    torch.manual_seed(0)
    return [model.double() for model in CASES[name]()]


def inputs() -> Tensor:
    return torch.randn(6, 5, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)


def assert_members_equal(fused: hf.FusedModule, models: Sequence[nn.Module]) -> None:
    for member, model in zip(fused.unfuse(), models, strict=True):
        state = member.state_dict()
        assert list(state) == list(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert state[name].shape == tensor.shape
            assert_close(state[name], tensor)


def stepped_alone(models: Sequence[nn.Module], x: Tensor, targets: Tensor, steps: int) -> list[Tensor]:
    optimizers = [torch.optim.SGD(m.parameters(), 0.01 * (1 + b), momentum=0.9) for b, m in enumerate(models)]
    losses = []
    for _ in range(steps):
        row = []
        for model, optimizer, target in zip(models, optimizers, targets, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), target)
            loss.backward()
            optimizer.step()
            row.append(loss.detach())
        losses.append(torch.stack(row))
    return losses


@pytest.mark.parametrize("name", CASES)
def test_each_gives_and_learns_what_it_does_alone(name: str) -> None:
    models, x = made(name), inputs()
    fused = hf.fuse(models)
    outputs = fused(x)
    assert isinstance(outputs, hf.Ragged)
    losses = hf.per_model(F.cross_entropy)(outputs, hf.stacked(OWN_Y))
    losses.sum().backward()
    for row, model in enumerate(models):
        alone = model(x)
        assert_close(outputs[row], alone)
        loss = F.cross_entropy(alone, OWN_Y[row])
        loss.backward()
        assert_close(losses[row], loss)
        for (key, parameter), expected in zip(fused[row].named_parameters(), model.parameters(), strict=True):
            assert parameter.grad is not None, key
            assert_close(parameter.grad, expected.grad)
    with fused.evaluating():
        outputs = fused(x)
    for row, model in enumerate(models):
        assert_close(outputs[row], model.eval()(x))


@pytest.mark.parametrize(("name", "at_once"), [*((name, None) for name in CASES), ("classes and activations", 2)])
def test_each_trains_as_alone_compiled(name: str, at_once: int | None) -> None:
    models, x = made(name), inputs()
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=[0.01, 0.02, 0.03, 0.04], momentum=0.9)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=True)
    step.at_once = at_once
    own_targets = at_once is None
    target, targets = (hf.stacked(OWN_Y), OWN_Y) if own_targets else (Y, Y.expand(4, -1))
    for losses in stepped_alone(models, x, targets, 3):
        assert_close(step(x, target), losses)
    assert "program" in str(step.report())
    assert_members_equal(fused, models)


def test_a_tree_holds_what_can_be_stacked_as_a_tensor() -> None:
    models, x = [Features(classes).double() for classes in (2, 3)], inputs()
    outputs = hf.fuse(models)(x)
    assert outputs["features"].shape == (2, 6, 8)
    assert outputs["logits"].rows_by_shape == [(0,), (1,)]
    losses = hf.per_model(lambda out, y: F.cross_entropy(out["logits"], y) + out["features"].mean())(outputs, Y)
    for row, model in enumerate(models):
        alone = model(x)
        assert_close(losses[row], F.cross_entropy(alone["logits"], Y) + alone["features"].mean())


def test_targets_have_the_shapes_of_the_results() -> None:
    models, x = [Squeezed(sizes).double() for sizes in (1, 3, 1)], inputs()
    targets = [torch.randn(model(x).shape, dtype=DOUBLE) for model in models]
    fused = hf.fuse(models)
    opt = hf.optim.Adam(fused.parameters(), lr=0.01)
    step = hf.train_step(fused, F.mse_loss, opt, compile=True)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in models]
    for _ in range(3):
        losses = step(x, hf.Ragged(targets))
        for row, (model, optimizer, target) in enumerate(zip(models, optimizers, targets, strict=True)):
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), target)
            loss.backward()
            optimizer.step()
            assert_close(losses[row], loss.detach())
    assert "members' targets have different sizes" in str(step.report())
    assert_members_equal(fused, models)


def test_nothing_of_a_member_reaches_another() -> None:
    models, x = made("classes and activations"), inputs()
    grads = []
    for broken in (False, True):
        fused = hf.fuse(copy.deepcopy(models), verify=False)
        if broken:
            with torch.no_grad():
                fused[0].get_parameter("4.weight").fill_(torch.nan)
                fused[3].get_parameter("0.bias").fill_(torch.inf)
        hf.per_model(F.cross_entropy)(fused(x), Y).sum().backward()
        grads.append([p.grad.clone() for row in (1, 2) for p in fused[row].parameters() if p.grad is not None])
    assert all(torch.equal(clean, mixed) for clean, mixed in zip(*grads, strict=True))


def test_state_dicts_saves_and_optimizers_hold_own_shapes(tmp_path: Any) -> None:
    models, x = made("classes"), inputs()
    fused = hf.fuse(models)
    opt = hf.optim.Adam(fused.parameters(), lr=0.01)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=False)
    step(x, Y)
    assert fused.state_dict()["4.weight"].shape == (4, 4, 8)
    assert [state["state"][4]["exp_avg"].shape[0] for state in opt.unfuse()] == [3, 4, 3, 2]
    hf.save(tmp_path / "save", fused, opt)
    again = hf.fuse(made("classes"))
    opt_again = hf.optim.Adam(again.parameters(), lr=0.1)
    hf.load(tmp_path / "save", again, opt_again)
    other = hf.fuse(made("classes"))
    other.load_state_dict(fused.state_dict())
    for array in (again, other):
        for member, model in zip(array.unfuse(), fused.unfuse(), strict=True):
            pairs = zip(member.state_dict().values(), model.state_dict().values(), strict=True)
            assert all(torch.equal(actual, expected) for actual, expected in pairs)
    resumed = hf.train_step(again, F.cross_entropy, opt_again, compile=False)
    assert torch.equal(resumed(x, Y), step(x, Y))


def test_a_joined_loss_is_the_same_after_it_was_written() -> None:
    fused, loss = hf.fuse(made("classes")), hf.per_model(F.cross_entropy)
    outputs = fused(inputs())
    losses = loss(outputs, Y)
    bound = loss.find_program(outputs, Y)
    assert not isinstance(bound, str)
    again = read_compiled(json.loads(json.dumps(write_compiled(bound.compiled))), {})
    blocks = [outputs.stack(rows) for rows in outputs.rows_by_shape]
    for program in (bound.compiled.program, again.program):
        assert_close(program.run(*blocks, Y)[0], losses)
    shapes = [block.shape[1:] for block in blocks]
    assert bound.compiled.guards([*shapes, Y.shape])
    assert again.guards([*shapes, Y.shape])
    assert not again.guards([*shapes[::-1], Y.shape])


REFUSED: dict[str, tuple[Callable[[hf.FusedModule], object], str]] = {
    "torch.export": (
        lambda fused: torch.export.export(fused, (inputs(),)),
        "torch.export cannot take results whose shapes differ between members",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_calls_that_need_results_of_one_shape_are_refused(name: str) -> None:
    call, message = REFUSED[name]
    with pytest.raises(hf.FusionError, match=message):
        call(hf.fuse(made("classes")))


def test_dtypes_must_be_the_same() -> None:
    class Narrow(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.float()

    models = [nn.Sequential(nn.Linear(5, 2).double(), last) for last in (nn.Identity(), Narrow())]
    with pytest.raises(hf.FusionError, match=r"a torch.float64 of shape \(6, 2\) in model 0 and a torch.float32"):
        hf.fuse(models)(inputs())
