"""Members of hf.train that stop by patience, and end with their best weights, equal each of them trained alone."""

from __future__ import annotations

import copy
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
