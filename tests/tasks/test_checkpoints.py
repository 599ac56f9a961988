"""hf.train(checkpoint=...): a run that was cut off and goes on is the uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from hfusion.checkpoint.files import read
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.actions import Act
from hfusion.schedule.plan import Plan
from tests.trained import BATCHES, EPOCHS, Way, adamw, cross_entropy, fused, machine, momentum, planned, task

ROOT = Path(__file__).resolve().parents[2]


def cut(epoch: int, step: int) -> Callable[[Any], None]:
    """A callback that ends the run at a minibatch, before that is saved."""

    def raises(heard: Any) -> None:
        if isinstance(heard, hf.Step) and (heard.epoch, heard.step) == (epoch, step):
            raise CutError

    return raises


@dataclass(frozen=True)
class Case:
    """How a task is trained and cut into shards; minibatches between saves, and where the run ends."""

    settings: Way
    mode: str
    every: int | None
    at: tuple[int, int]
    evaluated: bool = False

    def __str__(self) -> str:
        label = f"{self.settings.optimizer.__name__}-{self.settings.clip}-{self.settings.accumulate}"
        return f"{label}-{self.mode}-every{self.every}-cut{self.at}-{'eval' if self.evaluated else 'train'}"


CASES = [
    Case(Way(), "resident", 1, (0, 1)),
    Case(Way(momentum, 0.5), "spilled", 2, (0, 4)),
    Case(Way(adamw, 0.5, 2), "spilled", 1, (1, 2), evaluated=True),
    Case(Way(momentum, None, 2), "kept", 3, (1, 4), evaluated=True),
    Case(Way(adamw, [0.1, 0.5, 2.0]), "kept", None, (1, 0), evaluated=True),
    Case(Way(momentum), "spilled", 4, (1, 3)),
    Case(Way(adamw, 0.5, 3), "resident", 1, (1, 3), evaluated=True),
]


def saved_at(folder: Path) -> int:
    """Return the number of minibatches after which an array was last saved."""
    return read(folder).step


def trained(
    cases: list[Case], devices: int, root: Path | None, cuts: bool = False, begun: int | None = None
) -> list[Any]:
    """Everything that a run of these tasks gives; ``begun``: how many minibatches it does not train again."""
    arrays = [array(index) for index in range(len(cases))]
    tasks = [
        task_with(
            fused,
            case.settings.optimizer(list(fused.parameters())),
            case.settings,
            index,
            evaluated=case.evaluated,
            callbacks=[cut(*case.at)] if cuts and index == len(cases) - 1 else [],
        )
        for index, (case, fused) in enumerate(zip(cases, arrays, strict=True))
    ]
    on = machine(devices)
    plan = planned_as(tasks, on, [case.mode for case in cases])
    every = None if root is None else cases[0].every
    if not cuts:
        report = hf.train(tasks, on, plan=plan, checkpoint=root, every=every)
        steps = {action.step for action in report.timeline.actions if action.act is Act.FORWARD}
        assert begun is None or steps == {*range(begun, BATCHES * EPOCHS)}
        return [results(report[hf_task.name], hf_task) for hf_task in tasks]
    with pytest.raises(hf.TrainError) as raised:
        hf.train(tasks, on, plan=plan, checkpoint=root, every=every)
    assert isinstance(raised.value.__cause__, CutError)
    return []


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_that_was_cut_goes_on_bit_for_bit(case: Case, tmp_path: Path) -> None:
    expected = trained([case], 1, None)
    trained([case], 1, tmp_path, cuts=True)
    reached = saved_at(tmp_path / "t0")
    assert 0 < reached < BATCHES * EPOCHS
    assert_equal(trained([case], 1, tmp_path, begun=reached), expected)
    assert saved_at(tmp_path / "t0") == BATCHES * EPOCHS
    # And once more, with nothing left to train.
    assert_equal(trained([case], 1, tmp_path, begun=BATCHES * EPOCHS), expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_tasks_go_on_from_where_each_one_is(devices: int, tmp_path: Path) -> None:
    cases = [CASES[1], CASES[2], CASES[3]]
    expected = trained(cases, devices, None)
    trained(cases, devices, tmp_path, cuts=True)
    assert_equal(trained(cases, devices, tmp_path), expected)


def test_a_loader_that_tells_its_position_is_asked(tmp_path: Path) -> None:
    def once(root: Path | None, loader: Counted, *callbacks: Any) -> list[Any]:
        optimizer = adamw(list((module := array(1)).parameters()))
        hf_task = task(module, Way(lambda params: optimizer), loader, callbacks=callbacks)
        return results(hf.train(hf_task, machine(), checkpoint=root, every=1 if root else None)["task"], hf_task)

    expected = once(None, whole := Counted())
    for at in ((0, 2), (1, 0), (1, 3)):
        with pytest.raises(hf.TrainError):
            once(tmp_path, Counted(), cut(*at))
    assert_equal(once(tmp_path, rest := Counted()), expected)
    assert rest.given == whole.given


def test_a_killed_process_goes_on_in_another(tmp_path: Path) -> None:
    for kill in (3, 7):
        command = [sys.executable, "-m", "tests.tasks.test_checkpoints", str(tmp_path), str(kill)]
        ended = subprocess.run(command, cwd=ROOT, timeout=120)
        assert ended.returncode == -signal.SIGKILL
        assert kill - 1 <= saved_at(tmp_path / "task") <= kill
    assert_equal(run(tmp_path, None), run(None, None))


def small(name: str = "small", members: int = 3, width: int = 4, **options: Any) -> hf.Task:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double() for _ in range(members)]
    arguments: dict[str, Any] = {"epochs": 2, "name": name} | options
    return hf.Task(models, cross_entropy, lambda params: hf.optim.Adam(params, lr=0.01), shuffled(0), **arguments)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (lambda: small("other"), r"holds saves of \['small'\].* none of \['other'\].* give the tasks the names"),
        (lambda: small(members=2), r"members was \['member 0', 'member 1', 'member 2'\] when it was saved, and is"),
        (lambda: small(width=5), r"0.weight is \[3, 4, 6\] .* and \[3, 5, 6\] .* here"),
        (lambda: small(epochs=1), r"was saved after 10 minibatches, and the task 'small' has 5: .* as many epochs"),
        (lambda: small(accumulate=2), r"accumulate was 1 when it was saved, and is 2 in the task 'small'"),
    ],
    ids=["name", "members", "shapes", "epochs", "accumulate"],
)
def test_a_save_of_something_else_is_refused(task: Callable[[], hf.Task], message: str, tmp_path: Path) -> None:
    hf.train(small(), machine(), checkpoint=tmp_path)
    with pytest.raises(hf.CheckpointError, match=message) as raised:
        hf.train(task(), machine(), checkpoint=tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_wrong_folders_are_refused(tmp_path: Path) -> None:
    hf.train(small(), machine(), checkpoint=tmp_path / "run")
    with pytest.raises(hf.CheckpointError, match="resume=True, or give a new folder"):
        hf.train(small(), machine(), checkpoint=tmp_path / "run", resume=False)
    with pytest.raises(hf.CheckpointError, match="is a checkpoint of one array"):
        hf.train(small(), machine(), checkpoint=tmp_path / "run" / "small")
    (tmp_path / "file").touch()
    with pytest.raises(hf.CheckpointError, match="file"):
        hf.train(small(), machine(), checkpoint=tmp_path / "file")
    with pytest.raises(hf.CheckpointError, match="every=0"):
        hf.train(small(), machine(), checkpoint=tmp_path / "new", every=0)
    with pytest.raises(hf.CheckpointError, match="every=2 is for saves, and there are none: give checkpoint="):
        hf.train(small(), machine(), every=2)
    array = hf.fuse([nn.Linear(2, 2)])
    hf.save(tmp_path / "mixed" / "small", array)
    with pytest.raises(hf.CheckpointError, match=r"was not saved by hf.train: load it by hf\.load"):
        hf.train(small(), machine(), checkpoint=tmp_path / "mixed")


# Runs that are interrupted and resumed: their tasks and their results.
@cache
def _captured(seed: int) -> tuple[hf.FusedModule, dict[str, Tensor]]:
    torch.manual_seed(seed)
    module = fused()
    return module, {name: tensor.clone() for name, tensor in module.state_dict().items()}


def array(seed: int) -> hf.FusedModule:
    """An array as it is before it is trained; captured once."""
    module, state = _captured(seed)
    module.load_state_dict(state)
    return module


def shuffled(seed: int, generator: torch.Generator | None = None) -> DataLoader[Any]:
    """Five minibatches in an order that is drawn again for every epoch; the last is smaller."""
    draw = torch.Generator().manual_seed(seed)
    inputs, targets = torch.randn(28, 6, generator=draw, dtype=torch.float64), torch.randint(3, (28,), generator=draw)
    return DataLoader(TensorDataset(inputs, targets), batch_size=6, shuffle=True, generator=generator)


class Counted:
    """A loader that saves its position, and cannot be read up to it again: it gives each minibatch once."""

    def __init__(self) -> None:
        self.given = 0
        self._first = 0

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, self._first = self._first, 0
        for index in range(first, 5):
            self.given += 1
            draw = torch.Generator().manual_seed(self.given)
            self._place = index + 1
            yield torch.randn(6, 6, generator=draw, dtype=torch.float64), torch.randint(3, (6,), generator=draw)

    def state_dict(self) -> dict[str, int]:
        return {"given": self.given, "place": self._place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.given, self._first = state["given"], state["place"]


class CutError(Exception):
    """Ends a run."""


def task_with(
    fused: hf.FusedModule, optimizer: FusedOptimizer, settings: Way, index: int, *, evaluated: bool, **more: Any
) -> hf.Task:
    """Task ``t0``, ``t1``, ... of an optimizer that exists, so that its state can be looked at."""
    task_settings = Way(lambda params: optimizer, settings.clip, settings.accumulate)
    loader = shuffled(index, torch.Generator().manual_seed(index) if evaluated else None)
    return task(fused, task_settings, loader, f"t{index}", eval_loader=shuffled(9) if evaluated else None, **more)


def planned_as(tasks: Sequence[hf.Task], on: hf.Machine, modes: Sequence[str]) -> Plan:
    """As `tests.trained.planned`, each task resident, or in four shards, spilled or with the last of them kept."""
    counts = [1 if mode == "resident" else 4 for mode in modes]
    return planned(tasks, on, counts, [mode == "resident" for mode in modes], [mode == "kept" for mode in modes])


def assert_equal(actual: Any, expected: Any) -> None:
    """Bit for bit."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def results(report: Any, hf_task: hf.Task) -> list[Any]:
    """The losses, the members and the optimizer's state."""
    make, models = hf_task.optimizer, hf_task.models
    assert callable(make)
    assert isinstance(models, hf.FusedModule)
    # The function returns the same optimizer each time.
    optimizer = make(list(models.parameters()))
    state = [entry[key] for entry in optimizer.state.values() for key in sorted(entry)]
    losses = [report.losses] if report.eval_losses is None else [report.losses, report.eval_losses]
    return [tensor.clone() for tensor in (*losses, *models.state_dict().values(), *state)]


def run(root: Path | None, kill: int | None) -> list[Any]:
    """A short run; the process is killed at a minibatch."""

    def killed(heard: Any) -> None:
        if isinstance(heard, hf.Step) and heard.epoch * 5 + heard.step == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    module = array(3)
    optimizer = adamw(list(module.parameters()))
    hf_task = task(module, Way(lambda params: optimizer), shuffled(4), callbacks=[killed], eval_loader=shuffled(5))
    report = hf.train(hf_task, machine(), checkpoint=root, every=1 if root else None)
    return results(report["task"], hf_task)


if __name__ == "__main__":
    torch.set_num_threads(1)
    run(Path(sys.argv[1]), int(sys.argv[2]))
