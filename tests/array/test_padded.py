"""Batches filled up to one size: what is proven of a forward, and results equal to the members alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.passes.cost.padding import SizeCosts

SIZES = (3, 5, 64)


@pytest.fixture(autouse=True)
def _double() -> Iterator[None]:
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


class Then(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(self.embed(x)).mean(1)
        return result


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], batch_first: bool) -> None:
        super().__init__()
        self.layer = kind(4, 5, 2, batch_first=batch_first)
        self.batch_first = batch_first

    def forward(self, x: Tensor) -> Any:
        outputs, states = self.layer(x if self.batch_first else x.transpose(0, 1))
        return outputs, states if isinstance(states, Tensor) else states[0]


class Token(nn.Module):
    """Its batch size is used where it only repeats rows."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.layer = nn.Parameter(torch.randn(1, 1, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.token.expand(x.shape[0], -1, -1)
        result: Tensor = self.layer(torch.cat([tokens, x, torch.zeros(x.shape[0], 1, 4)], 1))
        return result


def cnn() -> nn.Module:
    norms = nn.GroupNorm(2, 4), nn.MaxPool2d(2)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *norms, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 3))


def of(*shape: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, *shape)


def then(function: Callable[[Tensor], Any]) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]]:
    return lambda: Then(function), of(4)


PADDED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), of(4)),
    "no dropout": (lambda: nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.0)), of(4)),
    "cnn": (cnn, of(2, 6, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4), nn.AdaptiveAvgPool1d(2)), of(2, 6)),
    "lstm": (lambda: Recurrent(nn.LSTM, True), of(6, 4)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), lambda size: torch.randint(7, (size, 2))),
    "token": (Token, of(3, 4)),
    "prelu": (lambda: nn.Sequential(nn.Conv1d(2, 3, 1), nn.PReLU(3)), of(2, 5)),
    "columns": then(lambda x: (x[:, 1:], x.flip(1), x.softmax(1), x.cumsum(1))),
    "norm": then(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "products": then(lambda x: x[:, :, None] @ x[:, None] + x.unsqueeze(1).bmm(x.unsqueeze(2))),
    "weights of no sample": then(lambda x: x @ torch.eye(4).softmax(0)),
    "largest": then(lambda x: torch.stack(x.max(1)[:1] + x.topk(2)[0].unbind(1), 1)),
}

GROUPED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
    "encoder": (Encoder, lambda size: torch.randint(7, (size, 5)), "transpose.int: it moves the samples"),
    "gru, steps first": (lambda: Recurrent(nn.GRU, False), of(6, 4), "transpose.int: it moves the samples"),
    "transposed": (*then(lambda x: x.t()), "t: it may mix"),
    "outer product": (*then(lambda x: torch.einsum("ni,nj->nij", x, x)), "einsum: it may mix"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), of(4), "forward changes 1."),
    "batch norm without statistics": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False)),
        of(4),
        "batch_norm: its training is True",
    ),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), of(4), "dropout: it draws"),
    "counts of an index": (
        lambda: nn.Embedding(7, 3, scale_grad_by_freq=True),
        lambda size: torch.randint(7, (size, 2)),
        "embedding: its scale_grad_by_freq",
    ),
    "centered": (*then(lambda x: x - x.mean(0)), "mean.dim: it works along"),
    "backwards": (*then(lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)]), "mix samples"),
    "flip": (*then(lambda x: x.flip(0)), "flip: it works along"),
    "softmax": (*then(lambda x: x.softmax(0)), "softmax.int: it works along"),
    "flat": (*then(lambda x: x.reshape(-1)), "reshape: it moves or merges"),
    "halves": (*then(lambda x: x.reshape(-1, 2, 2).reshape(4, -1)), "reshape: it moves or merges"),
    "cumsum": (*then(lambda x: x.cumsum(0)), "cumsum: it works along"),
    "number of samples": (*then(lambda x: x / x.shape[0]), "it uses the number of samples"),
    "numbers of samples": (*then(lambda x: x + torch.full((x.shape[0], 1), x.shape[0])), "full"),
    "sum": (*then(lambda x: x.sum()), "sum: it may mix"),
    "products": (*then(lambda x: x @ x.t()), "t: it may mix"),
    "pairs": (*then(lambda x: (x[:, None] - x[None]).sum(1)), "unsqueeze: it moves"),
    "first sample": (*then(lambda x: x - x[:1]), "slice.Tensor: it picks"),
    "last samples": (*then(lambda x: x[1:]), "slice.Tensor: it picks"),
    "joined": (*then(lambda x: torch.cat([x, x])), "cat: it works along"),
    "sorted": (*then(lambda x: x.sort(0)[0]), "sort: it works along"),
    "branch on the size": (*then(lambda x: x if x.shape[0] > 10 else -x), ""),
}


def rows_of(outputs: Any, row: int) -> list[Any]:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part[row] if isinstance(part, Tensor | hf.Ragged) else part for part in parts]


def check(make: Callable[[], nn.Module], batch: Callable[[int], Tensor], sizes: Any) -> hf.FusedModule:
    """Outputs and gradients of parameters and inputs, against the members alone."""
    fused = hf.fuse(models := [make() for _ in sizes])
    xs = [batch(size) for size in sizes]
    xs = [x.requires_grad_() if x.is_floating_point() else x for x in xs]
    outputs = fused(hf.stacked(xs))
    total = sum(t.pow(2).sum() for b in range(len(sizes)) for t in rows_of(outputs, b) if isinstance(t, Tensor))
    total.backward()  # type: ignore[union-attr]
    if any("Dropout" in str(model) and "p=0.5" in str(model) for model in models):
        return fused
    for b, model in enumerate(models):
        x = xs[b].detach().requires_grad_(xs[b].requires_grad)
        outcome = model(x)
        expected = list(outcome) if isinstance(outcome, tuple) else [outcome]
        torch.testing.assert_close(rows_of(outputs, b), expected, rtol=1e-9, atol=1e-11)
        sum(tensor.pow(2).sum() for tensor in expected if isinstance(tensor, Tensor)).backward()  # type: ignore[union-attr]
        if x.requires_grad:
            torch.testing.assert_close(xs[b].grad, x.grad, rtol=1e-9, atol=1e-11)
        for name, parameter in model.named_parameters():
            gradient = fused.get_parameter(name).grad
            assert gradient is not None
            torch.testing.assert_close(gradient[b], parameter.grad, rtol=1e-9, atol=1e-11, msg=lambda m, n=name: n + m)
    return fused


@pytest.mark.parametrize("name", PADDED)
def test_filled_up_equals_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeCosts, "padded", lambda *_: 0.0)
    fused = check(*PADDED[name], SIZES)
    assert fused.report().sizes == (
        "batches of different sizes run in one call where that is estimated to be faster, filled up to the largest",
    )


@pytest.mark.parametrize("name", GROUPED)
def test_models_that_mix_samples_run_by_size(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeCosts, "padded", lambda *_: 0.0)
    make, batch, why = GROUPED[name]
    fused = check(make, batch, SIZES)
    assert all("by a call for each size" in line for line in fused.report().sizes)
    assert why in str(fused.report())


def test_values_that_are_not_finite_stay_with_their_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SizeCosts, "padded", lambda *_: 0.0)
    fused = hf.fuse(models := [PADDED["mlp"][0]() for _ in SIZES])
    xs = [torch.randn(n, 4) for n in SIZES]
    xs[1][-1] = torch.inf
    outputs = fused(hf.stacked(xs))
    F.cross_entropy(outputs[2], torch.zeros(64, dtype=torch.int64)).backward()
    gradients = fused.get_parameter("0.weight").grad
    assert gradients is not None
    assert not gradients[2].isnan().any()
    for actual, model, x in zip(outputs, models, xs, strict=True):
        torch.testing.assert_close(actual, model(x), rtol=1e-9, atol=1e-11, equal_nan=True)
