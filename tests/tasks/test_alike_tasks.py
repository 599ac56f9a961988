"""Tasks that read the same are planned once, and no others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from hfusion.tasks import alike_tasks
from hfusion.tasks.alike_tasks import AlikeTasks
from hfusion.tasks.arrange import First, arrays_of
from hfusion.tasks.array_plan import Room
from tests.trained import RATES

ROOM = Room(torch.device("cpu"), 1 << 30, RATES, keep=True)


def _models(width: int = 4, p: float = 0.1, members: int = 2) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(3, width), nn.Dropout(p), nn.Linear(width, 1)) for _ in range(members)]


def _task(name: str, **changes: Any) -> hf.Task:
    defaults: dict[str, Any] = {
        "models": _models(),
        "loss": F.mse_loss,
        "optimizer": lambda params: hf.optim.Adam(params, lr=[0.1, 0.2]),
        "loader": [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(3)],
    }
    return hf.Task(name=name, **{**defaults, **changes})


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the tasks that were planned themselves."""
    names: list[str] = []

    def planned(task: hf.Task, room: Room, first: First) -> Any:
        names.append(task.name)
        return arrays_of(task, room, first)

    monkeypatch.setattr(alike_tasks, "arrays_of", planned)
    return names


def test_tasks_that_read_the_same_are_planned_once(counted: list[str]) -> None:
    alike = AlikeTasks(ROOM)
    tasks = [_task(name) for name in ("first", "second", "third")]
    arrays_by_task = [alike.arrays(task) for task in tasks]
    assert counted == ["first"]
    for task, arrays in zip(tasks, arrays_by_task, strict=True):
        # As if it had been planned alone.
        ((members, cost),) = arrays
        (expected,) = arrays_of(task, ROOM)
        assert (members, cost.name, cost.task) == (expected.members, expected.plan.name, task)
        assert cost.seconds_on(ROOM) == expected.cost.seconds_on(ROOM)


def test_arrays_are_named_after_their_own_task(counted: list[str]) -> None:
    alike = AlikeTasks(ROOM)
    arrays_by_task = [
        alike.arrays(_task(name, models=[*_models(4), *_models(5)], optimizer=hf.optim.Adam)) for name in "ab"
    ]
    assert counted == ["a"]
    assert [[(members, cost.name) for members, cost in arrays] for arrays in arrays_by_task] == [
        [((0, 1), f"{name}.0"), ((2, 3), f"{name}.1")] for name in "ab"
    ]


def _shared() -> list[nn.Module]:
    frozen = nn.Linear(3, 3).requires_grad_(False)
    return [nn.Sequential(frozen, nn.Linear(3, 1)) for _ in range(2)]


def _unshared() -> list[nn.Module]:
    return [copy.deepcopy(model) for model in _shared()]


def _eval(models: list[nn.Module]) -> list[nn.Module]:
    for model in models:
        model[1].eval()  # type: ignore[index]
    return models


OTHERS: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[], dict[str, Any]]]] = {
    "width": (dict, lambda: {"models": _models(5)}),
    "members": (dict, lambda: {"models": _models(members=3), "optimizer": hf.optim.Adam}),
    "a number of forward": (dict, lambda: {"models": _models(p=0.2)}),
    "mode": (dict, lambda: {"models": _eval(_models())}),
    "dtype": (
        lambda: {"loader": [(torch.randn(8, 3), torch.randn(8, 1))]},
        lambda: {
            "models": [model.double() for model in _models()],
            "loader": [(torch.randn(8, 3).double(), torch.randn(8, 1).double())],
        },
    ),
    "frozen": (dict, lambda: {"models": _frozen()}),
    "sharing": (lambda: {"models": _shared()}, lambda: {"models": _unshared()}),
    "optimizer": (dict, lambda: {"optimizer": lambda params: hf.optim.SGD(params, lr=0.1)}),
    "a number of the optimizer": (lambda: {"optimizer": _momentum(0.0)}, lambda: {"optimizer": _momentum(0.5)}),
    "batch": (dict, lambda: {"loader": [(torch.randn(9, 3), torch.randn(9, 1)) for _ in range(3)]}),
    "epochs": (dict, lambda: {"epochs": 2}),
    "clip_norm": (dict, lambda: {"clip_norm": 1.0}),
    "evaluation": (dict, lambda: {"eval_loader": [(torch.randn(64, 3), torch.randn(64, 1))]}),
}


def _frozen() -> list[nn.Module]:
    models = _models()
    for model in models:
        model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return models


def _momentum(momentum: float) -> Callable[[Any], Any]:
    return lambda params: hf.optim.SGD(params, lr=0.1, momentum=momentum)


@pytest.mark.parametrize("difference", OTHERS)
def test_tasks_that_differ_are_planned_themselves(difference: str, counted: list[str]) -> None:
    alike, (first, second) = AlikeTasks(ROOM), OTHERS[difference]
    for name, changes in (("first", first()), ("second", second())):
        alike.arrays(_task(name, **changes))
    assert counted == ["first", "second"]


def test_an_array_that_exists_is_planned_itself(counted: list[str]) -> None:
    alike = AlikeTasks(ROOM)
    for name in ("first", "second"):
        alike.arrays(_task(name, models=hf.fuse(_models())))
    assert counted == ["first", "second"]


def test_models_that_cannot_be_fused_are_found_behind_alike_ones(counted: list[str]) -> None:
    alike = AlikeTasks(ROOM)
    alike.arrays(_task("first"))
    broken = _models()
    broken[1].register_full_backward_hook(lambda module, before, after: None)
    with pytest.raises(hf.FusionError, match="hook"):
        alike.arrays(_task("second", models=broken))


def test_a_loader_is_read_once_and_errors_name_the_task() -> None:
    class Counted:
        reads = 0

        def __len__(self) -> int:
            return 1

        def __iter__(self) -> Any:
            Counted.reads += 1
            return iter([(torch.randn(8, 3), torch.randn(8, 1))])

    AlikeTasks(ROOM).arrays(_task("first", loader=Counted()))
    assert Counted.reads == 1
    with pytest.raises(hf.PlanError) as raised:
        AlikeTasks(ROOM).arrays(_task("broken", loader=[torch.zeros(2, 3)]))
    assert raised.value.__notes__ == ["in the task 'broken'"]
