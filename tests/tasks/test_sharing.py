"""Tasks that share arrays, members, models, loaders or random generators: some may, others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import hfusion as hf
from hfusion.core.errors import PlanError
from tests.trained import machine

DATA = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
LOADER = list(DataLoader(DATA, 4))


def sgd(params: list[nn.Parameter]) -> hf.optim.SGD:
    return hf.optim.SGD(params, lr=0.1)


def task(name: str, models: Any, **values: Any) -> hf.Task:
    return hf.Task(models, **({"loss": F.cross_entropy, "optimizer": sgd, "loader": LOADER} | values), name=name)


class Net(nn.Module):
    """A frozen base, which may be shared, and a trained head with a buffer."""

    def __init__(self, base: nn.Module | None = None) -> None:
        super().__init__()
        self.base = base or nn.Linear(3, 4).requires_grad_(False)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.base(x)))  # type: ignore[no-any-return]


def array() -> hf.FusedModule:
    return hf.fuse([Net(), Net()], verify=False)


def reached(other: Callable[[hf.FusedModule], Any]) -> list[hf.Task]:
    fused = array()
    return [task("first", fused), task("second", other(fused))]


class Tied(nn.Module):
    """Its weight is another model's."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.pad(x, (0, 1)), self.weight)


def averaging(fused: hf.FusedModule) -> nn.Module:
    norm = nn.BatchNorm1d(3)
    norm.running_mean = fused[0].norm.running_mean
    return norm


def persistent() -> list[hf.Task]:
    loader = DataLoader(DATA, 4, num_workers=1, persistent_workers=True)
    return [task("first", Net(), eval_loader=loader), task("second", Net(), loader=loader)]


def drawing(make: Callable[[torch.Generator], DataLoader[Any]]) -> list[hf.Task]:
    draw = torch.Generator()
    return [task("first", Net(), loader=make(draw)), task("second", Net(), loader=make(draw))]


def twice() -> list[hf.Task]:
    return [task("first", Net())] * 2


SHARE = "tasks 'first' and 'second' share memory: .* of the array that 'first' trains in place"
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an array": (lambda: reached(lambda fused: fused), f"{SHARE}.*Train both in one task"),
    "a member of an array": (lambda: reached(lambda fused: fused[0]), SHARE),
    "members of an array": (lambda: reached(lambda fused: [fused[1], Net()]), SHARE),
    "a part of a member": (lambda: reached(lambda fused: nn.Sequential(fused[0].base, fused[0].norm)), SHARE),
    "a buffer": (lambda: reached(averaging), "'running_mean' of 'second' is 'norm.running_mean' of the array"),
    "a tied weight": (
        lambda: reached(lambda fused: Tied(fused[0].head.weight)),
        "'weight' of 'second' is 'head.weight'",
    ),
    "a frozen view of a trained weight": (
        lambda: reached(lambda fused: Tied(nn.Parameter(fused[0].head.weight.detach(), requires_grad=False))),
        "'weight' of 'second' is 'head.weight' of the array",
    ),
    "the other way round": (lambda: reached(lambda fused: fused[0])[::-1], SHARE),
    "one task twice": (twice, "task 'first' is given twice"),
    "one name": (lambda: [task("first", Net()), task("first", Net())], "two tasks are named 'first'"),
    "no task": (list, "there is no task"),
    "models": (lambda: [Net()], "task 0 must be an hf.Task, got Net"),
    "a model": (Net, "task 0 must be an hf.Task, got Net"),
    "a number": (lambda: 3, "task 0 must be an hf.Task, got int"),
    "workers": (persistent, "'first' and 'second' read with the workers of one DataLoader: .*persistent_workers=False"),
    "a generator": (
        lambda: drawing(lambda draw: DataLoader(DATA, 4, shuffle=True, generator=draw)),
        r"'first' and 'second' draw from one torch.Generator: .*hf.Task\(seed=...\)",
    ),
    "a sampler's generator": (
        lambda: drawing(lambda draw: DataLoader(DATA, 4, sampler=RandomSampler(DATA, generator=draw))),
        "draw from one torch.Generator",
    ),
}


@pytest.mark.parametrize("call", [hf.plan, hf.train])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str, call: Callable[..., Any]) -> None:
    make, words = REFUSED[name]
    with pytest.raises(PlanError, match=words):
        call(make(), machine())


def test_a_run_within_another_trains_nothing_of_it() -> None:
    array, messages = hf.fuse([Net(), Net()], verify=False), list[str]()

    def nested(result: Any) -> None:
        for models in (array, [array, Net()]):
            with pytest.raises(
                PlanError, match="which trains it and has not ended: train one after the other"
            ) as error:
                hf.train(task("inner", models), machine())
            messages.append(str(error.value))
        hf.train(task("apart", array.unfuse()), machine())

    hf.train(task("outer", array), machine(), on_result=nested)
    assert len(messages) == 2 * len(LOADER)
    assert messages[0].startswith("task 'inner' shares 'norm.weight' with the task 'outer'")
    hf.train(task("inner", array), machine())


def alone(hf_task: hf.Task) -> tuple[Tensor, list[dict[str, Tensor]]]:
    report = hf.train(hf_task, machine())[hf_task.name]
    return report.losses, [model.state_dict() for model in report.models]


def one_list() -> list[hf.Task]:
    models = [Net(), Net()]
    return [task(name, models, optimizer=lambda p, lr=lr: hf.optim.SGD(p, lr=lr)) for name, lr in RATES]


RATES = (("first", 0.1), ("second", 0.5))


def one_base() -> list[hf.Task]:
    base = nn.Linear(3, 4).requires_grad_(False)
    arrays = [hf.fuse([Net(base), Net(base)], verify=False) for _ in RATES]
    return [task(name, fused) for (name, _), fused in zip(RATES, arrays, strict=True)]


def one_loader() -> list[hf.Task]:
    loader = DataLoader(DATA, 4, shuffle=True)
    return [task(name, Net(), loader=loader, seed=seed) for seed, (name, _) in enumerate(RATES)]


@pytest.mark.parametrize("make", [one_list, one_base, one_loader])
def test_what_may_be_shared(make: Callable[[], list[hf.Task]]) -> None:
    """Together as each alone, bit for bit."""
    tasks = make()
    expected = [alone(hf_task) for hf_task in copy.deepcopy(tasks)]
    report = hf.train(tasks, machine(2))
    for hf_task, (losses, states) in zip(tasks, expected, strict=True):
        assert torch.equal(report[hf_task.name].losses, losses)
        for model, state in zip(report[hf_task.name].models, states, strict=True):
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, state[name]), name


def test_one_task_or_any_iterable() -> None:
    def several() -> Iterator[hf.Task]:
        yield task("first", Net())
        yield task("second", Net())

    assert [task_plan.name for task_plan in hf.plan(task("only", Net()), machine()).tasks] == ["only"]
    assert list(hf.train(several(), machine())) == ["first", "second"]
