"""Tasks: what is refused, how they are arranged into arrays, and what several of them may share."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.optim.hyper import MemberVector
from hfusion.tasks.task import optimizer_of
from tests.trained import machine, planned

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


def persistent() -> list[hf.Task]:
    loader = DataLoader(DATA, 4, num_workers=1, persistent_workers=True)
    return [sharing_task("first", Net(), eval_loader=loader), sharing_task("second", Net(), loader=loader)]


def drawing(make: Callable[[torch.Generator], DataLoader[Any]]) -> list[hf.Task]:
    draw = torch.Generator()
    return [sharing_task("first", Net(), loader=make(draw)), sharing_task("second", Net(), loader=make(draw))]


SHARE = "tasks 'first' and 'second' share memory: .* of the array that 'first' trains in place"
REFUSED_SHARING: dict[str, tuple[Callable[[], Any], str]] = {
    "an array": (lambda: reached(lambda fused: fused), f"{SHARE}.*Train both in one task"),
    "a member of an array": (lambda: reached(lambda fused: fused[0]), SHARE),
    "a tied weight": (
        lambda: reached(lambda fused: Tied(fused[0].head.weight)),
        "'weight' of 'second' is 'head.weight'",
    ),
    "workers": (persistent, "'first' and 'second' read with the workers of one DataLoader: .*persistent_workers=False"),
    "a generator": (
        lambda: drawing(lambda draw: DataLoader(DATA, 4, shuffle=True, generator=draw)),
        r"'first' and 'second' draw from one Generator: .*hf.Task\(seed=...\)",
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


# What is hung on a whole array, or on the steps of its optimizer, runs in tasks that are resident in this process.
class Stepping(hf.optim.SGD):
    calls: ClassVar[list[Any]] = []

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.calls.append(None)
        return super().step(closure)


def first_weight(fused: hf.FusedModule) -> Any:
    return fused.get_parameter("head.weight")


# What is added, with a function that it calls; and how it is refused in shards, and in other processes if it is.
ADDED: dict[str, tuple[Callable[[Any, Any, Any], Any], str, bool]] = {
    "forward": (lambda fused, opt, call: fused.register_forward_hook(call), "its array has a hook of its calls", False),
    "before forward": (lambda fused, opt, call: fused.register_forward_pre_hook(call), "its array has a hook", False),
    "backward": (lambda fused, opt, call: fused.register_full_backward_hook(call), "its array has a hook", False),
    "gradient": (lambda fused, opt, call: first_weight(fused).register_hook(call), "head.weight has a hook of", True),
    "accumulated": (
        lambda fused, opt, call: first_weight(fused).register_post_accumulate_grad_hook(call),
        "head.weight has a hook of its gradient",
        True,
    ),
    "before a step": (lambda fused, opt, call: opt.register_step_pre_hook(call), "SGD has a hook of its steps", True),
    "after a step": (lambda fused, opt, call: opt.register_step_post_hook(call), "SGD has a hook of its steps", True),
    "own step": (lambda fused, opt, call: setattr(opt, "__class__", Stepping), "Stepping has a step of its own", False),
}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("name", ADDED)
def test_what_is_of_a_whole_array_is_refused_elsewhere(name: str) -> None:
    add, words, lost = ADDED[name]
    fused = array()
    optimizer, before = hf.optim.SGD(fused.parameters(), lr=0.1), copy.deepcopy(fused.state_dict())
    hf_task, calls = sharing_task("mine", fused, optimizer=optimizer), Stepping.calls
    plan = planned([hf_task], machine(), [2], [False])
    calls.clear()
    add(fused, optimizer, lambda *args: calls.append(None))
    with pytest.raises(PlanError, match=f"task 'mine' is trained in shards, .*{words}.*remove it, or give"):
        hf.train(hf_task, machine(), plan=plan)
    if lost:
        with pytest.raises(PlanError, match=f"task 'mine': {words}.*cannot go to another process; remove it, or"):
            hf.train(hf_task, machine(2), processes=2)
    assert all(torch.equal(tensor, before[key]) for key, tensor in fused.state_dict().items())
    assert not calls
    hf.train(hf_task, machine())
    assert len(calls) == len(LOADER)


def test_hooks_of_gradients_of_members_are_refused_in_other_processes() -> None:
    fused, net = array(), Net()
    for weight, models in ((fused[1].head.weight, fused), (net.head.weight, [Net(), net])):
        weight.register_hook(lambda gradient: gradient * 2)
        for options in ({}, {"processes": 2}):
            with pytest.raises(hf.HFusionError, match=r"hook"):
                hf.train(sharing_task("mine", models), machine(2), **options)


# What a loader must keep to while a task is trained.


class Model(nn.Module):
    """A dim of its input that does not vary decides which operators run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, :3].sin() if x.shape[1] > 3 else x)


class Given:
    """A loader that says it has three minibatches. Its first one is looked at; then it gives ``epochs``."""

    def __init__(self, *epochs: list[Any]) -> None:
        self.epochs = iter([[PAIR], *epochs])

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        return iter(next(self.epochs))


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        ([[PAIR] * 3, [PAIR] * 3], ""),
        ([[PAIR] * 2, [PAIR] * 3], "the loader gave 2 minibatches in epoch 0, but its length is 3: give one whose"),
        ([[PAIR] * 3, []], "the loader gave 0 minibatches in epoch 1, but its length is 3"),
        ([[PAIR] * 4, [PAIR] * 3], "the loader gave more minibatches in epoch 0, but its length is 3"),
        ([[PAIR] * 3, [PAIR] * 4], "the loader gave more minibatches in epoch 1, but its length is 3"),
        ([[PAIR, (torch.ones(3, 3), PAIR[1])]], "a minibatch has 3 samples, but the plan counts with 2, those of"),
        ([[PAIR, (torch.ones(2, 5), PAIR[1])]], r"needs another program, whose operators differ \(\d+ instead of"),
        ([[PAIR, PAIR[0]]], "a minibatch of the loader is Tensor"),
    ],
)
def test_a_loader_gives_what_it_says(epochs: list[list[Any]], words: str) -> None:
    heard: list[Any] = []
    task = hf.Task(
        [Model(), Model()], F.cross_entropy, sgd, Given(*epochs), epochs=2, callbacks=[heard.append], name="mine"
    )
    if not words:
        hf.train(task, machine())
        assert len(heard) == 6
        return
    with pytest.raises(hf.TrainError) as raised:
        hf.train(task, machine())
    assert re.search(f"task 'mine': .*{words}", str(raised.value.__cause__))


@pytest.mark.parametrize("resident", [True, False])
def test_an_eval_loader_gives_what_it_says(resident: bool) -> None:
    loader = [PAIR] * 3
    for given, words in ((loader, ""), (loader[:2], "gave 2 minibatches in"), ([*loader, PAIR], "gave more mini")):
        task = hf.Task(Model(), F.cross_entropy, sgd, loader, eval_loader=Given(given), name="mine")
        plan = planned([task], machine(), [1], [resident])
        # Planning has read it.
        task = dataclasses.replace(task, eval_loader=Given(given))
        if not words:
            assert hf.train(task, machine(), plan=plan)["mine"].eval_losses.shape == (1, 3, 1)
            continue
        with pytest.raises(hf.TrainError, match=f"PlanError: task 'mine': the eval_loader {words}"):
            hf.train(task, machine(), plan=plan)
