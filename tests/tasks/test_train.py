"""hf.train gives the same bits as the plain loop: in shards, spilled and interleaved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.schedule.actions import Act
from hfusion.tasks import train as task_training
from tests.alone import Member, Own
from tests.forwards.table import module
from tests.schedule.compared import COMPARED
from tests.step.test_train_step import needs_compiler
from tests.tasks.test_checkpoints import assert_equal
from tests.trained import (
    EPOCHS,
    SEED,
    Way,
    adamw,
    assert_same,
    batches,
    cross_entropy,
    fused,
    machine,
    momentum,
    plain,
    planned,
    task,
)

# hf.train gives the same bits as the plain loop: in shards, spilled and interleaved.
WAYS = [
    Way(optimizer, clip, accumulate) for optimizer, clip, accumulate in product((momentum, adamw), (None, 0.5), (1, 2))
]
DTYPES = (torch.float32, torch.float64)


@cache
def knotted(dtype: torch.dtype) -> hf.FusedModule:
    """One array for many runs: every run puts its state back, and capture happens once."""
    torch.manual_seed(0)
    return fused(dtype=dtype)


@cache
def by_loop(dtype: torch.dtype, settings: Way) -> tuple[Tensor, dict[str, Tensor]]:
    return plain(knotted(dtype), settings, batches(dtype))


def name_of(value: Any) -> str:
    return getattr(value, "__name__", str(value)).removeprefix("torch.")


@pytest.mark.parametrize(
    ("mode", "count"), [("resident", 1), *((mode, count) for mode in ("spilled", "kept") for count in range(1, 9))]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_every_number_of_shards_gives_the_same_bits(dtype: torch.dtype, count: int, mode: str) -> None:
    # For one dtype the settings that differ from the first in an even number of choices, for the other dtype the rest:
    # in each dtype any two choices occur together.
    for settings in [
        settings for index, settings in enumerate(WAYS) if (index.bit_count() + count + DTYPES.index(dtype)) % 2 == 0
    ]:
        hf_task, on = task(knotted(dtype), settings, batches(dtype)), machine()
        plan = planned([hf_task], on, [count], [mode == "resident"], [mode == "kept"])
        report = assert_same([knotted(dtype)], [hf_task], [by_loop(dtype, settings)], on, plan)
        loads = [action for action in report.timeline.actions if (action.act, action.shard) == (Act.LOAD, count - 1)]
        assert len(loads) == 1 or mode == "spilled"


@pytest.mark.parametrize("policy", COMPARED)
@pytest.mark.parametrize("devices", [1, 2, 3, 4])
def test_tasks_interleave_on_devices(devices: int, policy: str) -> None:
    dtype = torch.float64
    all_settings = [WAYS[0], WAYS[7], WAYS[2], WAYS[5], WAYS[4]]
    arrays = [_copy(index) for index in range(len(all_settings))]
    expected = [_expected(index, settings) for index, settings in enumerate(all_settings)]
    tasks = [
        task(array, settings, batches(dtype), f"t{k}", eval_loader=batches(dtype, 2) if k != 2 else None)
        for k, (array, settings) in enumerate(zip(arrays, all_settings, strict=True))
    ]
    on = machine(devices)
    keep_last = [False, False, True, False, True]
    plan = planned(tasks, on, [3, 1, 4, 2, 6], [False, True, False, True, False], keep_last)
    assert_same(arrays, tasks, expected, on, plan, COMPARED[policy])


@cache
def _copy(index: int) -> hf.FusedModule:
    torch.manual_seed(index)
    return fused()


@cache
def _expected(index: int, settings: Way) -> tuple[Tensor, dict[str, Tensor]]:
    return plain(_copy(index), settings, batches(torch.float64))


def test_a_list_is_fused_by_shape_and_comes_back_in_order() -> None:
    def models() -> list[nn.Module]:
        torch.manual_seed(0)
        return [nn.Linear(6, 3) if k % 2 else nn.Sequential(nn.Linear(6, 3)) for k in range(5)]

    rates, limits = [0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 10.0, 0.1, 0.5, 0.3]
    loader = batches(torch.float32)
    originals = models()
    hf_task = hf.Task(
        originals,
        F.cross_entropy,
        optimizer=lambda params: hf.optim.SGD(params, lr=rates),
        loader=loader,
        epochs=EPOCHS,
        clip_norm=limits,
        name="mixed",
    )
    report = hf.train([hf_task], machine())
    assert [plan.name for plan in report.plan.tasks] == ["mixed.0", "mixed.1"]
    for index, (model, trained) in enumerate(zip(models(), report["mixed"].models, strict=True)):
        assert type(model) is type(trained)
        member = Member(model, torch.optim.SGD, F.cross_entropy, Own(rates[index], norm=limits[index]))
        losses = torch.cat([member.epoch(loader) for _ in range(EPOCHS)])
        torch.testing.assert_close(report["mixed"].losses[:, index], losses)
        for param, expected in zip(trained.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(param, expected)
    for before, after in zip(models(), originals, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


def test_members_that_do_not_fit_at_once_are_trained_a_few_at_a_time() -> None:
    models = [nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 3)) for _ in range(8)]
    rates = [0.01 * (k + 1) for k in range(8)]

    def make(params: list[nn.Parameter]) -> hf.optim.SGD:
        return hf.optim.SGD(params, lr=rates)

    hf_task = hf.Task(models, F.cross_entropy, optimizer=make, loader=batches(torch.float64), name="wide")
    models = [model.double() for model in models]
    whole = hf.train([hf_task], machine())
    need = whole.plan.tasks[0].device_bytes
    narrow = hf.train([hf_task], machine(memory=str(need // 2)))
    assert [plan.width for plan in whole.plan.tasks] == [8]
    assert max(plan.width for plan in narrow.plan.tasks) < 8
    torch.testing.assert_close(narrow["wide"].losses, whole["wide"].losses)
    narrow.timeline.validate(narrow.plan)


@pytest.mark.parametrize("times", [1, 4])
@pytest.mark.parametrize(
    ("mode", "count"), [("resident", 1), *((mode, count) for mode in ("spilled", "kept") for count in (1, 2, 5))]
)
def test_evaluations_are_those_of_the_loop_in_eval_mode(count: int, times: int, mode: str) -> None:
    """Also of minibatches with ``times`` as many samples as those that are trained."""
    array, loader = knotted(torch.float64), batches(torch.float64)
    held_out = [(torch.cat([x] * times), torch.cat([y] * times)) for x, y in batches(torch.float64, 3)]
    for settings in (Way(momentum, 0.5, 2), Way(adamw)):
        expected_losses: list[Tensor] = []

        def evaluate(loss: Callable[..., Tensor], expected_losses: list[Tensor] = expected_losses) -> None:
            array.eval()
            with torch.no_grad():
                expected_losses.append(torch.stack([loss(array(x), y) for x, y in held_out]))
            array.train()

        expected = plain(array, settings, loader, after_epoch=evaluate)
        heard: list[hf.Evaluation] = []
        hf_task = task(array, settings, loader, eval_loader=held_out, callbacks=[_only(hf.Evaluation, heard)])
        plan = planned([hf_task], machine(), [count], [mode == "resident"], [mode == "kept"])
        report = assert_same([array], [hf_task], [expected], machine(), plan)
        losses = report["task"].eval_losses
        assert losses is not None
        assert torch.equal(losses, torch.stack(expected_losses))
        assert [(evaluation.epoch, evaluation.members) for evaluation in heard] == [
            (epoch, (0, 1, 2)) for epoch in range(EPOCHS)
        ]
        assert torch.equal(torch.stack([evaluation.losses for evaluation in heard]), losses)
        assert array.training


def _only(kind: type, heard: list[Any]) -> Callable[[Any], None]:
    return lambda event: heard.append(event) if isinstance(event, kind) else None


# Uses its layers in another order when it is evaluated.
OtherWayRound = module(
    lambda self, x: self.last(self.first(x).relu()) if self.training else self.first(self.last(x).relu()),
    first=lambda: nn.Linear(6, 6),
    last=lambda: nn.Linear(6, 6),
)


def test_what_cannot_be_evaluated_in_shards_is_refused() -> None:
    array, loader = fused(OtherWayRound), batches(torch.float64)
    hf_task = task(array, Way(), loader, eval_loader=loader)
    hf.train([hf_task], machine())
    with pytest.raises(hf.PlanError, match=r"after tensors of later shards.*leave the eval loader out"):
        hf.train([hf_task], machine(), plan=planned([hf_task], machine(), [2], [False]))
    large = [(torch.zeros(n, 6, dtype=torch.float64), torch.zeros(n, dtype=torch.int64)) for n in (7, 8)]
    with pytest.raises(hf.TrainError) as raised:
        hf.train([task(array, Way(), loader, eval_loader=DataLoader(large, batch_size=None))], machine())
    assert "has 8 samples, but the plan counts with 7, those of the first" in str(raised.value.__cause__)


# Frozen parameters that forward writes are state of a run, as buffers are.
class Counting(nn.Module):
    """Counts its calls in a frozen parameter, and scales by it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 3)
        self.calls = nn.Parameter(torch.zeros(()), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.calls.add_(1)
        return self.out(self.fc(x).relu() / self.calls.detach().clone())  # type: ignore[no-any-return]


@pytest.mark.parametrize("resident", [True, False])
def test_a_frozen_parameter_that_forward_writes_is_trained_state(resident: bool) -> None:
    models = [Counting().double() for _ in range(2)]
    alone = copy.deepcopy(models)
    minibatches = [(torch.randn(4, 8, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    task = hf.Task(hf.fuse(models), F.cross_entropy, lambda params: hf.optim.SGD(params, lr=0.1), minibatches, name="a")
    trained = hf.train(task, machine(), plan=planned([task], machine(), [1], [resident]))["a"].models
    for model, other in zip(trained, alone, strict=True):
        Member(other, torch.optim.SGD, F.cross_entropy, Own(0.1)).epoch(minibatches)
        assert model.calls == other.calls == 3
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-11)


class Numbered(nn.Module):
    """Gives a number of its own with its result."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.fc, self.number = nn.Linear(8, 3), number

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return self.fc(x), self.number


class Running(nn.Module):
    """A loss that divides by its own running mean, and counts its calls."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))
        self.count = 0

    def forward(self, output: tuple[Tensor, float], target: Tensor) -> Tensor:
        loss = F.cross_entropy(output[0], target) * output[1]
        self.count += 1
        self.mean.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss / (1 + self.mean)


def test_a_loss_that_keeps_state_gets_what_members_return_and_no_other_calls() -> None:
    models = [Numbered(number).double() for number in (1.0, 2.0)]
    minibatches = [(torch.randn(4, 8, dtype=torch.float64), torch.randint(3, (4,))) for _ in range(3)]
    losses = Running(), Running()
    members = [Member(model, torch.optim.SGD, losses[1], Own(0.1)) for model in models]
    task = hf.Task(models, losses[0], lambda params: hf.optim.SGD(params, lr=0.1), minibatches, name="a")
    hf.plan([task], machine())
    trained = hf.train(task, machine())["a"].models
    for x, target in minibatches:
        for member in members:
            member.call(x, target)
    assert (losses[0].count, losses[0].mean) == (losses[1].count, losses[1].mean)
    for model, other in zip(trained, models, strict=True):
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-11)


class Annealed:
    """A loss that is scaled by the number of its calls."""

    def __init__(self) -> None:
        self.counts = {"calls": 0}

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        self.counts["calls"] += 1
        return F.cross_entropy(output, target) * self.counts["calls"]

    def within(self, output: Tensor, target: Tensor) -> Tensor:
        return self(output, target)


class Holding(nn.Module):
    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target)  # type: ignore[no-any-return]


class Noting(Annealed, nn.Module):
    """Counts in a frozen parameter."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.counts = nn.ParameterDict({"calls": nn.Parameter(torch.zeros(()), requires_grad=False)})


@pytest.mark.parametrize("form", ["object", "method", "closure", "module", "parameter"])
def test_a_loss_that_counts_in_an_object_is_called_for_minibatches_only(form: str) -> None:
    counting = Noting() if form == "parameter" else Annealed()
    forms: dict[str, Any] = {
        "object": counting,
        "method": counting.within,
        "closure": lambda output, target: counting(output, target),
        "module": Holding(counting),
        "parameter": counting,
    }
    minibatches = [(torch.randn(4, 8), torch.randint(3, (4,))) for _ in range(3)]
    model, (x, target) = nn.Linear(8, 3), minibatches[0]
    expected = F.cross_entropy(model(x), target)
    report = hf.train(hf.Task(model, forms[form], lambda params: hf.optim.SGD(params, lr=0.1), minibatches), machine())
    assert counting.counts["calls"] == 3
    torch.testing.assert_close(report["task"].losses[0, 0], expected)


# Tasks that are compiled train as a loop over `hfusion.train_step`, and, but for rounding, as the plain loop.
CLOSE = {"rtol": 1e-9, "atol": 1e-12}


class Normed(nn.Module):
    """A buffer that is written to, a parameter that nothing uses, one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.frozen(self.norm(self.first(x)).relu()))  # type: ignore[no-any-return]


def array(make: Callable[[], nn.Module] = Normed, seed: int = 0) -> hf.FusedModule:
    """Return a new array, because only the very first step of an array is eager."""
    torch.manual_seed(seed)
    return fused(make)


def stepped(module: hf.FusedModule, loader: Any, after: Callable[[Any], None] = lambda optimizer: None) -> list[Tensor]:
    """A loop over `hf.train_step`: its losses, and the state after it."""
    optimizer = adamw(list(module.parameters()))
    step = hf.train_step(module, cross_entropy, optimizer, compile=True)
    torch.manual_seed(SEED)
    losses = []
    for _ in range(EPOCHS):
        for x, y in loader:
            losses.append(step(x, y))
            after(optimizer)
    return [torch.stack(losses), *module.state_dict().values()]


def trained(module: hf.FusedModule, loader: Any, settings: Way | None = None, **more: Any) -> tuple[list[Tensor], Any]:
    """The same by a compiled task, and the report."""
    hf_task = task(module, settings or Way(), loader, compile=True, **more)
    on = machine()
    report = hf.train(hf_task, on)
    report.timeline.validate(report.plan)
    assert all(param.grad is None for param in module.parameters())
    assert all(tensor.is_contiguous() for tensor in module.state_dict().values())
    return [report["task"].losses, *module.state_dict().values()], report


@needs_compiler
def test_the_steps_are_those_of_train_step() -> None:
    """Also of the last minibatch, which is smaller; and what is evaluated is what has been trained."""
    module, loader = array(), batches(torch.float64)
    expected = stepped(array(), loader)
    actual, report = trained(module, loader, eval_loader=loader[:2])
    assert_equal(actual, expected)
    losses, state = plain(array(), Way(), loader)
    for tensor, reference in zip(actual, [losses, *state.values()], strict=True):
        torch.testing.assert_close(tensor, reference, **CLOSE)
    module.eval()
    with torch.no_grad():
        eval_losses = torch.stack([hf.per_model(cross_entropy)(module(x), y) for x, y in loader[:2]])
    module.train()
    assert torch.equal(report["task"].eval_losses[-1], eval_losses)
    (array_report,) = report["task"].arrays
    assert [call.how.split(" of ")[0] for call in array_report.calls] == ["one program"]
    assert str(array_report) in str(report["task"])
    assert str(array_report).startswith("task: 3 members, resident, f64[6,6], i64[6]: one program of")


@needs_compiler
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("clip", [None, [0.5, 0.05, 1.0]])
@pytest.mark.parametrize("optimizer", [momentum, adamw])
def test_clipped_and_accumulated(optimizer: Any, clip: Any, accumulate: int) -> None:
    """The last group of an epoch is smaller."""
    settings, loader = Way(optimizer, clip, accumulate), batches(torch.float64)
    losses, state = plain(array(), settings, loader)
    heard: list[hf.Step] = []
    actual, report = trained(array(), loader, settings, callbacks=[heard.append])
    for tensor, reference in zip(actual, [losses, *state.values()], strict=True):
        torch.testing.assert_close(tensor, reference, **CLOSE)
    assert [(step.epoch, step.step) for step in heard] == [(e, s) for e in range(EPOCHS) for s in range(len(loader))]
    assert torch.equal(torch.stack([step.losses for step in heard]), report["task"].losses)


@needs_compiler
def test_a_task_that_cannot_be_compiled_runs_eagerly_and_says_why() -> None:
    """Bit for bit as the plain loop."""
    loader = batches(torch.float64)
    module = array()
    hf_task = task(module, Way(), loader, compile=True)
    plan = planned([hf_task], machine(), [3], [False])
    words = r"'task' runs eagerly, exact but slower: it is spilled, in 3 shards.*hf.Task\(compile=False\)"
    with pytest.warns(UserWarning, match=words):
        report = hf.train(hf_task, machine(), plan=plan)
    losses, state = plain(array(), Way(), loader)
    assert_equal([report["task"].losses, *module.state_dict().values()], [losses, *state.values()])
    assert "eager: it" in str(report["task"])


@needs_compiler
def test_a_task_that_pays_is_compiled_from_its_second_minibatch_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a warning of the decision, and as exact."""
    monkeypatch.setattr(task_training, "LEAST_SECONDS", 0.0)
    module, loader = array(), batches(torch.float64)
    with warnings.catch_warnings(action="error"):
        report = hf.train(task(module, Way(), loader), machine())["task"]
    assert "one program of" in str(report.arrays[0])
    assert_equal([report.losses, *module.state_dict().values()], stepped(array(), loader))


def test_threads_have_the_context_of_the_caller() -> None:
    scale, seen = ContextVar("scale", default=1.0), set[Any]()
    hear = [lambda result: seen.add((scale.get(), torch.zeros(()).device.type))]
    scale.set(3.0)
    hearing = task(fused(), Way(adamw), batches(torch.float64), callbacks=hear)
    with torch.device("meta"):
        hf.train(hearing)
    assert seen == {(3.0, "meta")}
