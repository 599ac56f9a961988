"""Members that stop by an answer or by patience, and end with their best weights."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from tests.alone import Member, Own
from tests.tasks.test_checkpoints import CutError, array, assert_equal, planned_as, small, task_with
from tests.trained import BATCHES, EPOCHS, MEMBERS, Way, adamw, batches, machine, momentum, planned


# hf.train(on_result=...): a stopped member keeps its state, and the others stay the same bit for bit.
@dataclass(frozen=True)
class Case:
    """How a task is trained and cut into shards, and when members stop: after so many minibatches, or an evaluation."""

    settings: Way
    mode: str
    evaluated: bool = False
    steps: tuple[int | None, int | None, int | None] = (None, 3, None)

    def __str__(self) -> str:
        label = f"{self.settings.optimizer.__name__}-{self.settings.clip}-{self.settings.accumulate}"
        return f"{label}-{self.mode}-{'eval' if self.evaluated else 'train'}-{self.steps}"


CASES = [
    Case(Way(momentum), "resident"),
    Case(Way(adamw, 0.5), "spilled", steps=(2, 7, None)),
    # In the midst of a group of minibatches.
    Case(Way(adamw, 0.5, 2), "spilled", True, (1, None, 6)),
    Case(Way(adamw), "kept", True, (None, 5, 4)),
    # All of them: the task ends.
    Case(Way(momentum, 0.5, 2), "spilled", True, (7, 5, 3)),
    Case(Way(adamw, 0.5, 3), "kept", True, (2, 2, 2)),
]


def stops(cases: Sequence[Case]) -> Callable[[hf.Step | hf.Evaluation], list[int]]:
    """Lets members stop where the cases say; names of tasks are ``t0``, ``t1``, ..."""

    def stop_members(result: hf.Step | hf.Evaluation) -> list[int]:
        case = cases[int(result.task[1:])]
        return [member for member, last in enumerate(case.steps) if last == done(result)]

    return stop_members


def done(result: hf.Step | hf.Evaluation) -> int:
    """How many minibatches have ended with one; -1 for an evaluation."""
    return result.epoch * BATCHES + result.step + 1 if isinstance(result, hf.Step) else -1


@dataclass(frozen=True)
class Run:
    """Results of a run: the report's numbers by task, and each member's tensors with its optimizer's state."""

    losses: list[Tensor]
    evaluations: list[Tensor | None]
    stopped: list[dict[int, int]]
    members: list[list[list[Tensor]]]
    spans: int

    @property
    def results(self) -> list[Any]:
        return [self.losses, self.evaluations, self.stopped, self.members]


def trained(
    cases: Sequence[Case],
    on_result: Any = None,
    *,
    devices: int = 1,
    root: Path | None = None,
    epochs: int = EPOCHS,
    policy: str = "patient-lrtf",
) -> Run:
    arrays = [array(index) for index in range(len(cases))]
    optimizers = [case.settings.optimizer(list(fused.parameters())) for case, fused in zip(cases, arrays, strict=True)]
    tasks = [
        task_with(fused, optimizer, case.settings, index, evaluated=case.evaluated, epochs=epochs)
        for index, (case, fused, optimizer) in enumerate(zip(cases, arrays, optimizers, strict=True))
    ]
    on = machine(devices)
    plan = planned_as(tasks, on, [case.mode for case in cases])
    report = hf.train(tasks, on, policy, plan=plan, checkpoint=root, every=1 if root else None, on_result=on_result)
    for name, peak in report.peak.items():
        assert report.timeline.peak[name] <= peak <= plan.devices[name]
    return Run(
        [report[hf_task.name].losses for hf_task in tasks],
        [report[hf_task.name].eval_losses for hf_task in tasks],
        [dict(report[hf_task.name].stopped) for hf_task in tasks],
        [
            [rows(fused, optimizer, row) for row in range(MEMBERS)]
            for fused, optimizer in zip(arrays, optimizers, strict=True)
        ],
        len(report.timeline.actions),
    )


def rows(fused: hf.FusedModule, optimizer: Any, row: int) -> list[Tensor]:
    """Everything that is of one member."""
    stacks = [tensor for name, tensor in fused.state_dict().items() if not name.startswith("frozen")]
    for entry in optimizer.state.values():
        stacks += [entry[key] for key in sorted(entry)]
    stacks += [optimizer.param_groups[0]["lr"].as_subclass(Tensor)]
    return [stack[row].clone() for stack in stacks]


def check(case: Case, run: Run, whole: Run, index: int = 0) -> None:
    """Compare with a run without stops: other members are the same, a stopped one has no losses from there on."""
    steps = [EPOCHS * BATCHES if last is None else last for last in case.steps]
    assert len(run.losses[index]) == max(steps)
    for member, last in enumerate(steps):
        losses = run.losses[index][:, member]
        assert_equal(losses[:last], whole.losses[index][:last, member])
        assert losses[last:].isnan().all()
        if case.steps[member] is None:
            assert_equal(run.members[index][member], whole.members[index][member])
        evaluations, expected = run.evaluations[index], whole.evaluations[index]
        if evaluations is not None and expected is not None:
            # A member that stops with the last minibatch of an epoch is not evaluated after it.
            ended = (last - 1) // BATCHES if case.steps[member] is not None else EPOCHS
            assert_equal(evaluations[:ended, :, member], expected[:ended, :, member])
            assert evaluations[ended:, :, member].isnan().all()
    assert run.stopped[index] == {member: last for member, last in enumerate(case.steps) if last is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_stops_leaves_the_others_as_they_are(case: Case) -> None:
    whole = trained([case])
    check(case, run := trained([case], stops([case])), whole)
    # Alone they would have stopped in the midst of a run that is otherwise the same: all stop at once there.
    for last in {last for last in case.steps if last is not None}:
        ended = trained([case], lambda result, last=last: done(result) == last)
        for member, stop in enumerate(case.steps):
            if stop == last:
                assert_equal(run.members[0][member], ended.members[0][member])


ANSWERS: dict[str, tuple[Callable[[Any], Any], dict[int, int]]] = {
    "None": (lambda result: None, {}),
    "True": (lambda result: True, {0: 1, 1: 1, 2: 1}),
    "members": (lambda result: {1, 2}, {1: 1, 2: 1}),
    "a generator": (lambda result: (member for member in [2]), {2: 1}),
    "a tensor of members": (lambda result: torch.tensor([0]), {0: 1}),
    "a mask": (lambda result: result.losses > result.losses.median(), None),
    "a mask of numpy": (lambda result: np.array([False, True, False]), {1: 1}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    answer, expected = ANSWERS[name]
    stopped = hf.train(small(), machine(), on_result=answer)["small"].stopped
    assert stopped == expected or (expected is None and len(stopped) in (1, 2))


WRONG: dict[str, Any] = {
    "on_result gave 'all' for the task 'small': give None or False to go on": "all",
    "on_result gave {0: True}": {0: True},
    r"on_result gave \[True\]": [True],
    r"stops member 3 of the task 'small', but was asked for members \[0, 1, 2\]": [3],
    r"bool tensor of shape \[2\] for 3 members": torch.tensor([True, False]),
}


@pytest.mark.parametrize("words", WRONG)
def test_answers_that_name_no_members(words: str) -> None:
    with pytest.raises(hf.TrainError, match=words):
        hf.train(small(), machine(), on_result=lambda result: WRONG[words])


# Members of hf.train that stop by patience, and end with their best weights, equal each of them trained alone.
EPOCHS_BEST_WEIGHTS = 7
RATES = [0.5, 0.02, 1.5, 0.1]


def models() -> list[nn.Module]:
    torch.manual_seed(3)
    return [
        nn.Sequential(
            nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)
        ).double()
        for _ in RATES
    ]


def data(seed: int, count: int) -> TensorDataset:
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    return TensorDataset(inputs, torch.randint(3, (count,), generator=draw))


TRAINED = DataLoader(data(0, 20), batch_size=8)
EVALUATED = DataLoader(data(1, 12), batch_size=8)


@dataclass(frozen=True)
class CaseBestWeights:
    """Options of a task for best weights, and how it is trained."""

    patience: int | None = None
    least: float = 0.0
    restores: bool = True
    mode: str = "resident"
    compile: bool = False

    def task(self, members: Any = None, rates: list[float] = RATES, **more: Any) -> hf.Task:
        patience = None if self.patience is None else hf.Patience(self.patience, least=self.least)
        return hf.Task(
            models() if members is None else members,
            F.cross_entropy,
            lambda params: hf.optim.SGD(params, lr=rates, momentum=0.9),
            TRAINED,
            epochs=EPOCHS_BEST_WEIGHTS,
            eval_loader=EVALUATED,
            compile=self.compile,
            patience=patience,
            restore_best=self.restores,
            name="best",
            **more,
        )

    def train(self, task: hf.Task, root: Path | None = None, **options: Any) -> Any:
        on = machine()
        count = 1 if self.mode == "resident" else 4
        plan = planned([task], on, [count], [self.mode == "resident"], [self.mode == "kept"])
        return hf.train(task, on, plan=plan, checkpoint=root, every=1 if root else None, **options)["best"]


CASES_BEST_WEIGHTS = [
    CaseBestWeights(),
    CaseBestWeights(patience=2),
    CaseBestWeights(patience=1, least=0.01, mode="spilled"),
    CaseBestWeights(patience=2, restores=False, mode="spilled"),
    CaseBestWeights(mode="kept"),
    CaseBestWeights(patience=1, compile=True),
]


def alone(case: CaseBestWeights, row: int) -> tuple[int, int, list[Tensor]]:
    """Train one member as people do: its best epoch, its epochs, and its tensors in the end."""
    model = models()[row]
    member = Member(model, partial(torch.optim.SGD, momentum=0.9), F.cross_entropy, Own(RATES[row]))
    best, best_epoch, waited, state = float("inf"), -1, 0, copy.deepcopy(model.state_dict())
    epoch = 0
    for epoch in range(EPOCHS_BEST_WEIGHTS):
        member.epoch(TRAINED)
        loss = mean(member.judged([pair]) for pair in EVALUATED)
        if loss + case.least < best:
            best, best_epoch, waited, state = loss, epoch, 0, copy.deepcopy(model.state_dict())
        else:
            waited += 1
        if case.patience is not None and waited >= case.patience:
            break
    if case.restores:
        model.load_state_dict(state)
    return best_epoch, epoch + 1, [*model.state_dict().values()]


def tensors(report: Any) -> list[list[Tensor]]:
    return [[*model.state_dict().values()] for model in report.models]


@pytest.mark.parametrize("case", CASES_BEST_WEIGHTS, ids=str)
def test_members_end_as_alone(case: CaseBestWeights) -> None:
    report = case.train(case.task())
    expected = [alone(case, row) for row in range(len(RATES))]
    # Members that improve to the end, and some that do not, at different epochs.
    assert len({best for best, _, _ in expected}) > 1
    for actual, (_, _, state) in zip(tensors(report), expected, strict=True):
        torch.testing.assert_close(actual, state, rtol=1e-9, atol=1e-11)
    if case.restores:
        assert report.best_epochs.tolist() == [best for best, _, _ in expected]
        means = report.eval_losses.mean(1)
        assert_equal(report.final_losses, torch.stack([means[best, row] for row, (best, _, _) in enumerate(expected)]))
    else:
        assert report.best_epochs is None
    ended = [report.stopped.get(row, EPOCHS_BEST_WEIGHTS * len(TRAINED)) for row in range(len(RATES))]
    assert ended == [epochs * len(TRAINED) for _, epochs, _ in expected]


@pytest.mark.parametrize("cut", [2, 5])
@pytest.mark.parametrize("case", CASES_BEST_WEIGHTS[:4], ids=str)
def test_a_run_goes_on_with_its_best_weights(case: CaseBestWeights, cut: int, tmp_path: Path) -> None:
    expected = case.train(case.task())
    heard = 0

    def interrupt(result: hf.Step | hf.Evaluation) -> None:
        nonlocal heard
        heard += isinstance(result, hf.Step)
        if heard > cut:
            raise CutError

    with pytest.raises(hf.TrainError):
        case.train(case.task(), tmp_path, on_result=interrupt)
    # What has ended is not trained again, and ends as it did.
    for _ in range(2):
        again = case.train(case.task(), tmp_path)
        assert_equal(tensors(again), tensors(expected))
        assert_equal([again.losses, again.eval_losses], [expected.losses, expected.eval_losses])
        assert again.stopped == expected.stopped
        assert_equal(again.best_epochs, expected.best_epochs)


# Schedulers of tasks: each member has the rates, and becomes, what it would alone with torch's scheduler.
SCHEDULED_EPOCHS, LOADER = 4, batches(torch.float64, 3)
SCHEDULED_RATES = [0.1, 0.05, 0.2]


step_lr = partial(lr_scheduler.StepLR, step_size=2, gamma=0.5)
cycle = partial(lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=20)
plateau = partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=0, threshold=0.3)


def warm_up(optimizer: Any) -> Any:
    return lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(optimizer, 5)],
        [3],
    )


SCHEDULES: dict[str, Any] = {
    "StepLR": step_lr,
    "SequentialLR": warm_up,
    "OneCycleLR": cycle,
    "ReduceLROnPlateau": plateau,
    "of each member": [step_lr, plateau, warm_up],
}


def scheduled_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double() for _ in SCHEDULED_RATES]


def scheduled_alone(
    model: nn.Module, rate: float, make: Callable[[Any], Any], interval: str, accumulate: int, evaluated: bool
) -> tuple[list[Tensor], float]:
    """The loop that people write for one model; its parameters and last rate."""
    member = Member(model, partial(torch.optim.SGD, momentum=0.9), F.cross_entropy, Own(rate, make, accumulate))
    for _ in range(SCHEDULED_EPOCHS):
        loss = float(member.epoch(LOADER, schedules_steps=interval == "step").mean())
        if interval == "epoch":
            member.step_schedule(mean(member.judged([pair]) for pair in LOADER[:2]) if evaluated else loss)
    return [param.detach() for param in model.parameters()], member.opt.param_groups[0]["lr"]


def scheduled(
    name: str, interval: Any, accumulate: int, evaluated: bool, shards: int = 2, **options: Any
) -> tuple[list[list[Tensor]], list[float]]:
    optimizers: list[Any] = []

    def make(params: Any) -> Any:
        optimizers.append(hf.optim.SGD(params, lr=SCHEDULED_RATES, momentum=0.9))
        return optimizers[-1]

    task = hf.Task(
        scheduled_models(),
        F.cross_entropy,
        make,
        LOADER,
        epochs=SCHEDULED_EPOCHS,
        eval_loader=LOADER[:2] if evaluated else None,
        accumulate=accumulate,
        scheduler=SCHEDULES[name],
        scheduler_interval=interval,
    )
    plan = planned([task], machine(), [shards], [shards == 1])
    report = hf.train(task, machine(), plan=plan, **options)
    members = [[param.detach() for param in model.parameters()] for model in report["task"].models]
    return members, optimizers[-1].param_groups[0]["lr"].tolist()


@pytest.mark.parametrize("interval", ["epoch", "step"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_member_is_scheduled_as_alone(name: str, interval: str) -> None:
    for accumulate, evaluated in ((1, False), (2, True)):
        members, rates = scheduled(name, interval, accumulate, evaluated)
        for row, (model, rate) in enumerate(zip(scheduled_models(), SCHEDULED_RATES, strict=True)):
            schedule = SCHEDULES[name] if callable(SCHEDULES[name]) else SCHEDULES[name][row]
            params, last = scheduled_alone(model, rate, schedule, interval, accumulate, evaluated)
            assert rates[row] == pytest.approx(last, rel=1e-12)
            assert last != rate
            for param, expected in zip(members[row], params, strict=True):
                torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-12)


def test_members_of_several_arrays_have_their_own() -> None:
    torch.manual_seed(0)
    members = [(nn.Linear(6, 3) if k % 2 else nn.Sequential(nn.Linear(6, 3))).double() for k in range(3)]
    before = copy.deepcopy(members)
    makes = [step_lr, warm_up, plateau]
    task = hf.Task(
        members,
        F.cross_entropy,
        lambda params: hf.optim.SGD(params, lr=SCHEDULED_RATES, momentum=0.9),
        LOADER,
        epochs=SCHEDULED_EPOCHS,
        scheduler=makes,
    )
    after = hf.train(task, machine())["task"].models
    for model, rate, make, result in zip(before, SCHEDULED_RATES, makes, after, strict=True):
        params, _ = scheduled_alone(model, rate, make, "epoch", 1, False)
        for param, expected in zip(result.parameters(), params, strict=True):
            torch.testing.assert_close(param, expected, rtol=1e-12, atol=1e-12)


def test_who_writes_into_a_result_changes_no_report() -> None:
    def filled(result: hf.Step | hf.Evaluation) -> None:
        result.losses.fill_(torch.nan)

    optimizer: Any = partial(hf.optim.SGD, lr=SCHEDULED_RATES)
    options: dict[str, Any] = {"epochs": 3, "eval_loader": LOADER[:2], "restore_best": True}
    task = hf.Task(scheduled_models(), F.cross_entropy, optimizer, LOADER, **options)
    expected = hf.train(task, machine())["task"]
    report = hf.train(dataclasses.replace(task, callbacks=[filled]), machine(), on_result=filled)["task"]
    for name in ("losses", "eval_losses", "best_epochs"):
        assert torch.equal(getattr(report, name), getattr(expected, name))
