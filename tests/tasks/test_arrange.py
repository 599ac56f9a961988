"""Arranging tasks into arrays: which models are fused, how arrays are named, and which tasks are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.schedule.plan import Plan, TaskPlan
from hfusion.tasks.arrange import arrange
from tests.trained import EPOCHS, SEED, Way, machine, plain

PAIR = (torch.ones(2, 3), torch.tensor([0, 1]))


def linear(out: int = 2) -> nn.Module:
    return nn.Linear(3, out)


def task(name: str = "mine", **values: Any) -> hf.Task:
    defaults = {
        "models": [linear(), linear()],
        "loss": nn.functional.cross_entropy,
        "optimizer": lambda params: hf.optim.SGD(params, lr=0.1),
        "loader": [PAIR],
    }
    return hf.Task(**(defaults | {"name": name} | values))


class Lying:
    """Says that it has minibatches, and gives none."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(())


class Once(list[Any]):
    """Can be read once."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        raise AssertionError("read")


def tied() -> list[nn.Module]:
    """Two models with one trained weight."""
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    second.weight = first.weight
    return [first, second]


REFUSED: dict[str, tuple[list[dict[str, Any]], str]] = {
    "no task": ([], "there is no task: give at least one hf.Task"),
    "one name": ([{}, {}], "two tasks are named 'mine': give each its own name"),
    "read once": (
        [{"loader": Once([PAIR])}],
        "the loader of class Once can be read only once. Give one that can be read",
    ),
    "evaluated once": ([{"eval_loader": Once([PAIR])}], "the eval_loader of class Once can be read only once"),
    "nothing": ([{"loader": Lying()}], "'mine': the loader gives no minibatch, but its length is 3: give one whose"),
    "no pair": ([{"loader": [PAIR[0]]}], "'mine': a minibatch of the loader is Tensor; it must be a pair"),
    "three": ([{"loader": [(*PAIR, 1)]}], r"a minibatch of the loader is 3 values; .*pair \(inputs, target\), inputs"),
    "one norm for many": (
        [{"models": tied(), "clip_norm": 1.0}],
        "'mine' is clipped per member, but 'weight' is one trained tensor for all members.*: freeze it, or give each",
    ),
    "negative clip": (
        [{"clip_norm": [1.0, -1.0]}],
        r"'mine': clip_norm is \[1.0, -1.0\]: every value must be at least 0",
    ),
    "losses of samples": (
        [{"loss": lambda y, t: nn.functional.cross_entropy(y, t, reduction="none")}],
        r"'mine': the losses of 2 members have shape \[2, 2\]; the loss must reduce to one number per member",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_tasks_are_refused(case: str) -> None:
    values, words = REFUSED[case]
    with pytest.raises(PlanError, match=words):
        hf.train([task(**options) for options in values], machine())


def test_a_task_that_fits_in_no_way_names_the_smallest_budget() -> None:
    with pytest.raises(PlanError, match=r"smallest .*budget"):
        hf.plan([task()], machine(memory="64B"))


def other_plan(plan: Plan, **values: Any) -> Plan:
    return replace(plan, tasks=(replace(plan.tasks[0], **values),))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (
            {"name": "yours"},
            "the plan was made for task 'yours' with name 'yours', and task 'mine' of this call has 'mine':",
        ),
        ({"steps": 2, "epoch": 2}, "the plan was made for task 'mine' with"),
        ({"width": 1}, "the plan was made for task 'mine' with"),
        ({"accumulate": 2}, "the plan was made for task 'mine' with"),
        ({"clipped": True}, "the plan was made for task 'mine' with"),
        ({"evaluated": 2}, "task 'mine' with evaluated 2, and task 'mine' of this call has 0"),
    ],
)
def test_a_plan_of_other_tasks(values: dict[str, Any], words: str) -> None:
    hf_task = task()
    plan = hf.plan([hf_task], machine())
    with pytest.raises(PlanError, match=words):
        hf.train([hf_task], machine(), plan=other_plan(plan, **values))


def test_a_plan_of_more_tasks_or_other_devices() -> None:
    tasks = [task(), task("yours")]
    for planned, on in (([*tasks], machine()), (tasks[:1], machine(2))):
        with pytest.raises(PlanError, match="the plan given has other tasks or devices than those of this call"):
            hf.train(tasks[:1], machine(), plan=hf.plan(planned, on))


@pytest.mark.parametrize("call", [hf.plan, hf.train])
def test_other_types_for_machine_or_plan_are_refused(call: Callable[..., Any]) -> None:
    for value in (3, "cpu", hf.Device("cpu", memory="1GiB")):
        with pytest.raises(
            PlanError, match=rf"machine must be an hf.Machine, got {type(value).__name__}. Give hf.Machine.detect\(\)"
        ):
            call(task(), value)
    no_plan: Any = "plan"
    with pytest.raises(PlanError, match=r"plan must be what hf.plan returned, got str"):
        hf.train(task(), machine(), plan=no_plan)


def test_a_plan_of_another_program() -> None:
    deep = nn.Sequential(linear(), nn.Tanh(), nn.Linear(2, 2))
    for hf_task, other in ((task(), task(models=[deep] * 1)), (task(models=[deep]), task(models=[linear()]))):
        task_plan = replace(hf.plan([other], machine()).tasks[0], width=hf_task.members)
        plan = replace(hf.plan([hf_task], machine()), tasks=(task_plan,))
        with pytest.raises(
            PlanError, match=r"has \d operators, but the shards given are of one with \d operators; make a new plan"
        ):
            hf.train([hf_task], machine(), plan=plan)


def test_names_of_arrays() -> None:
    models = [linear(), linear(5), linear()]
    arrangements, plan = arrange([task(models=models), task("array", models=hf.fuse([linear()]))], machine())
    assert [arrangement.members for arrangement in arrangements] == [(0, 2), (1,), (0,)]
    assert [task_plan.name for task_plan in plan.tasks] == ["mine.0", "mine.1", "array"]
    assert all(task_plan.resident for task_plan in plan.tasks)


@pytest.mark.parametrize("with_generator", [False, True], ids=["torch's", "its own"])
@pytest.mark.parametrize("size", [4, 3], ids=["full", "ragged"])
def test_a_loader_that_shuffles_gives_what_it_gives_a_loop(with_generator: bool, size: int) -> None:
    """Also where the loader has a generator of its own, which every pass over it advances."""
    data = TensorDataset(torch.randn(12, 3), torch.randint(2, (12,)))

    def loader() -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(
            data, size, shuffle=True, generator=torch.Generator().manual_seed(3) if with_generator else None
        )

    array = hf.fuse([linear(), linear()])
    settings = Way(lambda params: hf.optim.SGD(params, lr=0.1))
    losses, after = plain(array, settings, loader())  # type: ignore[arg-type]
    hf_task = task(models=array, loader=loader(), epochs=EPOCHS, seed=SEED)
    assert torch.equal(hf.train([hf_task], machine())["mine"].losses, losses)
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, after[name])


@pytest.mark.parametrize("clip", [None, 1.0])
def test_less_memory_more_shards(clip: float | None) -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
    models = [nn.Sequential(*layers) for _ in range(2)]
    batch = (torch.ones(4, 16), torch.zeros(4, dtype=torch.int64))

    def planned(budget: int) -> TaskPlan:
        hf_task = task(models=models, loader=[batch], clip_norm=clip)
        return hf.plan([hf_task], machine(memory=f"{budget}B")).tasks[0]

    need = planned(1 << 40).device_bytes
    counts = []
    for part in (2, 3, 4, 6):
        task_plan = planned(need // part)
        assert task_plan.device_bytes <= need // part
        counts.append(len(task_plan.shards))
    assert counts == sorted(counts)
    smallest = next(budget for budget in range(need // 14, need, 256) if fits(planned, budget))
    alone = planned(smallest)
    assert alone.device_bytes <= smallest


def fits(planned: Callable[[int], object], budget: int) -> bool:
    try:
        planned(budget)
    except PlanError:
        return False
    return True
