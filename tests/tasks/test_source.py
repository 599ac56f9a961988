"""Minibatches: their forms, which of them have one recipe, and what a loader must keep to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.array.per_model import PerModel
from hfusion.core.errors import PlanError
from hfusion.runtime.recipe import Recipe
from hfusion.tasks.arrange import arrange
from hfusion.tasks.minibatch import Minibatch, samples
from hfusion.tasks.source import Stream
from tests.trained import machine

X, Y = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 1, 0])


class Model(nn.Module):
    """A dim of its input that does not vary decides which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        if x.shape[1] > 3:
            x = x[:, :3].sin()
        return self.linear(x) * scale


def task(loader: Any = ((X, Y),), members: int = 2, **values: Any) -> hf.Task:
    torch.manual_seed(0)
    return hf.Task(
        [Model() for _ in range(members)],
        values.pop("loss", nn.functional.cross_entropy),
        lambda params: hf.optim.SGD(params, lr=0.1),
        loader,
        name="mine",
        **values,
    )


def rows(tensor: Tensor, count: int = 3) -> Any:
    return hf.stacked([tensor + k for k in range(count)])


FORMS: dict[str, tuple[Any, int, list[Any]]] = {
    "tensor": (X, 4, [X]),
    "tuple": ((X, 2.0), 4, [X, 2.0]),
    "list": ([X, 2.0], 4, [X, 2.0]),
    "dict": ({"x": X, "scale": 2.0}, 4, [X, 2.0]),
    "numbers first": ((2.0, X), 4, [2.0, X]),
    "no dim": (torch.tensor(3.0), 1, [torch.tensor(3.0)]),
}


@pytest.mark.parametrize("pair", [tuple, list])
@pytest.mark.parametrize("form", FORMS)
def test_forms_of_a_minibatch(form: str, pair: Any) -> None:
    inputs, count, values = FORMS[form]
    minibatch = Minibatch.of(task(), pair((inputs, Y)), range(2))
    assert samples(minibatch.shapes) == count
    assert minibatch.target is Y
    assert len(minibatch.arguments.values) == len(values)
    for value, expected in zip(minibatch.arguments.values, values, strict=True):
        assert value is expected or value == expected


def test_some_members_get_their_own_rows() -> None:
    minibatch = Minibatch.of(task(members=3), ((rows(X), X), {"a": rows(Y), "b": Y}), (2, 0))
    member_rows, all_ = minibatch.arguments.values
    assert torch.equal(member_rows, torch.stack([X + 2, X]))
    assert all_ is X
    assert torch.equal(minibatch.target["a"].tensor, torch.stack([Y + 2, Y]))
    assert minibatch.target["b"] is Y
    assert samples(minibatch.shapes) == 4


@pytest.mark.parametrize(
    ("minibatch", "form"),
    [(X, "Tensor"), (None, "NoneType"), ((X,), "1 values"), ([X, Y, Y], "3 values"), ({"x": X, "y": Y}, "dict")],
)
def test_invalid_minibatches_are_refused(minibatch: Any, form: str) -> None:
    words = rf"task 'mine': a minibatch of the loader is {form}; it must be a pair \(inputs, target\), inputs a tensor"
    with pytest.raises(PlanError, match=words):
        Minibatch.of(task(), minibatch, range(2))


def stream(hf_task: hf.Task) -> tuple[Stream, Recipe]:
    """The stream of a task's only array, and the recipe of its first minibatch."""
    (arrangement,), plan = arrange([hf_task], machine())
    return arrangement.trained(plan.tasks[0], PerModel(hf_task.loss), [torch.device("cpu")])


LATER: dict[str, tuple[Any, str]] = {
    "operators": (
        (torch.ones(4, 5), Y),
        r"a minibatch of another kind than the first needs another program, whose operators differ \(\d+ instead of",
    ),
    "larger": ((torch.ones(5, 3), Y), "a minibatch has 5 samples, but the plan counts with 4, those of the first"),
    "form": (X, "a minibatch of the loader is Tensor"),
}


@pytest.mark.parametrize("kind", LATER)
def test_a_later_minibatch_of_an_unplanned_kind_is_refused(kind: str) -> None:
    pair, words = LATER[kind]
    source, _ = stream(task(DataLoader([(X, Y), pair], batch_size=None)))
    source.next()
    with pytest.raises(PlanError, match=f"task 'mine': {words}"):
        source.make(source.next())


@pytest.mark.parametrize(
    ("loss", "description"),
    [
        (lambda y, t: nn.functional.cross_entropy(y, t, reduction="none"), r"shape \[2, 4\]"),
        (lambda y, t: (y.mean(), t), "tuple"),
    ],
)
def test_a_loss_is_one_number_per_member(loss: Any, description: str) -> None:
    words = f"task 'mine': the losses of 2 members have {description}; the loss must reduce to one number per member"
    with pytest.raises(PlanError, match=words):
        stream(task(loss=loss))


class Counted:
    """A loader that says it has three minibatches; epoch by epoch it gives as many as ``gives`` says."""

    def __init__(self, *gives: int) -> None:
        self.gives = [3, *gives]
        self.epoch = 0

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        count, self.epoch = self.gives[self.epoch], self.epoch + 1
        return ((X + k, Y) for k in range(count))


def read(gives: list[int]) -> tuple[list[Tensor], str]:
    """Return the inputs that a loader gives until it ends or fails, and the error message."""
    loader = Counted(*gives)
    source, _ = stream(task(loader, epochs=len(gives)))
    loader.epoch = 1
    inputs: list[Tensor] = []
    for _ in range(3 * len(gives)):
        try:
            inputs.append(source.next().inputs[0])
        except PlanError as error:
            return inputs, str(error)
    return inputs, ""


@pytest.mark.parametrize(
    ("gives", "count", "words"),
    [
        ([3, 3], 6, ""),
        ([2, 3], 2, "task 'mine': the loader gave 2 minibatches in epoch 0, but its length is 3: give one whose"),
        ([3, 0], 3, "task 'mine': the loader gave 0 minibatches in epoch 1, but its length is 3"),
        ([4, 3], 3, "task 'mine': the loader gave more minibatches in epoch 0, but its length is 3"),
    ],
)
def test_every_epoch_is_as_long_as_the_loader_says(gives: list[int], count: int, words: str) -> None:
    inputs, message = read(gives)
    assert [int(x[0, 0]) for x in inputs] == [0, 1, 2, 0, 1, 2][:count]
    assert message.startswith(words)
    assert bool(message) is bool(words)
