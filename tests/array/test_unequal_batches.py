"""Batches of other sizes for each member: outputs, losses, gradients and buffers are those of the member alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.alone import Branch, Member, Own, assert_trained_alone, compare_tensors

# Batches of different sizes: each member's outputs, losses, gradients and buffers are those of the member alone.
SIZES = [3, 5, 64, 5]


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


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))


def batch_norm() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))


def rows(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape)


def words(n: int) -> Tensor:
    return torch.randint(7, (n, 2))


def labels(n: int) -> Tensor:
    return torch.randint(3, (n,))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Any]]] = {
    "mlp": (mlp, rows(4)),
    "batch norm": (batch_norm, rows(2, 6, 6)),
    "contrast": (Contrast, rows(4)),
    "branching": (lambda: Branch(4, 3), rows(4)),
}

LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": F.cross_entropy,
    "squared mean": lambda y, t: F.cross_entropy(y, t, reduction="none").mean() ** 2 + y.std(),
}


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)


def close(actual: Any, expected: Any, name: str = "") -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11, msg=lambda text: f"{name}: {text}")


@pytest.mark.parametrize(("model", "loss"), [*((name, "mean") for name in MODELS), ("mlp", "squared mean")])
def test_training_equals_members_alone(model: str, loss: str) -> None:
    make, draw = MODELS[model]
    rotations = [SIZES[shift:] + SIZES[:shift] for shift in range(3)]
    batches = [[hf.stacked([of(n) for n in sizes]) for of in (draw, labels)] for sizes in rotations]
    assert_trained_alone([make() for _ in SIZES], LOSSES[loss], batches, momentum=0.9, compile=True)


@pytest.mark.parametrize("sizes", [[1, 2], [1, 1, 7], [4, 1, 1], [0, 4]])
def test_batches_of_one_sample_and_of_none(sizes: list[int]) -> None:
    fused = hf.fuse(models := [mlp() for _ in sizes])
    xs = [torch.randn(n, 4) for n in sizes]
    for actual, model, x in zip(fused(hf.stacked(xs)), models, xs, strict=True):
        close(actual, model(x))


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
    assert "member 3" in "".join(error.value.__notes__)


# Batches filled up to one size: what is proven of a forward, and results equal to the members alone.
SIZES_PADDED = (3, 5, 11)


class Then(nn.Module):
    """A layer, and a function of its result."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor) -> Any:
        return self.function(self.layer(x))


def padded_cnn() -> nn.Module:
    norms = nn.GroupNorm(2, 4), nn.MaxPool2d(2)
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), *norms, nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(4, 3))


def then(function: Callable[[Tensor], Any]) -> tuple[Callable[[], nn.Module], Callable[[int], Tensor]]:
    return lambda: Then(function), rows(4)


PADDED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor]]] = {
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)), rows(4)),
    "cnn": (padded_cnn, rows(2, 6, 6)),
    "embedding": (lambda: nn.Embedding(7, 3, padding_idx=0), words),
    "columns": then(lambda x: (x[:, 1:], x.flip(1), x.softmax(1), x.cumsum(1))),
    "norm": then(lambda x: x / x.norm(dim=-1, keepdim=True)),
    "weights of no sample": then(lambda x: x @ torch.eye(4).softmax(0)),
    "attention": then(lambda x: F.scaled_dot_product_attention(*[x.view(-1, 2, 2)] * 3)),
    "permuted": then(lambda x: x.view(-1, 2, 2).permute(0, 2, 1) + torch.zeros(2, 2)),
    "recurrent": (lambda: nn.GRU(4, 3, batch_first=True), rows(5, 4)),
    "largest": then(lambda x: torch.stack(x.max(1)[:1] + x.topk(2)[0].unbind(1), 1)),
}

GROUPED: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Tensor], str]] = {
    "outer product": (*then(lambda x: torch.einsum("ni,nj->nij", x, x)), "einsum: it may mix"),
    "batch norm": (lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), rows(4), "forward changes 1."),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), rows(4), "dropout: its train is True"),
    "counts": (lambda: nn.Embedding(7, 3, scale_grad_by_freq=True), words, "embedding: its scale_grad_by_freq"),
    "samples as steps": (lambda: nn.GRU(4, 3), rows(5, 4), "gru.input: its steps are samples"),
    "attention to others": (*then(lambda x: F.scaled_dot_product_attention(x, x, x)), "attends to other samples"),
    "centered": (*then(lambda x: x - x.mean(0)), "mean.dim: it works along"),
    "backwards": (*then(lambda x: x[torch.arange(x.shape[0] - 1, -1, -1)]), "mix samples"),
    "softmax": (*then(lambda x: x.softmax(0)), "softmax.int: it works along"),
    "flat": (*then(lambda x: x.reshape(-1)), "reshape: it moves or merges"),
    "number of samples": (*then(lambda x: x / x.shape[0]), "it uses the number of samples"),
    "sum": (*then(lambda x: x.sum()), "sum: it may mix"),
    "pairs": (*then(lambda x: (x[:, None] - x[None]).sum(1)), "unsqueeze: it works along samples"),
    "first sample": (*then(lambda x: x - x[:1]), "slice.Tensor: it picks"),
    "joined": (*then(lambda x: torch.cat([x, x])), "cat: it works along"),
    "branch on the size": (*then(lambda x: x if x.shape[0] > 10 else -x), ""),
}


def rows_of(outputs: Any, row: int) -> list[Any]:
    parts = outputs if isinstance(outputs, tuple) else (outputs,)
    return [part[row] if isinstance(part, Tensor | hf.Ragged) else part for part in parts]


def padded_check(make: Callable[[], nn.Module], batch: Callable[[int], Tensor], sizes: Any) -> hf.FusedModule:
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
def test_filled_up_equals_alone(name: str) -> None:
    fused = padded_check(*PADDED[name], SIZES_PADDED)
    assert fused.report().sizes == (
        "batches of different sizes run in one call, filled up to the largest, where that at most doubles the samples",
    )


@pytest.mark.parametrize("name", GROUPED)
def test_models_that_mix_samples_run_member_by_member(name: str) -> None:
    make, batch, why = GROUPED[name]
    fused = padded_check(make, batch, SIZES_PADDED)
    assert not fused.report().sizes
    assert all("batches of different sizes" in line for line in fused.report().loops)
    assert why in str(fused.report())


def test_padded_batches_take_the_program_of_equal_ones() -> None:
    fused = hf.fuse([mlp() for _ in SIZES])
    fused(torch.randn(6, 4))
    fused(hf.stacked([torch.randn(6, 4) for _ in SIZES]))
    fused(hf.stacked([torch.randn(size, 4) for size in (5, 6, 6, 4)]))
    # One for a common batch, and one for a batch of each member.
    assert len(fused.report().parts) == 2


def test_values_that_are_not_finite_stay_with_their_member() -> None:
    fused = hf.fuse(models := [PADDED["mlp"][0]() for _ in SIZES_PADDED])
    xs = [torch.randn(n, 4) for n in SIZES_PADDED]
    before = fused(hf.stacked(xs))
    xs[1][-1] = torch.inf
    outputs = fused(hf.stacked(xs))
    assert all(torch.equal(before[b], outputs[b]) for b in (0, 2))
    F.cross_entropy(outputs[2], torch.zeros(11, dtype=torch.int64)).backward()
    gradients = fused.get_parameter("0.weight").grad
    assert gradients is not None
    assert not gradients[2].isnan().any()
    for actual, model, x in zip(outputs, models, xs, strict=True):
        torch.testing.assert_close(actual, model(x), rtol=1e-9, atol=1e-11, equal_nan=True)


def test_inputs_may_differ_in_any_size() -> None:
    fused = hf.fuse(models := [mlp() for _ in range(3)])
    xs = [torch.randn(n, length, 4) for n, length in ((2, 3), (2, 5), (4, 3))]
    for _ in range(2):
        for actual, model, x in zip(fused(hf.stacked(xs)), models, xs, strict=True):
            close(actual, model(x))


# Populations whose members have batches of different sizes.


@pytest.mark.parametrize("norm", [[], [nn.BatchNorm1d(8)]], ids=["plain", "normed"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_twenty_steps_and_an_evaluation_of_a_population(norm: list[nn.Module], accumulate: int) -> None:
    # With a bias before the norm, whose gradient is rounding alone, Adam would make a step of it.
    layers = [nn.Linear(4, 8, bias=not norm), *norm, nn.Linear(8, 3)]
    models = [copy.deepcopy(nn.Sequential(*layers)).double() for _ in SIZES]
    for model in models:
        nn.init.normal_(model[0].weight)
    options = {"loss": F.cross_entropy, "accumulate": accumulate}
    pop = hf.Population(models, optimizer=lambda params: hf.optim.Adam(params, lr=0.01), **options)
    members = [Member(m, torch.optim.Adam, F.cross_entropy, Own(0.01, accumulate=accumulate)) for m in models]
    for _ in range(20):
        xs, ts = [torch.randn(n, 4) for n in SIZES], [torch.randint(3, (n,)) for n in SIZES]
        pop.step(hf.stacked(xs), hf.stacked(ts))
        for member, x, t in zip(members, xs, ts, strict=True):
            member.call(x, t)
    compare_tensors(pop.fused, models, "after the steps")
    scores = pop.evaluate(F.cross_entropy, [(hf.stacked(xs), hf.stacked(ts))] * 2)
    for b, model in enumerate(models):
        close(scores[b], F.cross_entropy(model.eval()(xs[b]), ts[b]).detach())
