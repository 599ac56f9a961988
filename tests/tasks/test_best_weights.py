"""Members of hf.train that stop by patience, and end with their best weights, equal each of them trained alone."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf
from tests.tasks.resumed import CutError, assert_equal
from tests.trained import machine, planned

EPOCHS = 7
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
class Case:
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
            epochs=EPOCHS,
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
        return hf.train(task, on, plan=plan, checkpoint=root, every=1, **options)["best"]


CASES = [
    Case(),
    Case(patience=2),
    Case(patience=1, least=0.01, mode="spilled"),
    Case(patience=2, restores=False, mode="spilled"),
    Case(mode="kept"),
    Case(patience=1, compile=True),
]


def alone(case: Case, row: int) -> tuple[int, int, list[Tensor]]:
    """Train one member as people do: its best epoch, its epochs, and its tensors in the end."""
    model = models()[row]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[row], momentum=0.9)
    best, best_epoch, waited, state = float("inf"), -1, 0, copy.deepcopy(model.state_dict())
    epoch = 0
    for epoch in range(EPOCHS):
        model.train()
        for inputs, target in TRAINED:
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), target).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            loss = torch.stack([F.cross_entropy(model(inputs), target) for inputs, target in EVALUATED]).mean().item()
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


@pytest.mark.parametrize("case", CASES, ids=str)
def test_members_end_as_alone(case: Case) -> None:
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
    ended = [report.stopped.get(row, EPOCHS * len(TRAINED)) for row in range(len(RATES))]
    assert ended == [epochs * len(TRAINED) for _, epochs, _ in expected]


def test_an_array_holds_its_best_weights_and_its_optimizer_goes_on() -> None:
    case, restored, plain = CASES[0], hf.fuse(models()), hf.fuse(models())
    optimizers = [hf.optim.SGD(array.parameters(), lr=RATES, momentum=0.9) for array in (restored, plain)]
    report = case.train(_with(restored, optimizers[0]))
    without = _with(plain, optimizers[1], restore_best=False)
    hf.train(without, machine())
    for row in range(len(RATES)):
        torch.testing.assert_close([*restored[row].state_dict().values()], alone(case, row)[2], rtol=1e-9, atol=1e-11)
    states = [[entry["momentum_buffer"] for entry in optimizer.state.values()] for optimizer in optimizers]
    assert_equal(*states)
    assert report.best_epochs is not None


def _with(array: hf.FusedModule, optimizer: Any, restore_best: bool = True) -> hf.Task:
    return hf.Task(
        array,
        F.cross_entropy,
        optimizer,
        TRAINED,
        epochs=EPOCHS,
        eval_loader=EVALUATED,
        restore_best=restore_best,
        name="best",
    )


@pytest.mark.parametrize("cut", [2, 5])
@pytest.mark.parametrize("case", CASES[:4], ids=str)
def test_a_run_goes_on_with_its_best_weights(case: Case, cut: int, tmp_path: Path) -> None:
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


def test_a_killed_run_goes_on_with_its_best_weights(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    killed = subprocess.run([sys.executable, "-m", __spec__.name, str(tmp_path), "11"], cwd=root, check=False)
    assert killed.returncode == -signal.SIGKILL
    case = CASES[1]
    assert_equal(tensors(case.train(case.task(), tmp_path)), tensors(case.train(case.task())))


def test_a_finished_run_goes_on_for_more_epochs(tmp_path: Path) -> None:
    """The save holds the members as trained last, not their best weights."""
    case = CASES[0]
    short = hf.Task(**{**vars(case.task()), "epochs": 4})
    case.train(short, tmp_path)
    assert_equal(tensors(case.train(case.task(), tmp_path)), tensors(case.train(case.task())))


def test_a_save_without_best_weights_is_refused(tmp_path: Path) -> None:
    case = CASES[0]
    case.train(Case(restores=False).task(), tmp_path)
    with pytest.raises(hf.CheckpointError, match=r"saved without restore_best, so that the best weights of the task"):
        case.train(case.task(), tmp_path)


def test_a_save_by_another_rule_is_refused(tmp_path: Path) -> None:
    Case(patience=9).train(Case(patience=9).task(), tmp_path)
    with pytest.raises(hf.CheckpointError, match=r"with mode and least \['min', 0.0\], not \['min', 0.5\]"):
        Case(patience=9).train(Case(patience=9, least=0.5).task(), tmp_path)


def test_stops_of_on_result_count_as_well() -> None:
    """A stopped member ends with its best weights until then."""
    case = CASES[0]
    report = case.train(case.task(), on_result=lambda result: [1] if result.epoch == 2 else [])
    assert report.stopped[1] == 7
    assert report.best_epochs[1] <= 1
    fewer = hf.Task(**{**vars(case.task()), "epochs": 2})
    assert_equal(tensors(report)[1], tensors(case.train(fewer))[1])
    whole = case.train(case.task())
    assert_equal(tensors(report)[2], tensors(whole)[2])


def test_members_of_several_arrays() -> None:
    """Of two shapes; each with its own best epoch."""
    torch.manual_seed(1)
    mixed = [
        nn.Sequential(nn.Linear(6, 4 + row % 2), nn.Tanh(), nn.Linear(4 + row % 2, 3)).double() for row in range(4)
    ]
    case = Case(patience=2)
    report = hf.train(case.task(mixed), machine())["best"]
    for row in range(4):
        single = hf.train(case.task([mixed[row]], RATES[row : row + 1]), machine())["best"]
        torch.testing.assert_close(tensors(report)[row], tensors(single)[0], rtol=1e-9, atol=1e-11)
        assert report.best_epochs is not None
        assert single.best_epochs is not None
        assert report.best_epochs[row] == single.best_epochs[0]


def test_processes_of_a_cluster(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle")
    on = hf.Machine([hf.Device("cpu:0", memory="1GiB")], host="2GiB", disk=tmp_path)
    case, module = Case(patience=1), hf.fuse(models())
    optimizer = hf.optim.SGD(module.parameters(), lr=RATES, momentum=0.9)
    task = hf.Task(**{**vars(case.task(module)), "optimizer": optimizer, "seed": 1})
    report = hf.train(task, hf.Cluster(on))["best"]  # type: ignore[arg-type]
    expected = case.train(case.task(seed=1))
    assert_equal(report.best_epochs, expected.best_epochs)
    assert report.stopped == expected.stopped
    assert_equal([[*module[row].state_dict().values()] for row in range(4)], tensors(expected))


def test_nan_is_no_improvement() -> None:
    """A member that never has a loss stays as it is; one that diverges ends as it was before."""
    members = models()
    with torch.no_grad():
        next(members[2].parameters()).fill_(torch.nan)
    report = Case().train(Case().task(members, [0.1, 1e200, 0.1, 0.1]))
    assert report.best_epochs[2] == -1
    assert report.final_losses[2].isnan()
    assert_equal(tensors(report)[0], tensors(Case().train(Case().task(rates=[0.1] * 4)))[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 3}, "patience is 3; give hf.Patience"),
        ({"patience": hf.Patience(3), "eval_loader": None}, "go by evaluations; give an eval_loader"),
        ({"restore_best": True, "eval_loader": None}, "go by evaluations; give an eval_loader"),
    ],
)
def test_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(hf.PlanError, match=message):
        hf.Task(**{**vars(Case(restores=False).task()), **options})


def test_members_that_train_a_tensor_together() -> None:
    head = nn.Linear(4, 3).double()
    tied = [nn.Sequential(nn.Linear(6, 4).double(), head) for _ in range(4)]
    with pytest.raises(hf.PlanError, match=r"'1.weight' is one tensor that all members train"):
        hf.train(Case().task(tied, [0.1] * 4), machine())


def _killed(root: Path, last: int) -> None:
    """Train until a minibatch, at which the process is killed."""

    def end(heard: Any) -> None:
        if isinstance(heard, hf.Step) and heard.epoch * len(TRAINED) + heard.step == last:
            os.kill(os.getpid(), signal.SIGKILL)

    CASES[1].train(CASES[1].task(callbacks=[end]), root)


if __name__ == "__main__":
    torch.set_num_threads(1)
    _killed(Path(sys.argv[1]), int(sys.argv[2]))
