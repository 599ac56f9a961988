"""Arrays in Lightning: every member as alone, with limits and schedules of its own, saved and continued."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf

lightning = pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
    pytest.mark.filterwarnings("ignore:.*treespec"),
    pytest.mark.filterwarnings("ignore:.*The number of training batches"),
]

RATES, CLIPS, EPOCHS = [0.1, 0.03, 0.3], [0.05, 1.0, 0.2], 3


def make_models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in RATES]


def data(*lead: int) -> TensorDataset:
    torch.manual_seed(1)
    return TensorDataset(torch.randn(12, *lead, 4, dtype=torch.float64), torch.randint(3, (12, *lead)))


def array(**options: Any) -> Any:
    return hf.lightning.LightningArray(
        make_models(),
        loss=F.cross_entropy,
        optimizer=lambda params: hf.optim.SGD(params, lr=RATES, momentum=0.9),
        **{"scheduler": lambda optimizer: StepLR(optimizer, 1, gamma=0.5), "clip_norm": CLIPS, **options},
    )


def trainer(folder: Path, **options: Any) -> Any:
    return lightning.Trainer(
        **{
            "max_epochs": EPOCHS,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )


def alone(member: int, loader: Any, accumulate: int = 1, own: bool = False) -> nn.Module:
    model = make_models()[member]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATES[member], momentum=0.9)
    scheduler = StepLR(optimizer, 1, gamma=0.5)
    for _ in range(EPOCHS):
        for k, (x, y) in enumerate(loader):
            if k % accumulate == 0:
                optimizer.zero_grad()
            inputs, target = (x[member], y[member]) if own else (x, y)
            (F.cross_entropy(model(inputs), target) / accumulate).backward()
            if (k + 1) % accumulate == 0 or k + 1 == len(loader):
                nn.utils.clip_grad_norm_(model.parameters(), CLIPS[member])
                optimizer.step()
        scheduler.step()
    return model


def assert_alone(module: Any, loader: Any, **options: Any) -> None:
    for member, model in enumerate(module.members):
        for ours, theirs in zip(model.parameters(), alone(member, loader, **options).parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_members_train_as_alone(accumulate: int, tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=4)
    module, run = array(accumulate=accumulate), trainer(tmp_path)
    run.fit(module, loader)
    assert_alone(module, loader, accumulate=accumulate)
    assert run.global_step == EPOCHS * -(-3 // accumulate)
    for member, rate in enumerate(RATES):
        assert float(run.callback_metrics[f"lr/{member}"]) == pytest.approx(rate * 0.5 ** (EPOCHS - 1))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def test_what_is_logged(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=5)
    module = array(metrics={"accuracy": accuracy}, tags=["a", "b", "c"])
    run = trainer(tmp_path)
    run.fit(module, loader, loader)
    found = run.validate(module, loader, verbose=False)[0]
    x, y = data().tensors
    members = [model.eval() for model in module.members]
    for name, model in zip("abc", members, strict=True):
        assert found[f"val_loss/{name}"] == pytest.approx(F.cross_entropy(model(x), y).item())
        assert found[f"val_accuracy/{name}"] == pytest.approx(accuracy(model(x), y).item())
    each = [found[f"val_loss/{name}"] for name in "abc"]
    assert found["val_loss"] == pytest.approx(sum(each) / 3)
    assert "train_loss/a" in run.callback_metrics or "val_loss/a" in run.callback_metrics
    outputs = run.predict(module, DataLoader(data().tensors[0], batch_size=12))[0]
    torch.testing.assert_close(outputs, torch.stack([model(x) for model in members]))


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    loader = DataLoader(data(), batch_size=4)
    first, half = array(), trainer(tmp_path, max_epochs=1)
    half.fit(first, loader)
    half.save_checkpoint(tmp_path / "half.ckpt")
    module = array()
    trainer(tmp_path).fit(module, loader, ckpt_path=tmp_path / "half.ckpt")
    assert_alone(module, loader)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_clip_val": 1.0}, r"gradient_clip_val=1.0\) would clip all members by one norm: .*clip_norm="),
        ({"accumulate_grad_batches": 2}, r"accumulate_grad_batches=2\) is for automatic .*accumulate="),
        (
            {"callbacks": [lightning.pytorch.callbacks.LearningRateMonitor()]},
            "LearningRateMonitor logs one rate for all members",
        ),
    ],
)
def test_what_a_trainer_does_for_one_model(option: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **option).fit(array(), DataLoader(data(), batch_size=4))
