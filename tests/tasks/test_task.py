"""Tasks: what is refused, how they are arranged into arrays, and what several of them may share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

import hfusion as hf
from hfusion.core.errors import FusionError, PlanError
from hfusion.optim.hyper import MemberVector
from hfusion.schedule.plan import Plan, TaskPlan
from hfusion.tasks.arrange import arrange
from hfusion.tasks.task import optimizer_of, shapes
from tests.trained import machine

# Tasks: refused arguments, which models belong together, and the optimizer of each array.
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


# Arranging tasks into arrays: which models are fused, how arrays are named, and which tasks are refused.
def arrange_task(name: str = "mine", **values: Any) -> hf.Task:
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


REFUSED_ARRANGE: dict[str, tuple[list[dict[str, Any]], str]] = {
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


@pytest.mark.parametrize("case", REFUSED_ARRANGE)
def test_tasks_that_cannot_be_arranged_are_refused(case: str) -> None:
    values, words = REFUSED_ARRANGE[case]
    with pytest.raises(PlanError, match=words):
        hf.train([arrange_task(**options) for options in values], machine())


def test_a_task_that_fits_in_no_way_names_the_smallest_budget() -> None:
    with pytest.raises(PlanError, match=r"smallest .*budget"):
        hf.plan([arrange_task()], machine(memory="64B"))


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
    hf_task = arrange_task()
    plan = hf.plan([hf_task], machine())
    with pytest.raises(PlanError, match=words):
        hf.train([hf_task], machine(), plan=other_plan(plan, **values))


def test_a_plan_of_more_tasks_or_other_devices() -> None:
    tasks = [arrange_task(), arrange_task("yours")]
    for planned, on in (([*tasks], machine()), (tasks[:1], machine(2))):
        with pytest.raises(PlanError, match="the plan given has other tasks or devices than those of this call"):
            hf.train(tasks[:1], machine(), plan=hf.plan(planned, on))


@pytest.mark.parametrize("call", [hf.plan, hf.train])
def test_other_types_for_machine_or_plan_are_refused(call: Callable[..., Any]) -> None:
    for value in (3, "cpu", hf.Device("cpu", memory="1GiB")):
        with pytest.raises(
            PlanError, match=rf"machine must be an hf.Machine, got {type(value).__name__}. Give hf.Machine.detect\(\)"
        ):
            call(arrange_task(), value)
    no_plan: Any = "plan"
    with pytest.raises(PlanError, match=r"plan must be what hf.plan returned, got str"):
        hf.train(arrange_task(), machine(), plan=no_plan)


def test_a_plan_of_another_program() -> None:
    deep = nn.Sequential(linear(), nn.Tanh(), nn.Linear(2, 2))
    for hf_task, other in (
        (arrange_task(), arrange_task(models=[deep] * 1)),
        (arrange_task(models=[deep]), arrange_task(models=[linear()])),
    ):
        task_plan = replace(hf.plan([other], machine()).tasks[0], width=hf_task.members)
        plan = replace(hf.plan([hf_task], machine()), tasks=(task_plan,))
        with pytest.raises(
            PlanError, match=r"has \d operators, but the shards given are of one with \d operators; make a new plan"
        ):
            hf.train([hf_task], machine(), plan=plan)


def test_names_of_arrays() -> None:
    models = [linear(), linear(5), linear()]
    arrangements, plan = arrange(
        [arrange_task(models=models), arrange_task("array", models=hf.fuse([linear()]))], machine()
    )
    assert [arrangement.members for arrangement in arrangements] == [(0, 2), (1,), (0,)]
    assert [task_plan.name for task_plan in plan.tasks] == ["mine.0", "mine.1", "array"]
    assert all(task_plan.resident for task_plan in plan.tasks)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_less_memory_more_shards(clip: float | None) -> None:
    layers = [layer for _ in range(12) for layer in (nn.Linear(16, 16), nn.ReLU())]
    models = [nn.Sequential(*layers) for _ in range(2)]
    batch = (torch.ones(4, 16), torch.zeros(4, dtype=torch.int64))

    def planned(budget: int) -> TaskPlan:
        hf_task = arrange_task(models=models, loader=[batch], clip_norm=clip)
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


# Tasks that share arrays, members, models, loaders or random generators: some may, others are refused.
DATA = TensorDataset(torch.randn(8, 3), torch.randint(2, (8,)))
LOADER = list(DataLoader(DATA, 4))


def sharing_task(name: str, models: Any, **values: Any) -> hf.Task:
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
    return [sharing_task("first", fused), sharing_task("second", other(fused))]


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
    return [sharing_task("first", Net(), eval_loader=loader), sharing_task("second", Net(), loader=loader)]


def drawing(make: Callable[[torch.Generator], DataLoader[Any]]) -> list[hf.Task]:
    draw = torch.Generator()
    return [sharing_task("first", Net(), loader=make(draw)), sharing_task("second", Net(), loader=make(draw))]


def twice() -> list[hf.Task]:
    return [sharing_task("first", Net())] * 2


SHARE = "tasks 'first' and 'second' share memory: .* of the array that 'first' trains in place"
REFUSED_SHARING: dict[str, tuple[Callable[[], Any], str]] = {
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
    "one name": (lambda: [sharing_task("first", Net()), sharing_task("first", Net())], "two tasks are named 'first'"),
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
@pytest.mark.parametrize("name", REFUSED_SHARING)
def test_what_is_refused(name: str, call: Callable[..., Any]) -> None:
    make, words = REFUSED_SHARING[name]
    with pytest.raises(PlanError, match=words):
        call(make(), machine())


def test_a_run_within_another_trains_nothing_of_it() -> None:
    array, messages = hf.fuse([Net(), Net()], verify=False), list[str]()

    def nested(result: Any) -> None:
        for models in (array, [array, Net()]):
            with pytest.raises(
                PlanError, match="which trains it and has not ended: train one after the other"
            ) as error:
                hf.train(sharing_task("inner", models), machine())
            messages.append(str(error.value))
        hf.train(sharing_task("apart", array.unfuse()), machine())

    hf.train(sharing_task("outer", array), machine(), on_result=nested)
    assert len(messages) == 2 * len(LOADER)
    assert messages[0].startswith("task 'inner' shares 'norm.weight' with the task 'outer'")
    hf.train(sharing_task("inner", array), machine())


def alone(hf_task: hf.Task) -> tuple[Tensor, list[dict[str, Tensor]]]:
    report = hf.train(hf_task, machine())[hf_task.name]
    return report.losses, [model.state_dict() for model in report.models]


def one_list() -> list[hf.Task]:
    models = [Net(), Net()]
    return [sharing_task(name, models, optimizer=lambda p, lr=lr: hf.optim.SGD(p, lr=lr)) for name, lr in RATES_SHARING]


RATES_SHARING = (("first", 0.1), ("second", 0.5))


def one_base() -> list[hf.Task]:
    base = nn.Linear(3, 4).requires_grad_(False)
    arrays = [hf.fuse([Net(base), Net(base)], verify=False) for _ in RATES_SHARING]
    return [sharing_task(name, fused) for (name, _), fused in zip(RATES_SHARING, arrays, strict=True)]


def one_loader() -> list[hf.Task]:
    loader = DataLoader(DATA, 4, shuffle=True)
    return [sharing_task(name, Net(), loader=loader, seed=seed) for seed, (name, _) in enumerate(RATES_SHARING)]


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
        yield sharing_task("first", Net())
        yield sharing_task("second", Net())

    assert [task_plan.name for task_plan in hf.plan(sharing_task("only", Net()), machine()).tasks] == ["only"]
    assert list(hf.train(several(), machine())) == ["first", "second"]
