"""hf.train gives the same bits as the plain loop: in shards, spilled and interleaved."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Plan
from hfusion.tasks.training_report import Report, TaskReport
from tests import zoo
from tests.core.test_gradient_usage import Before, Exit
from tests.schedule.compared import COMPARED
from tests.tasks.resumed import array
from tests.tasks.test_stopping import assert_equal, rows
from tests.trained import (
    BATCHES,
    EPOCHS,
    MEMBERS,
    RATE,
    Way,
    adamw,
    assert_same,
    batches,
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


@pytest.mark.parametrize("model", zoo.MODELS, ids=str)
def test_models_of_every_kind(model: zoo.Model) -> None:
    array = fused(model.make)
    draw = torch.Generator().manual_seed(3)
    torch.manual_seed(3)
    loader = [(model.draw(n), torch.rand((), generator=draw, dtype=torch.float64)) for n in (5, 5, 3)]
    settings = Way(adamw, 0.5, 2)
    expected = plain(array, settings, loader, distance)
    hf_task, on = task(array, settings, loader, loss=distance), machine()
    for count in (1, 3, 7):
        assert_same([array], [hf_task], [expected], on, planned([hf_task], on, [count], [False], [count == 3]))


def distance(output: Any, target: Tensor) -> Tensor:
    """A loss of any nest of outputs."""
    tensors = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else [output]
    total = target * 0
    for tensor in tensors:
        total = total + (tensor - target).square().mean()
    return total


def test_state_that_the_host_cannot_hold_goes_to_the_disk(tmp_path: Path) -> None:
    settings, dtype = Way(), torch.float32
    hf_task = task(knotted(dtype), settings, batches(dtype))
    on = machine(host="2KiB", disk=tmp_path / "spill")
    files: list[Path] = []
    watching = task(
        knotted(dtype), settings, batches(dtype), callbacks=[lambda step: files.extend(tmp_path.rglob("*.safetensors"))]
    )
    plan = planned([hf_task], on, [4], [False])
    assert_same([knotted(dtype)], [watching], [by_loop(dtype, settings)], on, plan)
    assert files
    assert not list(tmp_path.iterdir())


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
        optimizer = torch.optim.SGD(model.parameters(), lr=rates[index])
        losses = []
        for _ in range(EPOCHS):
            for x, y in loader:
                loss = F.cross_entropy(model(x), y)
                losses.append(loss.detach())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), limits[index])
                optimizer.step()
        torch.testing.assert_close(report["mixed"].losses[:, index], torch.stack(losses))
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


def test_callbacks_hear_of_every_minibatch() -> None:
    heard: list[Any] = []
    hf_task = task(fused(), Way(), batches(torch.float64), callbacks=[heard.append])
    report = hf.train([hf_task], machine())
    assert [(step.epoch, step.step) for step in heard] == list(product(range(EPOCHS), range(BATCHES)))
    assert torch.equal(torch.stack([step.losses for step in heard]), report["task"].losses)


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


class OtherWayRound(nn.Module):
    """Uses its layers in another order when it is evaluated."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()) if self.training else self.first(self.second(x).relu())


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


def test_this_machine_is_the_one_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(2)]
    hf_task = hf.Task([nn.Linear(3, 2), nn.Linear(3, 2)], F.cross_entropy, partial(hf.optim.SGD, lr=0.1), pairs)
    assert len(hf.plan(hf_task).devices) == len(hf.Machine.detect().devices)
    assert hf.train(hf_task)[hf_task.name].losses.shape == (2, 2)
    assert not list(tmp_path.iterdir())


# A fault in one member of a task changes no other by one bit: in shards, spilled, clipped, accumulated.
BAD = 1
WAYS_ISOLATION = {
    "SGD": Way(lambda params: hf.optim.SGD(params, lr=RATE, momentum=0.9)),
    "AdamW clipped": Way(lambda params: hf.optim.AdamW(params, lr=RATE), 0.5),
    "Adam clipped accumulated": Way(lambda params: hf.optim.Adam(params, lr=RATE), [0.1, 0.5, 2.0], 2),
}


@dataclass(frozen=True)
class Harm:
    """The fault of one member: a number in its third minibatch, or another learning rate."""

    value: float | None = None
    rate: float = RATE[BAD]

    def inputs(self, x: Tensor, index: int) -> Tensor:
        x = x.clone()
        if index == 2 and self.value is not None:
            x[0, 0] = self.value
        return x


HARMS = {
    "NaN": Harm(float("nan")),
    "inf": Harm(float("inf")),
    "overflow": Harm(1e300),
    "explosion": Harm(rate=1e200),
}


def harmed(settings: Way, mode: str, harm: Harm) -> list[Any]:
    """Losses and everything else of each member."""
    fused = array(0)
    loader = [
        (hf.stacked([harm.inputs(x, index) if member == BAD else x for member in range(MEMBERS)]), y)
        for index, (x, y) in enumerate(batches(torch.float64))
    ]
    optimizer = settings.optimizer(list(fused.parameters()))
    optimizer.param_groups[0]["lr"][BAD] = harm.rate
    hf_task = task(
        fused, Way(lambda params: optimizer, settings.clip, settings.accumulate), loader, eval_loader=loader[:2]
    )
    plan = planned([hf_task], machine(), [4], [mode == "resident"], [mode == "kept"])
    report = hf.train(hf_task, machine(), plan=plan)["task"]
    assert report.eval_losses is not None
    losses = torch.cat([report.losses, report.eval_losses.flatten(0, 1)])
    return [[losses[:, member], rows(fused, optimizer, member)] for member in range(MEMBERS)]


@pytest.mark.parametrize("mode", ["resident", "spilled", "kept"])
@pytest.mark.parametrize("name", WAYS_ISOLATION)
def test_a_member_that_diverges_changes_no_other(name: str, mode: str) -> None:
    expected = harmed(WAYS_ISOLATION[name], mode, Harm())
    for harm in HARMS.values():
        actual = harmed(WAYS_ISOLATION[name], mode, harm)
        for member in range(MEMBERS):
            if member != BAD:
                assert_equal(actual[member], expected[member])
            else:
                assert not torch.equal(actual[member][0], expected[member][0])


# The progress and the report of a run fit on one screen.
def task_report(
    members: int, steps: int = 4, *, evaluated: bool = False, stopped: dict[int, int] | None = None
) -> TaskReport:
    losses = torch.arange(steps * members, dtype=torch.float64).reshape(steps, members).flip(0) / members
    evaluations = torch.arange(2 * members, dtype=torch.float64).reshape(1, 2, members) if evaluated else None
    return TaskReport(losses, evaluations, stopped or {}, torch.logspace(-3, 0, members), ())


def whole(tasks: dict[str, TaskReport], devices: int = 2) -> Report:
    budgets = {f"device-{k}": 1 << 30 for k in range(devices)}
    line: Any = SimpleNamespace(makespan=12.34, utilisation=0.875)
    return Report(tasks, Plan((), budgets, 1.0, 1.0), line, dict.fromkeys(budgets, 1 << 20))


@pytest.mark.parametrize("count", [0, 1, 2, 17, 18, 19, 1000])
@pytest.mark.parametrize("members", [1, 3, 2000])
def test_a_report_fits_a_screen(count: int, members: int) -> None:
    tasks = {f"a-long-name-of-a-task-that-goes-on-{k}": task_report(members, stopped={0: 2}) for k in range(count)}
    report = whole(tasks, 40)
    for text in (str(report), repr(report), *map(str, [*tasks.values()][:1])):
        lines = text.splitlines()
        assert len(lines) <= 24
        assert max(map(len, lines)) <= 100


def test_a_report_says_what_there_was() -> None:
    text = str(whole({"sweep": task_report(3, stopped={1: 2}), "other": task_report(1, evaluated=True)}))
    assert text.splitlines() == [
        "2 tasks, 4 members, 2 devices: 12.3 s, computing 88% of the time",
        "peak: device-0 1.0MiB of 1.0GiB, device-1 1.0MiB of 1.0GiB",
        "task   members  stopped  minibatches     metric  best  member     lr  median  worst",
        "sweep        3        1            4  last loss     0       0  0.001  0.6667  2.333",
        "other        1        0            4  eval loss   0.5       0  0.001     0.5    0.5",
    ]


def test_a_run_prints_its_report(capsys: pytest.CaptureFixture[str]) -> None:
    reported = task(fused(), Way(), batches(torch.float64), eval_loader=batches(torch.float64, 2))
    report = hf.train(reported, machine(), progress=True, on_result=lambda result: [2])
    print(report, report["task"], sep="\n")
    printed = capsys.readouterr().out.splitlines()
    assert "10/10 minibatches of task" in printed[9]
    assert printed[10].startswith("1 task, 3 members, 1 device: ")
    assert "stopped after 1" in printed[-1]


# A parameter that a member has not used in a step stays as it is, also where the array is cut into shards.
class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.exit, self.last = nn.Linear(4, 4), nn.Linear(4, 4), Exit(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.second(self.first(x).tanh()).tanh()
        y: Tensor = self.last(self.exit(h, x))
        return y


def loader() -> list[tuple[Any, Tensor]]:
    draw = torch.Generator().manual_seed(3)
    sizes = (BATCHES, MEMBERS, 6, 4)
    inputs, targets = (torch.randn(*sizes, generator=draw, dtype=torch.float64) for _ in range(2))
    return [(hf.stacked(x), y[0]) for x, y in zip(inputs, targets, strict=True)]


@pytest.mark.parametrize(("resident", "count"), [(True, 1), (False, 1), (False, 2), (False, 3), (False, 5)])
@pytest.mark.parametrize("make", [Skipping, Before])
def test_a_parameter_that_a_member_skips_stays_as_it_is(
    make: Callable[[], nn.Module], count: int, resident: bool
) -> None:
    array, settings, batches = fused(make), Way(), loader()
    expected = plain(array, settings, batches, F.mse_loss)
    tasks = [task(array, settings, batches, loss=F.mse_loss)]
    on = machine()
    assert_same([array], tasks, [expected], on, planned(tasks, on, [count], [resident]))


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
        optimizer = torch.optim.SGD([p for p in other.parameters() if p.requires_grad], lr=0.1)
        for x, target in minibatches:
            optimizer.zero_grad()
            F.cross_entropy(other(x), target).backward()
            optimizer.step()
        assert model.calls == other.calls == 3
        torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-11)
