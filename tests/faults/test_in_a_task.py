"""An error in a run is raised in the caller, harms no other task, and leaves nothing behind."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.optim.base import FusedOptimizer
from hfusion.tasks.task import Step
from tests.faults.arrays import LOADER, WAY, Pair, Small, array, by_loop, equal_states, nothing_left, state_of
from tests.trained import BATCHES, EPOCHS, Way, assert_same, machine, plain, planned, task


@dataclass(frozen=True)
class Broken:
    """A loader that says it is as long as any, and does something else at minibatch ``at`` of the second epoch."""

    at: int
    act: Callable[[Pair], Pair | None]
    epochs: list[None]

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Pair]:
        self.epochs.append(None)
        for index, pair in enumerate(LOADER):
            # Planning reads the first minibatch.
            minibatch = self.act(pair) if len(self.epochs) > 2 and index == self.at else pair
            if minibatch is None:
                return
            yield minibatch


class Long(list[Pair]):
    """A loader that gives one minibatch more than it says."""

    def __init__(self) -> None:
        super().__init__([*LOADER, LOADER[0]])

    def __len__(self) -> int:
        return BATCHES


def breaks(act: Callable[[Pair], Pair | None], at: int = 1) -> dict[str, Any]:
    """Return the arguments of a task whose loader breaks."""
    return {"loader": Broken(at, act, [])}


def unreadable(pair: Pair) -> Pair:
    raise OSError("the data set is gone")


def interrupt(step: Step) -> None:
    if (step.epoch, step.step) == (1, 1):
        raise ValueError("stop at the second minibatch of epoch 1")


def at_the_end(step: Step) -> None:
    if (step.epoch, step.step) == (EPOCHS - 1, BATCHES - 1):
        raise ValueError("after the last minibatch")


FAULTS: dict[str, tuple[Callable[[], dict[str, Any]], type[BaseException], str]] = {
    "loss": (lambda: breaks(lambda pair: (pair[0], pair[1] + 3)), IndexError, "Target . is out of bounds"),
    "loader": (lambda: breaks(unreadable), OSError, "the data set is gone"),
    "first of an epoch": (lambda: breaks(unreadable, 0), OSError, "the data set is gone"),
    "too few": (
        lambda: breaks(lambda pair: None),
        PlanError,
        "'bad': the loader gave 1 minibatches in epoch 1, but its length is 5",
    ),
    "too many": (
        lambda: {"loader": Long()},
        PlanError,
        "'bad': the loader gave more minibatches in epoch 0, but its length is 5",
    ),
    "not a pair": (lambda: breaks(lambda pair: (*pair, 1)), PlanError, "'bad': a minibatch of the loader is 3 values"),
    "another shape": (
        lambda: breaks(lambda pair: (pair[0][:, :5], pair[1])),
        RuntimeError,
        "shapes cannot be multiplied",
    ),
    "other operators": (
        lambda: breaks(lambda pair: (pair[0].repeat(1, 2), pair[1])),
        PlanError,
        "'bad': a minibatch of another kind than the first needs another program",
    ),
    "callback": (lambda: {"callbacks": [interrupt]}, ValueError, "stop at the second minibatch of epoch 1"),
    "last callback": (lambda: {"callbacks": [at_the_end]}, ValueError, "after the last minibatch"),
}


# Half of them in each mode; where a unit itself fails, in both.
MODES = [*((fault, bool(index % 2)) for index, fault in enumerate(FAULTS)), ("loss", True), ("callback", False)]


@pytest.mark.parametrize(("fault", "resident"), MODES)
def test_a_fault_in_one_task(fault: str, resident: bool, on: hf.Machine) -> None:
    make, kind, words = FAULTS[fault]
    before = [state_of(array(index)) for index in range(3)]
    good, late = (task(array(index), WAY, LOADER, name) for index, name in ((0, "good"), (2, "late")))
    more = make()
    bad = task(array(1), WAY, more.pop("loader", LOADER), "bad", **more)
    tasks = [good, bad, late]
    plan = planned(tasks, on, [2, 3, 1], [resident] * 3)
    if isinstance(bad.loader, Broken):
        bad.loader.epochs.clear()
    with (
        nothing_left(on),
        pytest.raises(hf.TrainError, match=r"task 'bad' failed: .*; finished before: good ") as raised,
    ):
        hf.train(tasks, on, "fifo", plan=plan)
    cause, report = raised.value.__cause__, raised.value.report
    assert isinstance(cause, kind)
    with pytest.raises(kind, match=words):
        raise cause
    assert list(report) == ["good"]
    losses, after = by_loop(0)
    assert torch.equal(report["good"].losses, losses)
    assert equal_states(array(0), after)
    assert [type(model) for model in report["good"].models] == [Small] * 3
    assert equal_states(array(2), before[2])
    for module, state in zip(map(array, range(3)), before, strict=True):
        assert all(tensor.isfinite().all() for tensor in module.state_dict().values())
        module.load_state_dict(state)
    again = [task(array(index), WAY, LOADER, original.name) for index, original in enumerate(tasks)]
    with nothing_left(on):
        assert_same([array(index) for index in range(3)], again, [by_loop(index) for index in range(3)], on, plan)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_ending_the_process_is_no_fault_of_a_task(kind: type[BaseException], on: hf.Machine) -> None:
    def end(result: object) -> None:
        raise kind("enough")

    with nothing_left(on), pytest.raises(kind, match="enough"):
        hf.train([task(array(0), WAY, LOADER, "good")], on, on_result=end)


def test_a_fault_on_one_of_two_devices(on: hf.Machine) -> None:
    """The other device's task is at its end when the fault comes, and in the report."""
    ended = threading.Event()

    def tell(step: Step) -> None:
        if (step.epoch, step.step) == (EPOCHS - 1, BATCHES - 1):
            ended.set()

    def fail(step: Step) -> None:
        ended.wait()
        raise ValueError("now")

    options = replace(WAY, clip=None)
    expected = plain(array(0), options, LOADER)
    tasks = [
        task(array(0), options, LOADER, "good", callbacks=[tell]),
        task(array(1), options, LOADER, "bad", callbacks=[fail]),
    ]
    two = machine(2, host="1B", disk=on.disk)
    plan = planned(tasks, two, [1, 2], [False, False])
    with nothing_left(on), pytest.raises(hf.TrainError, match=r"'bad' failed: ValueError: now; .*: good ") as raised:
        hf.train(tasks, two, plan=plan)
    assert torch.equal(raised.value.report["good"].losses, expected[0])
    assert equal_states(array(0), expected[1])


def test_a_task_that_failed_at_its_very_end_has_not_finished(on: hf.Machine) -> None:
    """All its units have run when its last callback fails."""
    bad = task(array(0), Way(), LOADER, "bad", callbacks=[at_the_end])
    for count in (1, 2):
        with nothing_left(on), pytest.raises(hf.TrainError, match="finished before: none") as raised:
            hf.train([bad], on, plan=planned([bad], on, [count], [False]))
        assert not raised.value.report


# From Python 3.12 on fork warns where there are threads.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("fails", [False, True])
def test_processes_that_read_for_a_loader_are_gone(fails: bool, on: hf.Machine) -> None:
    x, y = (torch.cat(parts) for parts in zip(*LOADER, strict=True))
    loader = DataLoader(TensorDataset(x, y), 6, num_workers=1)
    loader_task = task(array(0), WAY, loader, callbacks=[interrupt] if fails else [], eval_loader=loader)  # type: ignore[arg-type]
    before = multiprocessing.active_children()
    with nothing_left(on), pytest.raises(hf.TrainError) if fails else nullcontext():
        hf.train([loader_task], on)
    assert set(multiprocessing.active_children()) <= set(before)


@pytest.mark.parametrize("where", ["factory", "first minibatch"])
def test_a_fault_before_anything_runs_is_raised_as_it_is(where: str, on: hf.Machine) -> None:
    def fail(*args: Any) -> Any:
        raise LookupError(where)

    def factory(params: list[nn.Parameter]) -> FusedOptimizer:
        return fail() if where == "factory" else hf.optim.SGD(params, lr=0.1)

    class Unread:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[Pair]:
            return iter(map(fail, range(2)))

    before = state_of(array(0))
    loader = Unread() if where == "first minibatch" else LOADER
    bad = hf.Task(array(0), nn.functional.cross_entropy, factory, loader, name="bad")
    with nothing_left(on), pytest.raises(LookupError, match=where) as raised:
        hf.train(bad, on)
    assert raised.value.__notes__ == ["in the task 'bad'"]
    assert equal_states(array(0), before)


def fails(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise LookupError("no such word")


LOSSES: dict[str, tuple[Any, str]] = {
    "fails": (
        fails,
        r"failed at its first call, with zeros of shape \[3, 6, 3\] as .* 3 members: LookupError: no such",
    ),
    "no function": (1, "must be a function, such as F.cross_entropy, got int"),
    "nothing": (lambda y, t: None, "of 3 members have NoneType; the loss must reduce to one number per member"),
    "a number": (lambda y, t: y.sum().item(), "of 3 members have float; the loss must reduce to one number per member"),
    "of samples": (lambda y, t: y.sum(1), r"of 3 members have shape \[3, 6\]; the loss must reduce to one number"),
    "two": (lambda y, t: (y.sum(), t), "of 3 members have tuple; the loss must reduce to one number per member"),
    "whole numbers": (lambda y, t: y.argmax(), "of dtype torch.int64, have no gradient, so nothing would be trained"),
    "detached": (lambda y, t: y.detach().sum(), "of dtype torch.float64, have no gradient"),
}


@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_that_cannot_be_used(case: str, on: hf.Machine) -> None:
    loss, words = LOSSES[case]
    before = state_of(array(0))
    with nothing_left(on), pytest.raises(PlanError, match=f"^task 'bad': the loss.*{words}") as raised:
        hf.train(task(array(0), WAY, LOADER, "bad", loss=loss), on)
    assert isinstance(raised.value.__cause__, LookupError) or case != "fails"
    assert equal_states(array(0), before)
