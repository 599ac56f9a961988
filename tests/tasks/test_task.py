"""Tasks: refused arguments, which models belong together, and the optimizer of each array."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import hfusion as hf
from hfusion.core.errors import FusionError, PlanError
from hfusion.optim.hyper import MemberVector
from hfusion.tasks.task import optimizer_of, shapes
from tests.trained import machine

PAIR = (torch.ones(2, 3), torch.tensor([0, 1]))
RATES = [0.1, 0.2, 0.3, 0.4]


def linear(out: int = 2) -> nn.Module:
    return nn.Linear(3, out)


def sgd(params: list[nn.Parameter]) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=0.1)


def task(**values: Any) -> hf.Task:
    defaults = {"models": [linear()], "loss": nn.functional.cross_entropy, "optimizer": sgd, "loader": [PAIR]}
    return hf.Task(**(defaults | {"name": "mine"} | values))


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([torch.ones(1)])


def of_existing() -> hf.optim.SGD:
    return hf.optim.SGD(hf.fuse([linear()]).parameters(), lr=0.1)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "epochs": ({"epochs": 0}, "'mine' has epochs=0, accumulate=1: give whole numbers of at least 1"),
    "accumulate": ({"accumulate": 0}, "'mine' has epochs=1, accumulate=0: give whole numbers"),
    "half an epoch": ({"epochs": 1.5}, "'mine' has epochs=1.5, accumulate=1: give whole numbers"),
    "a word": ({"accumulate": "2"}, "'mine' has epochs=1, accumulate='2': give whole numbers"),
    "a seed": ({"seed": "x"}, "'mine': the seed is 'x': give a whole number of 64 bits, or None"),
    "a large seed": ({"seed": 1 << 70}, "give a whole number of 64 bits"),
    "a name": ({"name": 5}, "task 5: a name is one word"),
    "a name of two words": ({"name": "my task"}, "'my task': a name is one word without spaces"),
    "no name": ({"name": ""}, "'': a name is one word without spaces"),
    "no models": ({"models": []}, "'mine' has no models: give at least one"),
    "no model": ({"models": None}, "'mine': models must be one module, a list of them, or a fused array, got NoneType"),
    "classes": ({"models": [linear(), nn.Linear]}, "'mine': models must be .* got type"),
    "no loader": ({"loader": None}, "'mine': the loader of class NoneType has no length"),
    "one callback": ({"callbacks": print}, "'mine': callbacks is <built-in function print>; give a list of functions"),
    "a generator": (
        {"loader": (pair for pair in [PAIR])},
        "'mine': the loader of class generator has no length.*a list",
    ),
    "no length": (
        {"loader": DataLoader(Endless())},
        "'mine': the loader of class DataLoader has no length, .*give a DataLoader over a dataset with a length",
    ),
    "empty": ({"loader": []}, "'mine': the loader of class list gives no minibatch"),
    "empty evaluation": ({"eval_loader": []}, "'mine': the eval_loader of class list gives no minibatch"),
    "endless evaluation": (
        {"eval_loader": iter([PAIR])},
        "'mine': the eval_loader of class list_iterator has no length",
    ),
    "an optimizer of torch": (
        {"optimizer": torch.optim.SGD(linear().parameters(), lr=0.1)},
        "'mine': the optimizer is SGD; give one of hf.optim, or a function that makes one .*hf.optim.fuse takes over",
    ),
    "no optimizer": ({"optimizer": None}, "'mine': the optimizer is NoneType; give one of hf.optim"),
    "an optimizer of another array": (
        {"optimizer": of_existing()},
        "'mine': an optimizer that exists fits an array that exists; give a function that makes one .* or fuse",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_tasks_are_refused(case: str) -> None:
    values, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        task(**values)


def test_numbers_of_a_task() -> None:
    hf_task = task(models=[linear(), linear(5)], epochs=3, loader=[PAIR] * 4)
    assert (hf_task.members, hf_task.epoch, hf_task.steps) == (2, 4, 12)
    assert task(models=linear()).members == 1
    assert task(models=hf.fuse([linear(), linear()])).members == 2


def test_models_of_one_shape_belong_together() -> None:
    models = [linear(), linear(5), nn.Sequential(linear()), linear(), linear(5).double(), linear(5)]
    assert shapes(models) == [[0, 3], [1, 5], [2], [4]]


def test_models_that_differ_in_a_number_belong_together() -> None:
    assert shapes([nn.Dropout(0.1), nn.Dropout(0.2)]) == [[0, 1]]


def test_a_model_that_cannot_be_fused_is_named() -> None:
    with pytest.raises(FusionError, match="model 1"):
        shapes([linear(), nn.LazyLinear(3)])


def test_an_optimizer_of_all_members_is_the_tasks_own() -> None:
    models = [linear(), linear()]
    array = hf.fuse(models)
    existing = hf.optim.SGD(array.parameters(), lr=0.1)
    assert optimizer_of(task(models=array, optimizer=existing), array, range(2)) is existing
    optimizer = optimizer_of(task(models=models), array, range(2))
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in array.parameters()]


def test_a_task_that_trains_nothing_is_refused() -> None:
    array = hf.fuse([linear().requires_grad_(False)])
    with pytest.raises(PlanError, match="'mine' trains nothing: none of the 2 parameters of its optimizer requires"):
        optimizer_of(task(models=array), array, range(1))


def test_an_optimizer_of_some_members_has_their_numbers() -> None:
    models = [linear() for _ in range(4)]

    def make(params: list[nn.Parameter]) -> hf.optim.Adam:
        weight, bias = params
        groups = [{"params": [weight], "lr": RATES}, {"params": [bias], "weight_decay": RATES}]
        return hf.optim.Adam(groups, lr=0.5, betas=(RATES, 0.9))

    array = hf.fuse([models[3], models[1]])
    optimizer = optimizer_of(task(models=models, optimizer=make), array, (3, 1))
    first, second = optimizer.param_groups
    assert isinstance(optimizer, hf.optim.Adam)
    assert optimizer.members == 2
    assert isinstance(first["lr"], MemberVector)
    assert first["lr"].tolist() == [0.4, 0.2]
    assert first["weight_decay"].tolist() == [0.0, 0.0]
    assert second["lr"].tolist() == [0.5, 0.5]
    assert second["weight_decay"].tolist() == [0.4, 0.2]
    for group in (first, second):
        assert [vector.tolist() for vector in group["betas"]] == [[0.4, 0.2], [0.9, 0.9]]
    assert all(group["params"][0] is param for group, param in zip((first, second), array.parameters(), strict=True))


def torchs(params: list[nn.Parameter]) -> Any:
    return torch.optim.SGD(params, lr=0.1)


def foreign(params: list[nn.Parameter]) -> hf.optim.SGD:
    return of_existing()


def too_many(params: list[nn.Parameter]) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=[0.1, 0.2, 0.3])


@pytest.mark.parametrize(
    ("make", "kind", "words"),
    [
        (
            torchs,
            PlanError,
            "'mine': the function that makes its optimizer gave SGD; give one of hf.optim, or a function",
        ),
        (
            torch.optim.Adam,
            PlanError,
            "'mine': the function that makes its optimizer gave Adam; give one of hf.optim",
        ),
        (lambda params: None, PlanError, "'mine': the function that makes its optimizer gave NoneType; give one of"),
        (foreign, PlanError, "'mine': the optimizer has parameters that are not the array's"),
        (too_many, ValueError, "lr has 3 values for an array of 1 members"),
    ],
)
def test_an_optimizer_that_does_not_fit(make: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        hf.plan([task(optimizer=make)], machine())


def test_an_optimizer_that_does_not_fit_some_members() -> None:
    models = [linear(), linear(5)]
    with pytest.raises(PlanError, match="its optimizer gave SGD; give one of"):
        hf.plan([task(models=models, optimizer=torchs)], machine())
