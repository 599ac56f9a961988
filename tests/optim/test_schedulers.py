"""Torch's own schedulers drive the vectors of an array as they drive B optimizers."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as ls

import hfusion as hf
from hfusion import FusionError
from tests.optim.arrays import Array, Per, run, start
from tests.optim.schedules import ALL, MAKERS


def test_every_scheduler_of_torch_is_tried() -> None:
    kinds = {name for name, cls in vars(ls).items() if isinstance(cls, type) and issubclass(cls, ls.LRScheduler)}
    kinds = {name for name in kinds if not name.startswith("_")}
    assert kinds - {"LRScheduler", "ReduceLROnPlateau"} <= {name.partition("-")[0] for name in MAKERS}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_equals_alone(make: Callable[[Any], Any], members: int, name: str) -> None:
    array = Array(members, shapes=[(3,), (2, 2)])
    options: dict[str, Any] = {"lr": Per(0.1, 0.5)} | ({"momentum": 0.9} if name == "SGD" else {})
    fused, alone = start(name, options, array)
    schedulers = [make(optimizer) for optimizer in (fused, *alone)]
    for _ in range(8):
        run(array, fused, alone, 1)
        lr = fused.param_groups[0]["lr"]
        assert lr.dtype == torch.float64
        assert lr.tolist() == pytest.approx([float(o.param_groups[0]["lr"]) for o in alone], rel=1e-12)
        for scheduler in schedulers:
            scheduler.step()
    array.assert_equal()


def test_a_schedule_per_member() -> None:
    array = Array(2, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": 1.0}, array)

    def factors(epoch: int) -> Any:
        return torch.tensor([1.0, 0.5**epoch])

    scheduler = ls.LambdaLR(fused, factors)
    for _ in range(2):
        fused.step()
        scheduler.step()
    assert fused.param_groups[0]["lr"].tolist() == [1.0, 0.25]


def test_a_scheduler_resumes() -> None:
    array = Array(3, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": Per(0.1, 0.5)}, array)
    scheduler = ls.CosineAnnealingLR(fused, 10)
    rates = []
    for step in range(6):
        if step == 3:
            file = io.BytesIO()
            torch.save([fused.state_dict(), scheduler.state_dict()], file)
            file.seek(0)
            saved, schedule = torch.load(file, weights_only=True)
        fused.step()
        scheduler.step()
        rates.append(fused.param_groups[0]["lr"].tolist())
    again, _ = start("SGD", {"lr": 1.0}, array)
    resumed = ls.CosineAnnealingLR(again, 10)
    resumed.load_state_dict(schedule)
    again.load_state_dict(saved)
    for step in range(3, 6):
        again.step()
        resumed.step()
        assert again.param_groups[0]["lr"].tolist() == rates[step]


@pytest.mark.parametrize("rates", [torch.tensor([0.1, 0.3], dtype=torch.float64), [0.1, 0.3], 0.2], ids=type)
def test_members_go_on_with_a_schedule_at_an_epoch(rates: Any) -> None:
    """As torch's schedulers do where ``initial_lr`` is in the param groups."""
    array = Array(2, shapes=[(3,)])
    fused, alone = start("SGD", {"lr": Per(0.05, 0.5)}, array)
    fused.param_groups[0]["initial_lr"] = rates
    makes = [lambda o: ls.StepLR(o, 2, 0.5, last_epoch=3), lambda o: ls.ExponentialLR(o, 0.9, last_epoch=4)]
    schedulers = [hf.optim.lr_scheduler.PerMember(fused, makes)]
    for member, optimizer in enumerate(alone):
        optimizer.param_groups[0]["initial_lr"] = rates if isinstance(rates, float) else float(rates[member])
        schedulers.append(makes[member](optimizer))  # type: ignore[no-untyped-call]
    for _ in range(4):
        run(array, fused, alone, 1)
        for scheduler in schedulers:
            scheduler.step()
    array.assert_equal()
    expected = [optimizer.param_groups[0]["lr"] for optimizer in alone]
    assert fused.param_groups[0]["lr"].tolist() == pytest.approx(expected)
    assert schedulers[0].last_epochs.tolist() == [scheduler.last_epoch for scheduler in schedulers[1:]]


def test_an_epoch_without_a_first_rate_is_an_error_as_alone() -> None:
    array = Array(2, shapes=[(3,)])
    fused, (first, _) = start("SGD", {"lr": 0.1}, array)
    for optimizer in (fused, first):
        kind = hf.optim.lr_scheduler.PerMember if optimizer is fused else lambda o, make: make(o)
        with pytest.raises(KeyError, match="'initial_lr' is not specified"):
            kind(optimizer, lambda o: ls.StepLR(o, 2, last_epoch=3))  # type: ignore[operator]


def test_plateau_is_refused_in_words() -> None:
    array = Array(3, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": 0.1}, array)
    scheduler = ls.ReduceLROnPlateau(fused, patience=0)
    scheduler.step(1.0)
    with pytest.raises(FusionError, match=r"one value for each of 3 members, .*lr_scheduler.ReduceLROnPlateau"):
        scheduler.step(2.0)


METRICS = torch.rand(14, 3, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
METRICS[5, 1] = float("nan")

PLATEAUS: dict[str, dict[str, Any]] = {
    "defaults": {"patience": 1},
    "per member": {
        "mode": ["min", "max", "min"],
        "factor": [0.5, 0.1, 0.9],
        "patience": [0, 1, 2],
        "threshold": [1e-4, 0.1, 0.0],
        "threshold_mode": ["rel", "abs", "abs"],
        "cooldown": (0, 1, 2),
        "min_lr": torch.tensor([0.0, 1e-3, 1e-2]),
        "eps": [1e-8, 1e-3, 0.0],
    },
}


def alone(options: dict[str, Any], member: int) -> dict[str, Any]:
    values = {key: value.tolist() if isinstance(value, torch.Tensor) else value for key, value in options.items()}
    return {key: value[member] if isinstance(value, list | tuple) else value for key, value in values.items()}


@pytest.mark.parametrize("options", PLATEAUS.values(), ids=PLATEAUS)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_plateaus_equal_alone(options: dict[str, Any], name: str) -> None:
    array = Array(3, shapes=[(3,)])
    fused, optimizers = start(name, {"lr": Per(0.1, 0.5)}, array)
    scheduler = hf.optim.lr_scheduler.ReduceLROnPlateau(fused, **options)
    assert isinstance(scheduler, ls.ReduceLROnPlateau)
    references = [ls.ReduceLROnPlateau(o, **alone(options, member)) for member, o in enumerate(optimizers)]
    for epoch, metrics in enumerate(METRICS):
        run(array, fused, optimizers, 1)
        if epoch == 4:
            # Another hand at the learning rates, and another group.
            fused.param_groups[0]["lr"] = [0.3, 0.2, 0.1]
            for optimizer, lr in zip(optimizers, [0.3, 0.2, 0.1], strict=True):
                optimizer.param_groups[0]["lr"] = lr
        if epoch == 7:
            file = io.BytesIO()
            torch.save(scheduler.state_dict(), file)
            file.seek(0)
            scheduler = hf.optim.lr_scheduler.ReduceLROnPlateau(fused)
            scheduler.load_state_dict(torch.load(file, weights_only=True))
        scheduler.step(metrics if epoch % 2 else metrics.tolist())
        for reference, metric in zip(references, metrics, strict=True):
            reference.step(metric)
        assert fused.param_groups[0]["lr"].tolist() == [o.param_groups[0]["lr"] for o in optimizers]
        assert scheduler.get_last_lr()[0].tolist() == [reference.get_last_lr()[0] for reference in references]
        assert scheduler.in_cooldown.tolist() == [reference.in_cooldown for reference in references]
        assert scheduler.last_epoch == epoch + 1
    array.assert_equal()
    assert len(set(fused.param_groups[0]["lr"].tolist())) == 3


CYCLES: dict[str, dict[str, Any]] = {
    "rates": {"max_lr": [0.5, 0.1, 0.02], "total_steps": 12},
    "all": {
        "max_lr": (0.5, 0.1, 0.02),
        "total_steps": [12, 10, 14],
        "pct_start": [0.3, 0.4, 0.5],
        "anneal_strategy": ["cos", "linear", "cos"],
        "base_momentum": [0.8, 0.7, 0.6],
        "div_factor": torch.tensor([25.0, 10.0, 5.0]),
        "three_phase": [True, False, True],
    },
}


@pytest.mark.parametrize("options", CYCLES.values(), ids=CYCLES)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_one_cycle_for_each_member(options: dict[str, Any], name: str) -> None:
    array = Array(3, shapes=[(3,)])
    fused, optimizers = start(name, {"momentum": 0.9} if name == "SGD" else {}, array)
    scheduler = hf.optim.lr_scheduler.OneCycleLR(fused, **options)
    references = [ls.OneCycleLR(o, **alone(options, member)) for member, o in enumerate(optimizers)]
    for step in range(9):
        run(array, fused, optimizers, 1)
        if step == 4:
            saved = scheduler.state_dict()
            scheduler = hf.optim.lr_scheduler.OneCycleLR(fused, **options)
            scheduler.load_state_dict(saved)
        scheduler.step()
        for reference in references:
            reference.step()
        assert fused.param_groups[0]["lr"].tolist() == [o.param_groups[0]["lr"] for o in optimizers]
        assert scheduler.get_last_lr()[0].tolist() == [reference.get_last_lr()[0] for reference in references]
    array.assert_equal()


# Classes of torch with arguments of which torch takes one, or a list with one for each param group.
CLASSES: dict[str, tuple[Any, dict[str, Any]]] = {
    "OneCycleLR": (ls.OneCycleLR, {"max_lr": [0.5, 0.1, 0.02], "total_steps": 12}),
    "CyclicLR": (
        ls.CyclicLR,
        {"base_lr": [0.5, 0.1, 0.02], "max_lr": torch.tensor([0.6, 0.2, 0.1]), "cycle_momentum": False},
    ),
    "LambdaLR": (ls.LambdaLR, {"lr_lambda": [lambda epoch: 0.5, lambda epoch: 0.9**epoch, lambda epoch: 1.0]}),
    "MultiplicativeLR": (ls.MultiplicativeLR, {"lr_lambda": [lambda epoch: 0.5, lambda epoch: 0.9, lambda epoch: 1.0]}),
    "MultiStepLR": (ls.MultiStepLR, {"milestones": [[1, 3], [2], [4, 5]], "gamma": (0.1, 0.5, 0.9)}),
    "a function": (lambda o, size: ls.StepLR(o, size), {"size": [1, 2, 3]}),
}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_with_a_value_per_member(name: str, groups: int) -> None:
    kind, options = CLASSES[name]
    fused, optimizers = start("SGD", {"lr": Per(0.1, 0.5)}, array := Array(3, shapes=[(3,), (2,)]))
    if groups == 2:
        fused = hf.optim.SGD([{"params": [p]} for p in array.params], lr=[0.1, 0.05, 0.025])
        optimizers = [
            torch.optim.SGD([{"params": [p]} for p in ps], lr=0.1 * 0.5**m) for m, ps in enumerate(array.members)
        ]
    scheduler = hf.optim.lr_scheduler.PerMember(fused, kind, **options)
    references = [kind(o, **alone(options, member)) for member, o in enumerate(optimizers)]
    for _ in range(6):
        run(array, fused, optimizers, 1)
        scheduler.step()
        for reference in references:
            reference.step()
        for index, group in enumerate(fused.param_groups):
            assert group["lr"].tolist() == [float(o.param_groups[index]["lr"]) for o in optimizers]


LISTS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: ls.OneCycleLR(o, max_lr=[0.1, 0.2, 0.3], total_steps=9),
    "CyclicLR": lambda o: ls.CyclicLR(o, base_lr=[0.1, 0.2, 0.3], max_lr=0.5),
    "LambdaLR": lambda o: ls.LambdaLR(o, [lambda epoch: 1.0] * 3),
    "ReduceLROnPlateau": lambda o: ls.ReduceLROnPlateau(o, min_lr=[0.1, 0.2, 0.3]),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_list_in_the_function_of_one_member_is_refused_in_words(name: str) -> None:
    fused, _ = start("SGD", {"momentum": 0.9}, Array(3, shapes=[(3,)]))
    with pytest.raises(
        ValueError, match=r"scheduler of member 0 cannot be made: .*one function for each member, or the"
    ):
        hf.optim.lr_scheduler.PerMember(fused, LISTS[name])
    with pytest.raises(ValueError, match="options or a list of functions, not both: gamma"):
        hf.optim.lr_scheduler.PerMember(fused, [ls.ExponentialLR] * 3, gamma=0.5)


def test_a_list_that_torch_takes_whole_is_a_list_for_each_member() -> None:
    fused, _ = start("SGD", {}, Array(3, shapes=[(3,)]))
    with pytest.raises(ValueError, match="milestones is a list of lists"):
        hf.optim.lr_scheduler.PerMember(fused, ls.MultiStepLR, milestones=[1, 2, 3])
    scheduler = hf.optim.lr_scheduler.PerMember(fused, ls.MultiStepLR, milestones=[[1, 3], [2], [3]])
    fused.step()
    scheduler.step()
    first, *others = fused.param_groups[0]["lr"].tolist()
    assert [first / others[0], others[1] / others[0]] == pytest.approx([0.1, 1.0])


def test_torchs_one_cycle_takes_a_vector() -> None:
    array = Array(3, shapes=[(3,)])
    fused, optimizers = start("Adam", {}, array)
    scheduler = ls.OneCycleLR(fused, max_lr=torch.tensor([0.5, 0.1, 0.02], dtype=torch.float64), total_steps=12)
    references = [
        ls.OneCycleLR(o, max_lr, total_steps=12) for o, max_lr in zip(optimizers, [0.5, 0.1, 0.02], strict=True)
    ]
    for _ in range(9):
        run(array, fused, optimizers, 1)
        for current in (scheduler, *references):
            current.step()
        rates = [o.param_groups[0]["lr"] for o in optimizers]
        assert fused.param_groups[0]["lr"].tolist() == pytest.approx(rates, rel=1e-12)
    array.assert_equal()


def test_arguments_that_do_not_fit_are_refused() -> None:
    array = Array(3, shapes=[(3,)])
    fused, optimizers = start("Adam", {}, array)
    plateau = hf.optim.lr_scheduler.ReduceLROnPlateau
    with pytest.raises(ValueError, match="factor has 2 values for an array of 3 members"):
        plateau(fused, factor=[0.1, 0.2])
    with pytest.raises(TypeError, match=r"Adam is no optimizer of hf.optim: use torch's ReduceLROnPlateau"):
        plateau(optimizers[0])
    with pytest.raises(ValueError, match=r"metrics have shape \[\] for an array of 3 members"):
        plateau(fused).step(1.0)  # type: ignore[arg-type]
    other, _ = start("Adam", {}, Array(2, shapes=[(3,)]))
    with pytest.raises(FusionError, match="of 2 members does not fit one of 3"):
        plateau(fused).load_state_dict(plateau(other).state_dict())


def test_torch_takes_a_list_for_one_value_per_param_group() -> None:
    fused, _ = start("Adam", {}, Array(3, shapes=[(3,)]))
    with pytest.raises(ValueError, match="max_lr has 3 values, param_groups has 1"):
        ls.OneCycleLR(fused, max_lr=[0.1, 0.2, 0.3], total_steps=9)
    with pytest.raises(ValueError, match="Expected 1 lr_lambdas, but got 3"):
        ls.LambdaLR(fused, [lambda epoch: 1.0] * 3)


def test_readers_of_one_learning_rate() -> None:
    array = Array(2, shapes=[(3,)])
    fused, _ = start("SGD", {"lr": Per(0.1, 0.5)}, array)
    scheduler = ls.StepLR(fused, 2)
    lr, (last,) = fused.param_groups[0]["lr"], scheduler.get_last_lr()
    assert f"{lr:.3e} {last:.1f}" == "[1.000e-01, 5.000e-02] [0.1, 0.1]"
    assert "0.1000" in f"{lr}"
    for read in (float, lambda lr: lr.item(), lambda lr: "%.3e" % lr):  # noqa: UP031
        with pytest.raises(FusionError, match=r"one value for each of 2 members.*value\.tolist\(\)"):
            read(lr)
    single, _ = start("SGD", {"lr": 0.25}, Array(1, shapes=[(3,)]))
    lr = single.param_groups[0]["lr"]
    assert (f"{lr:.2f}", float(lr), lr.item(), "%.2f" % lr) == ("0.25", 0.25, 0.25, "0.25")  # noqa: UP031


class Living:
    """Members with an optimizer and a scheduler each, beside an array whose members come and go as they do."""

    def __init__(self, makes: list[Callable[[Any], Any]], kind: str) -> None:
        self.kind, self.makes = kind, makes
        self.options: dict[str, Any] = {"momentum": 0.9} if kind == "SGD" else {}
        self.fused = hf.build(lambda: torch.nn.Linear(2, 2).double(), seeds=range(len(makes)))
        rates = [0.1 * 0.7**member for member in range(len(makes))]
        self.opt = getattr(hf.optim, kind)(self.fused.parameters(), lr=rates, **self.options)
        self.schedule = hf.optim.lr_scheduler.PerMember(self.opt, makes)
        self.alone = [
            self.single(model, rate, make) for model, rate, make in zip(self.fused, rates, makes, strict=True)
        ]

    def single(self, model: torch.nn.Module, rate: float, make: Callable[[Any], Any]) -> list[Any]:
        model = copy.deepcopy(model)
        opt = getattr(torch.optim, self.kind)(model.parameters(), lr=rate, **self.options)
        return [model, opt, make(opt)]

    def run(self, steps: int) -> None:
        for _ in range(steps):
            metrics = torch.rand(len(self.alone), dtype=torch.float64)
            for param in self.fused.parameters():
                param.grad = torch.randn_like(param)
            for row, (model, opt, schedule) in enumerate(self.alone):
                for member_param, stack in zip(model.parameters(), self.fused.parameters(), strict=True):
                    member_param.grad = stack.grad[row].clone()  # type: ignore[index]
                opt.step()
                plateau = isinstance(schedule, ls.ReduceLROnPlateau)
                schedule.step(metrics[row].item()) if plateau else schedule.step()
            self.opt.step()
            self.schedule.step(metrics=metrics)
        rates = [float(opt.param_groups[0]["lr"]) for _, opt, _ in self.alone]
        assert self.opt.param_groups[0]["lr"].tolist() == pytest.approx(rates, rel=1e-12)
        for stack, *rows in zip(self.fused.parameters(), *(m.parameters() for m, _, _ in self.alone), strict=True):
            torch.testing.assert_close(stack.detach(), torch.stack(rows).detach(), rtol=1e-12, atol=1e-14)

    def keep(self, rows: list[int]) -> None:
        for part in (self.fused, self.opt, self.schedule):
            part.keep(rows)
        self.alone = [self.alone[row] for row in rows]

    def copy(self, src: int, dst: int) -> None:
        for part in (self.fused, self.opt, self.schedule):
            part.copy(src, dst)
        model, opt, schedule = self.alone[src]
        twin = self.single(model, 1.0, self.makes[0])
        twin[1].load_state_dict(copy.deepcopy(opt.state_dict()))
        groups = copy.deepcopy(twin[1].param_groups)
        twin[2].load_state_dict(copy.deepcopy(schedule.state_dict()))
        twin[1].param_groups[0].update({k: v for k, v in groups[0].items() if k != "params"})
        self.alone[dst] = twin

    def append(self, rate: float, make: Callable[[Any], Any]) -> None:
        model = torch.nn.Linear(2, 2).double()
        self.fused.append([model])
        self.opt.append(1, lr=rate)
        self.schedule.append(1, make)
        self.alone.append(self.single(model, rate, make))

    def restart(self, row: int, rate: float) -> None:
        model = torch.nn.Linear(2, 2).double()
        self.fused.put(row, model)
        self.opt.restart(row, lr=rate, **self.options)
        self.schedule.restart(row, self.makes[0])
        self.alone[row] = self.single(model, rate, self.makes[0])


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_members_that_join_late_begin_their_own_schedule(name: str, kind: str) -> None:
    torch.manual_seed(2)
    living = Living([ALL[name]] * 3, kind)
    living.run(3)
    living.append(0.05, ALL[name])
    living.run(2)
    living.copy(0, 1)
    living.run(2)
    living.restart(2, 0.2)
    living.keep([3, 2, 1])
    living.run(3)


def test_kinds_and_lengths_of_the_members_own() -> None:
    makes: list[Callable[[Any], Any]] = [
        lambda o: ls.LinearLR(o, 0.1, total_iters=2),
        lambda o: ls.LinearLR(o, 0.2, total_iters=5),
        lambda o: ls.CosineAnnealingLR(o, 7),
        lambda o: ls.SequentialLR(o, [ls.LinearLR(o, 0.1, total_iters=3), ls.ExponentialLR(o, 0.9)], [3]),
        lambda o: ls.ReduceLROnPlateau(o, patience=0),
    ]
    living = Living(makes, "Adam")
    living.run(4)
    living.append(0.3, makes[2])
    living.run(4)
    assert living.schedule.last_epochs.tolist() == [8, 8, 8, 8, 8, 4]
    state = copy.deepcopy(living.schedule.state_dict())
    again = hf.optim.lr_scheduler.PerMember(living.opt, [*makes, makes[2]])
    for rate, single in zip(living.opt.param_groups[0]["lr"], living.alone, strict=True):
        rate.copy_(torch.as_tensor(single[1].param_groups[0]["lr"], dtype=torch.float64))
    again.load_state_dict(state)
    living.schedule = again
    living.run(3)


def test_a_schedule_that_differs_must_be_given_to_who_joins() -> None:
    living = Living([lambda o: ls.ExponentialLR(o, 0.9), lambda o: ls.ExponentialLR(o, 0.8)], "SGD")
    living.fused.append([torch.nn.Linear(2, 2).double()])
    living.opt.append(lr=0.1)
    with pytest.raises(ValueError, match="the members' schedules differ"):
        living.schedule.append()
    with pytest.raises(ValueError, match="2 functions that make schedulers for 3 members"):
        hf.optim.lr_scheduler.PerMember(living.opt, living.makes)
    with pytest.raises(TypeError, match="scheduler of member 0 gave NoneType: let it give one of torch"):
        hf.optim.lr_scheduler.PerMember(living.opt, lambda o: None)
    with pytest.raises(ValueError, match="options or a list of functions, not both"):
        hf.optim.lr_scheduler.ReduceLROnPlateau(living.opt, living.makes, patience=2)
    plateau = hf.optim.lr_scheduler.PerMember(living.opt, lambda o: ls.ReduceLROnPlateau(o))
    with pytest.raises(ValueError, match="member 0 has a ReduceLROnPlateau: give step metrics"):
        plateau.step()
    with pytest.raises(ValueError, match="needs a function that makes the scheduler of one member"):
        hf.optim.lr_scheduler.PerMember(living.opt)
