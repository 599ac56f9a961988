"""Batches of different sizes: each member's outputs, losses, gradients and buffers are those of the member alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.ragged import Ragged

SIZES = [3, 5, 64, 5]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        _, (hidden, _) = self.lstm(x)
        logits: Tensor = self.head(hidden[-1])
        return logits


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layer(self.embed(x)).mean(1))
        return logits


class Contrast(nn.Module):
    """Samples are compared with each other, and their number is used."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 3)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += x.shape[0]
        h = F.normalize(self.embed(x), dim=1)
        mixed: Tensor = h - (h @ h.t()).softmax(1) @ h / x.shape[0]
        return mixed


class Branching(nn.Module):
    """A model that branches on values, and so runs as the members' own code."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x) if float(x.detach().sum()) > 0 else self.b(x) * 2
        return y


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 3)
    )


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, rows(4)),
    "cnn": (cnn, rows(2, 6, 6)),
    "batch norm": (batch_norm, rows(2, 6, 6)),
    "lstm": (Recurrent, rows(6, 4)),
    "transformer": (Transformer, lambda n: torch.randint(7, (n, 5))),
    "contrast": (Contrast, rows(4)),
    "branching": (Branching, rows(4)),
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "sum": lambda y, t: F.cross_entropy(y, t, reduction="sum"),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "squared mean": lambda y, t: F.cross_entropy(y, t, reduction="none").mean() ** 2 + y.std(),
}


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def close(actual: Any, expected: Any, name: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")


def check(make: Callable[[], nn.Module], batch: Callable[[int], Any], loss: Any, sizes: list[int]) -> hf.FusedModule:
    """Three steps of SGD with momentum; losses, gradients, parameters and buffers after each."""
    models = [make() for _ in sizes]
    fused = hf.fuse(models)
    opt = hf.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9)
    opts = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    step = hf.train_step(fused, loss, opt, compile=True)
    for shift in range(3):
        rotated = sizes[shift:] + sizes[:shift]
        xs, ts = [batch(n) for n in rotated], [torch.randint(3, (n,)) for n in rotated]
        losses = step(hf.stacked(xs), hf.stacked(ts))
        for b, (model, optimizer) in enumerate(zip(models, opts, strict=True)):
            optimizer.zero_grad()
            value = loss(model(xs[b]), ts[b])
            value.backward()
            optimizer.step()
            close(losses[b], value.detach(), f"loss of {b}")
            for name, parameter in model.named_parameters():
                if parameter.grad is not None:
                    close(fused.get_parameter(name).grad[b], parameter.grad, f"gradient of {name} of {b}")  # type: ignore[index]
            for name, tensor in model.state_dict().items():
                close(fused.state_dict()[name][b], tensor, f"{name} of {b}")
    return fused


@pytest.mark.parametrize("name", MODELS)
def test_training_equals_members_alone(name: str) -> None:
    make, batch = MODELS[name]
    check(make, batch, F.cross_entropy, SIZES)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_are_those_of_own_samples(name: str) -> None:
    check(mlp, rows(4), LOSSES[name], SIZES)


@settings(max_examples=8, deadline=None)
@given(sizes=st.lists(st.integers(2, 9), min_size=2, max_size=4))
def test_any_sizes(sizes: list[int]) -> None:
    torch.set_default_dtype(torch.float64)
    check(mlp, rows(4), F.cross_entropy, sizes)
    check(batch_norm, rows(2, 6, 6), F.cross_entropy, sizes)


@pytest.mark.parametrize("sizes", [[1, 2], [1, 1, 7], [4, 1, 1], [0, 4]])
def test_batches_of_one_sample_and_of_none(sizes: list[int]) -> None:
    fused = hf.fuse(models := [mlp() for _ in sizes])
    xs = [torch.randn(n, 4) for n in sizes]
    for actual, model, x in zip(fused(hf.stacked(xs)), models, xs, strict=True):
        close(actual, model(x))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_in_eval_mode(name: str) -> None:
    make, batch = MODELS[name]
    fused = hf.fuse(models := [make() for _ in SIZES]).eval()
    xs = [batch(n) for n in SIZES]
    with torch.no_grad():
        outputs = fused(hf.stacked(xs))
        assert isinstance(outputs, Ragged)
        for actual, model, x in zip(outputs, models, xs, strict=True):
            close(actual, model.eval()(x))


def test_a_nan_of_one_changes_no_bit_of_others() -> None:
    fused = hf.fuse([mlp() for _ in SIZES])
    xs = [torch.randn(n, 4) for n in SIZES]
    before = fused(hf.stacked(xs))
    spoilt = [x.clone() for x in xs]
    spoilt[1][0] = torch.nan
    after = fused(hf.stacked(spoilt))
    for b in (0, 2, 3):
        assert torch.equal(before[b], after[b])
    assert after[1].isnan().any()
    assert not after[1][1:].isnan().any()


def test_mismatched_batches_are_named() -> None:
    fused = hf.fuse([mlp() for _ in SIZES])
    xs = [torch.randn(n, 4) for n in SIZES]
    with pytest.raises(ValueError, match="holds 3 batches"):
        fused(hf.stacked(xs[:3]))
    outputs = fused(hf.stacked(xs))
    with pytest.raises(ValueError, match="holds 3 batches"):
        hf.per_model(F.cross_entropy)(outputs, hf.stacked([torch.zeros(n, dtype=torch.int64) for n in SIZES[:3]]))
    with pytest.raises(ValueError, match="batch_size") as error:
        hf.per_model(F.cross_entropy)(outputs, hf.stacked([torch.zeros(n, dtype=torch.int64) for n in (3, 5, 64, 6)]))
    assert "members [3]" in "".join(error.value.__notes__)
