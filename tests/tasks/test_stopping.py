"""hf.train(on_result=...): who stops keeps what it was then, and the others do not notice, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.tasks.resumed import CutError, array, assert_equal, planned_as, shuffled, task_with
from tests.trained import BATCHES, EPOCHS, MEMBERS, Way, adamw, batches, cross_entropy, machine, momentum, planned, task


@dataclass(frozen=True)
class Case:
    """How a task is trained and cut into shards, and when members stop: after so many minibatches, or an evaluation."""

    way: Way
    mode: str
    evaluated: bool = False
    steps: tuple[int | None, int | None, int | None] = (None, 3, None)

    def __str__(self) -> str:
        way = f"{self.way.optimizer.__name__}-{self.way.clip}-{self.way.accumulate}"
        return f"{way}-{self.mode}-{'eval' if self.evaluated else 'train'}-{self.steps}"


CASES = [
    Case(Way(momentum), "resident"),
    Case(Way(adamw, 0.5), "spilled", steps=(2, 7, None)),
    # In the midst of a group of minibatches.
    Case(Way(adamw, 0.5, 2), "spilled", True, (1, None, 6)),
    Case(Way(momentum, None, 3), "kept", steps=(2, 2, None)),
    Case(Way(adamw), "kept", True, (None, 5, 4)),
    # All of them: the task ends.
    Case(Way(adamw), "resident", steps=(3, 1, 4)),
    Case(Way(momentum, 0.5, 2), "spilled", True, (7, 5, 3)),
    Case(Way(adamw, 0.5, 3), "kept", True, (2, 2, 2)),
    Case(Way(adamw), "spilled", steps=(10, 10, 10)),
]


def stops(cases: Sequence[Case]) -> Callable[[hf.Step | hf.Evaluation], list[int]]:
    """Lets members stop where the cases say; names of tasks are ``t0``, ``t1``, ..."""

    def asked(result: hf.Step | hf.Evaluation) -> list[int]:
        case = cases[int(result.task[1:])]
        return [member for member, last in enumerate(case.steps) if last == done(result)]

    return asked


def done(result: hf.Step | hf.Evaluation) -> int:
    """How many minibatches have ended with one; -1 for an evaluation."""
    return result.epoch * BATCHES + result.step + 1 if isinstance(result, hf.Step) else -1


@dataclass(frozen=True)
class Run:
    """What a run left: by task the report's numbers, and each member's tensors with its optimizer's state."""

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
    made = [array(place) for place in range(len(cases))]
    owns = [case.way.optimizer(list(fused.parameters())) for case, fused in zip(cases, made, strict=True)]
    tasks = [
        task_with(fused, own, case.way, place, evaluated=case.evaluated, epochs=epochs)
        for place, (case, fused, own) in enumerate(zip(cases, made, owns, strict=True))
    ]
    on = machine(devices)
    plan = planned_as(tasks, on, [case.mode for case in cases])
    report = hf.train(tasks, on, policy, plan=plan, checkpoint=root, every=1, on_result=on_result)
    for name, peak in report.peak.items():
        assert report.timeline.peak[name] <= peak <= plan.devices[name]
    return Run(
        [report[one.name].losses for one in tasks],
        [report[one.name].eval_losses for one in tasks],
        [dict(report[one.name].stopped) for one in tasks],
        [[rows(fused, own, row) for row in range(MEMBERS)] for fused, own in zip(made, owns, strict=True)],
        len(report.timeline.actions),
    )


def rows(fused: hf.FusedModule, optimizer: Any, row: int) -> list[Tensor]:
    """Everything that is of one member."""
    stacks = [tensor for name, tensor in fused.state_dict().items() if not name.startswith("frozen")]
    for entry in optimizer.state.values():
        stacks += [entry[key] for key in sorted(entry)]
    stacks += [optimizer.param_groups[0]["lr"].as_subclass(Tensor)]
    return [stack[row].clone() for stack in stacks]


def check(case: Case, found: Run, whole: Run, place: int = 0) -> None:
    """Against the run where nobody stops: who goes on is the same, who stopped has no losses from there on."""
    steps = [EPOCHS * BATCHES if last is None else last for last in case.steps]
    assert len(found.losses[place]) == max(steps)
    for member, last in enumerate(steps):
        losses = found.losses[place][:, member]
        assert_equal(losses[:last], whole.losses[place][:last, member])
        assert losses[last:].isnan().all()
        if case.steps[member] is None:
            assert_equal(found.members[place][member], whole.members[place][member])
        evaluations, wanted = found.evaluations[place], whole.evaluations[place]
        if evaluations is not None and wanted is not None:
            # Who stops with the last minibatch of an epoch is not evaluated after it.
            ended = (last - 1) // BATCHES if case.steps[member] is not None else EPOCHS
            assert_equal(evaluations[:ended, :, member], wanted[:ended, :, member])
            assert evaluations[ended:, :, member].isnan().all()
    assert found.stopped[place] == {member: last for member, last in enumerate(case.steps) if last is not None}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_who_stops_leaves_the_others_as_they_are(case: Case) -> None:
    whole = trained([case])
    check(case, found := trained([case], stops([case])), whole)
    # Alone they would have stopped in the midst of a run that is otherwise the same: all stop at once there.
    for last in {last for last in case.steps if last is not None}:
        ended = trained([case], lambda result, last=last: done(result) == last)
        for member, own in enumerate(case.steps):
            if own == last:
                assert_equal(found.members[0][member], ended.members[0][member])


@pytest.mark.parametrize("case", [Case(Way(momentum), "spilled"), Case(Way(adamw, 0.5), "resident", True)], ids=str)
def test_a_task_that_is_stopped_is_one_of_fewer_epochs(case: Case) -> None:
    fewer = trained([case], epochs=1)
    stopped = trained([case], lambda result: result.epoch == 0 and ends(result, case))
    assert_equal(stopped.losses, fewer.losses)
    assert_equal(stopped.evaluations, fewer.evaluations)
    assert_equal(stopped.members, fewer.members)
    # What was to come is neither computed nor loaded, but for what was on its way.
    assert fewer.spans <= stopped.spans <= fewer.spans + 8


@pytest.mark.parametrize("mode", ["resident", "spilled", "kept"])
def test_a_task_that_is_stopped_is_one_of_fewer_minibatches(mode: str) -> None:
    def members(last: int | None) -> list[list[Tensor]]:
        fused, loader = array(0), batches(torch.float64, 5)
        own = momentum(list(fused.parameters()))
        one = task(fused, Way(lambda params: own), loader if last else loader[:3], epochs=2 if last else 1)
        plan = planned([one], machine(), [3], [mode == "resident"], [mode == "kept"])
        hf.train(one, machine(), plan=plan, on_result=lambda result: last is not None and result.step == last)
        return [rows(fused, own, row) for row in range(MEMBERS)]

    assert_equal(members(2), members(None))


def ends(result: hf.Step | hf.Evaluation, case: Case) -> bool:
    return isinstance(result, hf.Evaluation) if case.evaluated else result.step == BATCHES - 1


@pytest.mark.parametrize(("devices", "policy"), [(1, "fifo"), (2, "patient-lrtf"), (3, "sharded-lrtf")])
def test_tasks_stop_beside_others(devices: int, policy: str) -> None:
    cases = [CASES[1], CASES[6], Case(Way(momentum), "resident", steps=(1, 1, 1)), CASES[7], CASES[4]]
    whole = trained(cases, devices=devices)
    found = trained(cases, stops(cases), devices=devices, policy=policy)
    for place, case in enumerate(cases):
        check(case, found, whole, place)


@pytest.mark.parametrize("cut", [2, 4, 7])
@pytest.mark.parametrize("case", CASES[1:8], ids=str)
def test_a_run_with_stops_goes_on_bit_for_bit(case: Case, cut: int, tmp_path: Path) -> None:
    expected = trained([case], stops([case]))
    heard: list[int] = []

    def asked(result: hf.Step | hf.Evaluation) -> list[int]:
        if isinstance(result, hf.Step):
            heard.append(result.epoch * BATCHES + result.step)
            if len(heard) > cut:
                raise CutError
        return stops([case])(result)

    last = EPOCHS * BATCHES if None in case.steps else max(filter(None, case.steps))
    if last > cut:
        with pytest.raises(hf.TrainError) as raised:
            trained([case], asked, root=tmp_path)
        assert isinstance(raised.value.__cause__, CutError)
    again: list[int] = []

    def listening(result: hf.Step | hf.Evaluation) -> list[int]:
        if isinstance(result, hf.Step):
            again.append(result.epoch * BATCHES + result.step)
        return stops([case])(result)

    found = trained([case], listening, root=tmp_path)
    # Whoever decides has heard everything once.
    assert again == list(range(last))
    for one in (found, trained([case], None, root=tmp_path)):
        assert_equal(one.results, expected.results)


def small(models: Sequence[nn.Module] | None = None, **options: Any) -> hf.Task:
    torch.manual_seed(0)
    found = models or [nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double() for _ in range(3)]
    given: dict[str, Any] = {"epochs": 2, "name": "small"} | options
    return hf.Task(found, cross_entropy, lambda params: hf.optim.Adam(params, lr=0.01), shuffled(0), **given)


ANSWERS: dict[str, tuple[Callable[[Any], Any], dict[int, int]]] = {
    "None": (lambda result: None, {}),
    "False": (lambda result: False, {}),
    "nobody": (lambda result: [], {}),
    "True": (lambda result: True, {0: 1, 1: 1, 2: 1}),
    "members": (lambda result: {1, 2}, {1: 1, 2: 1}),
    "a generator": (lambda result: (member for member in [2]), {2: 1}),
    "a tensor of members": (lambda result: torch.tensor([0]), {0: 1}),
    "a mask": (lambda result: result.losses > result.losses.median(), None),
    "a mask of numpy": (lambda result: np.array([False, True, False]), {1: 1}),
    "members of numpy": (lambda result: np.array([1, 2]), {1: 1, 2: 1}),
    "a bool of numpy": (lambda result: np.float64(result.losses.max()) < 99, {0: 1, 1: 1, 2: 1}),
    "a mask of everybody": (lambda result: result.losses < 99, {0: 1, 1: 1, 2: 1}),
    "a bool in a tensor": (lambda result: result.losses.isnan().all(), {}),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    answer, wanted = ANSWERS[name]
    stopped = hf.train(small(), machine(), on_result=answer)["small"].stopped
    assert stopped == wanted or (wanted is None and len(stopped) in (1, 2))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("stop", r"on_result gave 'stop' for the task 'small': give None or False .* True to stop"),
        (1, "on_result gave 1 for the task"),
        ([True, False, False], r"on_result gave \[True, False, False\]"),
        ([3], r"stops member 3 of the task 'small', but was asked for members \[0, 1, 2\]"),
        (torch.tensor([True]), r"bool tensor of shape \[1\] for 3 members"),
        (torch.ones(3), r"on_result gave \[1.0, 1.0, 1.0\]"),
        ([0.5], r"on_result gave \[0.5\]"),
        ({0: False}, "on_result gave {0: False}"),
    ],
    ids=str,
)
def test_what_is_no_answer_is_told(answer: Any, message: str) -> None:
    with pytest.raises(hf.TrainError, match=message):
        hf.train(small(), machine(), on_result=lambda result: answer)


def test_who_trains_together_stops_together() -> None:
    head = nn.Linear(4, 3).double()
    models = [nn.Sequential(nn.Linear(6, 4).double(), head) for _ in range(2)]
    with pytest.raises(hf.TrainError, match=r"stops members \[1\] alone, but '1.weight' is one tensor"):
        hf.train(small(models), machine(), on_result=lambda result: [1])
    assert hf.train(small(models), machine(), on_result=lambda result: True)["small"].stopped == {0: 1, 1: 1}


def test_members_of_several_arrays_stop_by_their_numbers() -> None:
    torch.manual_seed(0)
    models = [(nn.Linear(6, 3) if k % 2 else nn.Sequential(nn.Linear(6, 3))).double() for k in range(4)]
    steps = {0: 2, 3: 1, 1: 4}

    def asked(result: hf.Step | hf.Evaluation) -> list[int]:
        return [m for m in result.members if steps.get(m) == result.epoch * BATCHES + result.step + 1]

    whole, found = (
        hf.train(small(models), machine())["small"],
        hf.train(small(models), machine(), on_result=asked)["small"],
    )
    assert found.stopped == steps
    assert list(found.stopped) == [0, 1, 3]
    assert len(found.losses) == EPOCHS * BATCHES
    for member in range(4):
        last = steps.get(member, EPOCHS * BATCHES)
        assert_equal(found.losses[:last, member], whole.losses[:last, member])
        assert found.losses[last:, member].isnan().all()
    assert_equal(found.models[2].state_dict(), whole.models[2].state_dict())


def test_members_of_a_compiled_task_stop_as_well() -> None:
    def once(on_result: Any = None) -> Any:
        return hf.train(small(epochs=2, compile=True, seed=1), machine(), on_result=on_result)["small"]

    # The first run compiles.
    once()
    whole, found = once(), once(lambda result: [1] if done(result) == 4 else [])
    ended = once(lambda result: done(result) == 4)
    assert found.stopped == {1: 4}
    assert_equal(found.losses[:, [0, 2]], whole.losses[:, [0, 2]])
    assert_equal(found.models[2].state_dict(), whole.models[2].state_dict())
    assert_equal(found.models[1].state_dict(), ended.models[1].state_dict())
    assert found.losses[4:, 1].isnan().all()
    assert len(ended.losses) == 4
