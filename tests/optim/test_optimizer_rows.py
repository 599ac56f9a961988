"""Members that leave, join, are copied and restart equal torch.optim run alone, for every optimizer and option."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion import optim
from hfusion.optim import native_kernels
from tests.optim.arrays import Array, Per, for_member

LR = Per(0.1, 0.7)
DECAY = Per(0.1, 0.5)
BETAS = (Per(0.9, 0.9), Per(0.99, 0.95))
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"lr": LR}),
    "sgd-momentum": ("SGD", {"lr": LR, "momentum": Per(0.9, 0.9), "dampening": Per(0.3, 0.5), "weight_decay": DECAY}),
    "sgd-nesterov": ("SGD", {"lr": LR, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "adam": ("Adam", {"lr": LR, "betas": BETAS, "weight_decay": DECAY}),
    "adam-amsgrad": ("Adam", {"lr": LR, "amsgrad": True, "maximize": True}),
    "adamw": ("AdamW", {"lr": LR, "weight_decay": DECAY, "amsgrad": True}),
    "adadelta": ("Adadelta", {"lr": LR, "rho": Per(0.9, 0.9), "weight_decay": DECAY, "maximize": True}),
    "adagrad": ("Adagrad", {"lr": LR, "lr_decay": DECAY, "initial_accumulator_value": Per(0.3, 0.5)}),
    "adagrad-decay": ("Adagrad", {"lr": LR, "weight_decay": DECAY, "maximize": True}),
    "adamax": ("Adamax", {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "maximize": True}),
    "nadam": ("NAdam", {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "momentum_decay": Per(4e-3, 2.0)}),
    "nadam-decoupled": ("NAdam", {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True, "maximize": True}),
    "radam": ("RAdam", {"lr": LR, "betas": BETAS, "weight_decay": DECAY}),
    "radam-decoupled": ("RAdam", {"lr": LR, "weight_decay": DECAY, "decoupled_weight_decay": True, "maximize": True}),
    "rmsprop": ("RMSprop", {"lr": LR, "alpha": Per(0.99, 0.9), "weight_decay": DECAY}),
    "rmsprop-all": ("RMSprop", {"lr": LR, "momentum": Per(0.9, 0.8), "centered": True, "maximize": True}),
    "lion": ("Lion", {"lr": LR, "betas": BETAS, "weight_decay": DECAY}),
    "muon": ("Muon", {"lr": LR, "momentum": Per(0.95, 0.9), "weight_decay": DECAY}),
    "muon-plain": ("Muon", {"lr": LR, "nesterov": False}),
}
SHAPES = {"a": (4, 3), "b": (), "c": (5,), "d": (2, 1, 3)}
# What Muon takes.
MATRICES = {"a": (4, 3), "b": (3, 3), "c": (2, 5)}


def test_every_optimizer_is_tried() -> None:
    named = (getattr(optim, name) for name in optim.__all__ if name != "FusedOptimizer")
    kinds = {kind.__name__ for kind in named if isinstance(kind, type) and issubclass(kind, optim.FusedOptimizer)}
    assert kinds == {name for name, _ in CASES.values()}


class Parts(nn.Module):
    def __init__(self, shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, dtype=dtype)))


class Alone:
    """One member with its own optimizer."""

    def __init__(self, kind: str, options: dict[str, Any], model: nn.Module, number: int) -> None:
        self.model, self.number = copy.deepcopy(model), number
        member_options = for_member(options, number)
        if hasattr(torch.optim, kind) and kind != "Muon":
            self.optimizer = getattr(torch.optim, kind)(self.model.parameters(), **member_options)
        else:
            # Torch has none, or rounds products of one matrix otherwise than of several: an array of one.
            self.model = hf.fuse([self.model])
            self.optimizer = getattr(optim, kind)(self.model.parameters(), **member_options)

    def step(self, grads: Sequence[Tensor]) -> None:
        for param, grad in zip(self.model.parameters(), grads, strict=True):
            param.grad = grad.clone().view_as(param)
        self.optimizer.step()


class Run:
    """An array and the members alone, on the same gradients."""

    def __init__(self, kind: str, options: dict[str, Any], members: int, dtype: torch.dtype = torch.float64) -> None:
        self.kind, self.options, self.dtype = kind, options, dtype
        self.shapes = MATRICES if kind == "Muon" else SHAPES
        models = [Parts(self.shapes, self.dtype) for _ in range(members)]
        self.fused = hf.fuse(models)
        self.alone = [Alone(kind, options, model, number) for number, model in enumerate(models)]
        self.optimizer = getattr(optim, kind)(self.fused.parameters(), **self.hypers(range(members)))

    def hypers(self, numbers: Sequence[int]) -> dict[str, Any]:
        rows = [for_member(self.options, number) for number in numbers]
        hypers: dict[str, Any] = {}
        for key, value in self.options.items():
            if isinstance(value, tuple):
                hypers[key] = tuple([row[key][index] for row in rows] for index in range(2))
            else:
                hypers[key] = [row[key] for row in rows] if isinstance(value, Per) else value
        return hypers

    def joining(self, numbers: Sequence[int]) -> dict[str, Any]:
        keys = {hyper.key for hyper in self.optimizer.hypers}
        return {key: value for key, value in self.hypers(numbers).items() if key in keys}

    def steps(self, count: int) -> None:
        for _ in range(count):
            for param in self.fused.parameters():
                param.grad = torch.randn_like(param)
            for row, single in enumerate(self.alone):
                single.step([param.grad[row] for param in self.fused.parameters()])  # type: ignore[index]
            self.optimizer.step()
        for index, stack in enumerate(self.fused.parameters()):
            rows = [list(single.model.parameters())[index].detach().view(stack.shape[1:]) for single in self.alone]
            torch.testing.assert_close(stack.detach(), torch.stack(rows), rtol=1e-12, atol=1e-14)

    def keep(self, rows: Sequence[int]) -> None:
        self.fused.keep(rows)
        self.optimizer.keep(rows)
        self.alone = [self.alone[row] for row in rows]

    def copy(self, src: Sequence[int], dst: Sequence[int]) -> None:
        self.fused.copy(src, dst)
        self.optimizer.copy(src, dst)
        before = copy.deepcopy(self.alone)
        for source, target in zip(src, dst, strict=True):
            self.alone[target] = copy.deepcopy(before[source])

    def append(self, numbers: Sequence[int]) -> None:
        models = [Parts(self.shapes, self.dtype) for _ in numbers]
        self.fused.append(models)
        self.optimizer.append(len(models), **self.joining(numbers))
        self.alone += [Alone(self.kind, self.options, m, n) for m, n in zip(models, numbers, strict=True)]

    def restart(self, rows: Sequence[int], numbers: Sequence[int]) -> None:
        models = [Parts(self.shapes, self.dtype) for _ in numbers]
        self.fused.put(rows, models)
        self.optimizer.restart(rows, **self.joining(numbers))
        for row, model, number in zip(rows, models, numbers, strict=True):
            self.alone[row] = Alone(self.kind, self.options, model, number)


@pytest.mark.parametrize(("kind", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("form", ["native", "formula"])
def test_members_that_come_and_go_equal_torch(
    kind: str, options: dict[str, Any], form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", "1" if form == "native" else "0")
    if form == "native" and isinstance(reason := native_kernels.library(), str):
        pytest.skip(reason)
    torch.manual_seed(1)
    run = Run(kind, options, 4)
    run.steps(3)
    run.copy([0, 1], [1, 3])
    run.steps(2)
    run.keep([3, 0, 2])
    run.steps(3)
    run.append([1, 4])
    run.steps(2)
    run.restart([2, 0], [5, 3])
    run.steps(3)
    run.keep([4])
    run.steps(2)
    run.append([0])
    run.steps(2)


def test_states_of_complex_members_begin_as_those_of_torch() -> None:
    run = Run(*CASES["adagrad"], 3, torch.complex128)
    run.steps(2)
    run.append([4])
    run.restart([1], [5])
    run.steps(2)


def test_before_the_first_step() -> None:
    run = Run("Adam", {"lr": LR}, 3)
    run.keep([2, 1])
    run.append([5])
    run.copy([2], [0])
    run.restart([1], [0])
    run.steps(2)


def test_hyper_parameters_that_are_the_same_for_all_need_not_be_given_again() -> None:
    run = Run("AdamW", {"lr": 0.1, "weight_decay": DECAY}, 2)
    group = run.optimizer.param_groups[0]
    group["lr"].mul_(torch.tensor([0.5, 0.5]))
    with pytest.raises(ValueError, match="weight_decay differs between the members: say what it is for those that"):
        run.optimizer.append()
    assert len(group["lr"]) == 2
    run.optimizer.append(2, weight_decay=0.3)
    assert group["lr"].tolist() == [0.05, 0.05, 0.1, 0.1]
    assert group["weight_decay"].tolist() == [0.1, 0.05, 0.3, 0.3]


def test_a_copy_of_an_optimizer_lets_members_join_as_it_would() -> None:
    run = Run("Adam", {"lr": 0.1}, 2)
    other = pickle.loads(pickle.dumps(run.optimizer))
    other.append(1)
    assert other.param_groups[0]["lr"].tolist() == [0.1, 0.1, 0.1]


def test_a_hold_within_another_adds_to_it() -> None:
    array = Array(3, shapes=[(2,)])
    opt, before = optim.SGD(array.params, lr=0.1), array.params[0].detach().clone()
    array.draw_grads()
    with opt.holding(torch.tensor([True, False, False])):
        with opt.holding(torch.tensor([False, True, False])):
            assert opt.held_members == [0, 1]
            opt.step()
        assert opt.held_members == [0]
    assert opt.held_members == []
    assert (array.params[0].detach() != before).any(1).tolist() == [False, False, True]


def test_shared_parameters_keep_their_state() -> None:
    base = nn.Linear(3, 3).double()
    models = [nn.Sequential(base, nn.Linear(3, 2).double()) for _ in range(3)]
    fused = hf.fuse(models)
    opt = optim.Adam(fused.parameters(), lr=0.1)

    def step() -> None:
        opt.zero_grad()
        fused(torch.ones(2, 3, dtype=torch.float64)).square().sum().backward()
        opt.step()

    step()
    shared = fused.get_parameter("0.weight")
    before = opt.state[shared]["exp_avg"].clone()
    fused.keep([1])
    opt.keep([1])
    assert torch.equal(opt.state[shared]["exp_avg"], before)
    assert opt.state[fused.get_parameter("1.weight")]["exp_avg"].shape == (1, 2, 3)
    step()


WRONG: dict[str, tuple[Any, str]] = {
    "rows": (lambda o: o.keep([4]), "4 is no row of an array of 3 members"),
    "none": (lambda o: o.append(0), r"append\(\) needs at least one member, got 0"),
    "key": (
        lambda o: o.restart(0, rate=1.0),
        "rate is no hyper-parameter of Adam; it has lr, betas, eps, ",
    ),
    "range": (lambda o: o.restart([0, 1], lr=[0.1, -1.0]), r"lr of member 1 is -1.0"),
    "count": (lambda o: o.append(2, lr=[0.1, 0.2, 0.3]), "lr has 3 values for an array of 2 members"),
    "pair": (lambda o: o.restart(0, betas=0.9), "betas=0.9 is not a pair"),
    "forgotten": (lambda o: o.step(), "lr has 3 values for an array of 2 members"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_change_nothing(name: str) -> None:
    run = Run("Adam", {"lr": LR}, 3)
    run.steps(1)
    if name == "forgotten":
        run.fused.keep([0, 1])
    before = copy.deepcopy(run.optimizer.state_dict())
    act, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        act(run.optimizer)
    after = run.optimizer.state_dict()
    assert str(before) == str(after)
