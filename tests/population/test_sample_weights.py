"""Weights of samples in a population's steps: each member equals that model alone with the weighted loss."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from tests.population.test_own_pace import assert_close, normed

DOUBLE = torch.float64
CLASSES = torch.tensor([0.5, 2.0, 1.0], dtype=DOUBLE)


def labels(count: int) -> Tensor:
    return torch.randint(3, (count,))


def values(count: int) -> Tensor:
    return torch.randn(count, 3, dtype=DOUBLE)


def shares(count: int) -> Tensor:
    return torch.rand(count, 3, dtype=DOUBLE).softmax(1)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """One value per sample."""
    return (output - target).square().sum(1)


def own(output: Tensor, target: Tensor, reduction: str = "sum") -> Tensor:
    losses = (output - target).abs().sum(1)
    return losses if reduction == "none" else losses.sum()


LOSSES: dict[str, tuple[Callable[..., Any], Callable[[int], Tensor]]] = {
    "cross_entropy": (F.cross_entropy, labels),
    "classes": (functools.partial(F.cross_entropy, weight=CLASSES, label_smoothing=0.1), labels),
    "ignored": (nn.CrossEntropyLoss(weight=CLASSES, ignore_index=2), labels),
    "probabilities": (F.cross_entropy, shares),
    "nll": (nn.NLLLoss(), labels),
    "mse": (F.mse_loss, values),
    "sum": (nn.L1Loss(reduction="sum"), values),
    "batchmean": (nn.KLDivLoss(reduction="batchmean"), shares),
    "bce": (nn.BCEWithLogitsLoss(), shares),
    "own": (own, values),
}


def repeated(loss: Callable[..., Any], output: Tensor, target: Tensor, weights: Tensor) -> Tensor:
    """By the definition: a sample of weight k comes k times."""
    index = torch.arange(len(weights)).repeat_interleave(weights)
    return loss(output[index], target[index])


@pytest.mark.parametrize("name", LOSSES)
def test_a_weight_is_how_often_a_sample_comes(name: str) -> None:
    loss, targets = LOSSES[name]
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3), nn.LogSoftmax(1)).double() for _ in range(3)]
    alone = copy.deepcopy(models)
    optimizers = [torch.optim.Adam(model.parameters(), lr=0.01 * (1 + row)) for row, model in enumerate(alone)]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.Adam(p, lr=[0.01, 0.02, 0.03]), loss=loss, compile=False)
    for step in range(4):
        x, y = torch.randn(8, 4, dtype=DOUBLE), targets(8)
        if name == "ignored":
            y[0] = 0
        weights = torch.randint(3, (3, 8))
        weights[:, 0] = 1
        rows = [2, 0] if step == 2 else [0, 1, 2]
        sample_weights: Any = weights[0] if step == 1 else weights[: len(rows)].double()
        if step == 3:
            sample_weights = None
        losses = pop.step(x, y, weights=sample_weights, rows=rows)
        for index, row in enumerate(rows):
            counts = torch.ones(8, dtype=torch.int64) if step == 3 else weights[0 if step == 1 else index]
            optimizers[row].zero_grad()
            value = repeated(loss, alone[row](x), y, counts)
            value.backward()
            optimizers[row].step()
            assert_close(losses[row], value.detach())
    for model, alone_model in zip(pop.models, alone, strict=True):
        assert model is not None
        assert_close(model.state_dict(), alone_model.state_dict())


def test_fractions_batches_of_own_sizes_and_updates() -> None:
    """A loss that returns one value per sample, BatchNorm, updates of 1 and 2 calls, compiled and by sizes."""
    torch.manual_seed(0)
    sizes, accumulate = [3, 8], [1, 2]
    models = [normed() for _ in sizes]
    alone = copy.deepcopy(models)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in alone]
    pop = hf.Population(
        models,
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1, momentum=0.9),
        loss=squares,
        accumulate=accumulate,
        compile=False,
    )
    for step in range(4):
        xs, ys, weights = zip(
            *((torch.randn(n, 4, dtype=DOUBLE), values(n), torch.rand(n, dtype=DOUBLE)) for n in sizes), strict=True
        )
        losses = pop.step(hf.stacked(xs), hf.stacked(ys), weights=list(weights))
        for row, (x, y, w) in enumerate(zip(xs, ys, weights, strict=True)):
            if step % accumulate[row] == 0:
                optimizers[row].zero_grad()
            value = (squares(alone[row](x), y) * w).sum() / w.sum()
            (value / accumulate[row]).backward()
            if (step + 1) % accumulate[row] == 0:
                optimizers[row].step()
            assert_close(losses[row], value.detach())
    for model, alone_model in zip(pop.models, alone, strict=True):
        assert model is not None
        assert_close(model.state_dict(), alone_model.state_dict())


def test_a_removed_sample_spoils_nothing() -> None:
    torch.manual_seed(0)
    pop = hf.Population(
        [nn.Linear(4, 3).double() for _ in range(2)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=F.mse_loss,
        compile=False,
    )
    x, y = torch.randn(4, 4, dtype=DOUBLE), values(4)
    y[1] = torch.nan
    losses = pop.step(x, y, weights=torch.tensor([1.0, 0.0, 1.0, 1.0]))
    assert bool(losses.isfinite().all())
    assert not pop.frozen


REFUSED: dict[str, tuple[Callable[..., Any], Any, str]] = {
    "negative": (F.mse_loss, torch.tensor([1.0, -1.0]), "at least 0"),
    "infinite": (F.mse_loss, torch.tensor([1.0, torch.inf]), "finite"),
    "all removed": (F.mse_loss, torch.tensor([[1.0, 1.0], [0.0, 0.0]]), "member 1 are 0 for all"),
    "members": (F.mse_loss, torch.ones(3, 2), "3 rows for 2 members"),
    "dims": (F.mse_loss, torch.ones(2, 2, 1), r"\[2, 2, 1\]"),
    "samples": (F.mse_loss, torch.ones(3), "3 weights for losses of shape"),
    "one value": (lambda output, target: (output - target).square().mean(), torch.ones(2), "takes reduction="),
    "lengths": (nn.CTCLoss(), torch.ones(2), "ctc_loss"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    loss, weights, message = REFUSED[name]
    pop = hf.Population(
        [nn.Linear(4, 3).double() for _ in range(2)],
        optimizer=lambda p: hf.optim.SGD(p, lr=0.1),
        loss=loss,
        compile=False,
    )
    with pytest.raises(ValueError, match=message):
        pop.step(torch.randn(2, 4, dtype=DOUBLE), values(2), weights=weights)


class Named(nn.Linear):
    def forward(self, x: Tensor, weights: Any = None, rows: Any = None) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("options", [{"weights": torch.ones(2)}, {"rows": [0]}])
def test_a_forward_parameter_named_like_a_step_option_is_refused(options: dict[str, Any]) -> None:
    pop = hf.Population(
        [Named(4, 3) for _ in range(2)], optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.mse_loss, compile=False
    )
    with pytest.raises(ValueError, match=r"= is for step, and forward of Named has a parameter of that name"):
        pop.step(torch.randn(2, 4), torch.randn(2, 3), **options)


def test_weights_in_a_list() -> None:
    """They are numbers of the host, wherever the members are."""
    models = [nn.Linear(4, 3).double() for _ in range(2)]
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    for weights in ([1.0, 0.0, 2.0, 1.0, 0.5], [[1.0, 0.0, 2.0, 1.0, 0.5], [0.0, 1.0, 1.0, 1.0, 3.0]]):
        pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.0), loss=F.cross_entropy, compile=False)
        losses = pop.step(x, y, weights=weights)
        rows = torch.tensor(weights, dtype=torch.float64).expand(2, 5)
        for model, row, loss in zip(models, rows, losses, strict=True):
            expected = (F.cross_entropy(model(x), y, reduction="none") * row).sum() / row.sum()
            torch.testing.assert_close(loss, expected.detach())


def test_weights_of_many_sizes_stay_fused() -> None:
    """A loss that runs member by member is warned of, and warnings are errors here."""
    models = [nn.Linear(4, 3).double() for _ in range(3)]
    pop = hf.Population(models, optimizer=functools.partial(hf.optim.SGD, lr=0.0), loss=F.cross_entropy, compile=True)
    for count in (3, 8, 5, 6):
        x, y, weights = torch.randn(count, 4, dtype=DOUBLE), labels(count), torch.rand(3, count, dtype=DOUBLE)
        losses = pop.step(x, y, weights=weights)
        for model, loss, own_weights in zip(models, losses, weights, strict=True):
            sample_losses = F.cross_entropy(model(x), y, reduction="none")
            torch.testing.assert_close(loss, (sample_losses * own_weights).sum().detach() / own_weights.sum())


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pop: pickle.loads(pickle.dumps(pop))], ids=["copy", "pickle"])
@pytest.mark.parametrize("loss", [F.cross_entropy, nn.CrossEntropyLoss()], ids=["function", "module"])
@pytest.mark.parametrize("kinds", [1, 2])
@pytest.mark.parametrize("rows", [None, [1]])
def test_a_copy_of_a_population_with_weights_goes_on_as_it_would(
    rows: list[int] | None, kinds: int, loss: Any, copied: Callable[[Any], hf.Population]
) -> None:
    widths = [3, 3, 2 + kinds]
    models = [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)).double() for width in widths]
    pop = hf.Population(models, optimizer=functools.partial(hf.optim.SGD, lr=0.1), loss=loss, compile=False)
    x, y, weights = torch.randn(5, 4, dtype=DOUBLE), labels(5), torch.rand(5)
    pop.step(x, y, weights=weights, rows=rows)
    again = copied(pop)
    for step_weights in (weights, None):
        assert torch.equal(again.step(x, y, weights=step_weights), pop.step(x, y, weights=step_weights))
